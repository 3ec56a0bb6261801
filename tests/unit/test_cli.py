"""The command line: what it prints, what it exits with, and a whole run from YAML."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import trlx_like
from tests.tiny import save_tiny
from tests.unit.cli_support import TOKENS, TRAIN, ppo_file, run, said, write_yaml
from trlx_like.cli import KINDS, app
from trlx_like.config import TRLConfig
from trlx_like.presets import PRESETS, default_ppo_config

# A trainer that trains nothing: what reaches it is what is tested.
ECHO = """\
from trlx_like import SFTConfig, register_method, register_trainer

@register_method
class EchoConfig(SFTConfig):
    loud: bool = False
    \"\"\"Whether to shout.\"\"\"

@register_trainer
class EchoTrainer:
    method_class = EchoConfig
    uses = frozenset({"samples"})

    def __init__(self, config, samples, **_):
        self.config, self.samples = config, samples

    def learn(self):
        if self.config.method.loud:
            raise ArithmeticError("too loud")
        train = self.config.train
        print("learning", train.seed, train.resume_from_checkpoint, self.samples)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In one place for all tests: another file may not take the names of this one."""
    file = tmp_path_factory.mktemp("plugin") / "echo.py"
    file.write_text(ECHO)
    return file


def echo_file(folder: Path, **method: Any) -> Path:
    (folder / "echo.txt").write_text("a\nb\n")
    return write_yaml(
        folder / "echo.yml",
        model={"model_path": "no/model"},
        train={**TRAIN, "trainer": "EchoTrainer"},
        method={"name": "EchoConfig", "gen_kwargs": TOKENS, **method},
        data={"samples": "echo.txt"},
    )


def program(*words: str, folder: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, *(["-m", "trlx_like"] if code is None else ["-c", code]), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_help_and_mistakes_come_without_torch(tmp_path: Path) -> None:
    (tmp_path / "broken.yml").write_text("train:\n  sed: 1\n")
    commands = ["--help", "--version", "list trainers", "list trackers", "list presets", "show-config ppo"]
    commands += ["check broken.yml", "train broken.yml", "train broken.yml --num-processes 2", "train nowhere.yml"]
    code = f"""
import sys
from trlx_like.cli import app
for line in {commands}:
    try:
        app(line.split())
    except SystemExit as end:
        print("exit", end.code, *{{"torch", "transformers"}} & set(sys.modules))
"""
    done = program(folder=tmp_path, code=code)
    assert done.returncode == 0, done.stderr
    exits = [line for line in done.stdout.splitlines() if line.startswith("exit")]
    assert exits == ["exit 0"] * 6 + ["exit 2"] * 4
    assert f"trlx-like {trlx_like.__version__}\n" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # as tests/distributed/test_commands.py, with an offline trainer
def test_two_processes_train_together(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    (tmp_path / "samples.jsonl").write_text('["a b", " c"]\n["b", " a"]\n["c a", " b"]\n')
    write_yaml(
        tmp_path / "sft.yml",
        model={"model_path": "model"},
        train={**TRAIN, "trainer": "SFTTrainer", "eval_interval": 9},
        method={"name": "SFTConfig", "gen_kwargs": TOKENS},
        data={"samples": "samples.jsonl"},
        backend={"device": "cpu"},
    )
    done = program("train", "sft.yml", "--num-processes", "2", "--set", "train.checkpoint_dir=run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "losses/total_loss" in row] == [1, 2]
    # Two that know of each other: both have random numbers of their own in the one checkpoint.
    assert len(list((tmp_path / "run").glob("checkpoint_2/state/rank_*"))) == 2
    assert (tmp_path / "run" / "checkpoint_2" / "hf_model" / "config.json").is_file()


@pytest.mark.parametrize(
    "words",
    [["nothing"], ["train"], ["train", "a.yml", "--restarts", "0"], ["generate", "model"], ["list", "--x"]],
)
def test_a_wrong_use_exits_with_2(here: Path, words: list[str]) -> None:
    assert "Usage: " in said(2, *words)


def test_a_mistake_is_a_sentence_and_with_traceback_its_place(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_yaml(here / "x.yml", model={"model_path": "m"}, train={**TRAIN, "trainer": "PPOTraner"})
    sentences = said(2, "train", file).splitlines()
    assert len(sentences) == 2
    assert "train.trainer: unknown trainer 'PPOTraner'. Did you mean PPOTrainer?" in sentences[1]
    for words in (["--traceback", "train", file], ["train", file, "--traceback"]):
        shown = said(2, *words)
        assert shown.startswith("Traceback (most recent call last):")
        assert shown.rstrip().endswith(sentences[1])
    # Of two processes that find the same mistake, one says it.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TRLX_LIKE_MEETING", str(here))
    assert [said(2, "check", "no.yml") for _ in range(2)] == [f"no.yml: there is no such file in {Path.cwd()}.\n", ""]


def test_a_mistake_of_ours_is_not_hidden(here: Path, plugin: Path) -> None:
    result = run("train", echo_file(here, loud=True), "--plugin", plugin)
    assert result.exit_code == 1
    assert isinstance(result.exception, ArithmeticError)


def test_ctrl_c_before_there_is_anything_to_save(here: Path, plugin: Path) -> None:
    (here / "slow.py").write_text("raise KeyboardInterrupt")
    file = echo_file(here)
    assert run("check", file, "--plugin", plugin, "--set", "data.metric_fn=slow.py:f").exit_code == 130


def test_settings_and_plugins_reach_the_trainer(here: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = echo_file(here)
    words = ["train", file, "--plugin", plugin, "--set", "train.seed=7", "--set", "train.tags=[x]", "--resume"]
    assert "learning 7 auto ['a', 'b']" in said(0, *words)
    assert "learning 1000 None ['a', 'b']" in said(0, "train", file, "--plugin", plugin)
    assert said(2, "train", file, "--plugin", plugin, "--set", "train.seed") == (
        "--set train.seed: must be key=value, for example train.seed=1.\n"
    )
    monkeypatch.setenv("RANK", "0")  # started by torchrun: it starts no others itself
    assert "learning" in said(0, "train", file, "--plugin", plugin, "--num-processes", 2)


def test_the_names_of_every_kind(here: Path, plugin: Path) -> None:
    lines = dict(line.split(": ") for line in said(0, "list").splitlines())
    assert list(lines) == KINDS
    assert {"PPOTrainer", "SFTTrainer"} <= set(lines["trainers"].split(", "))
    assert {"adam", "adamw", "sgd"} <= set(lines["optimizers"].split(", "))
    assert {"constant", "cosine_annealing"} <= set(lines["schedulers"].split(", "))
    assert {"jsonl", "wandb"} <= set(lines["trackers"].split(", "))
    assert lines["pipelines"] == "PromptPipeline"
    assert lines["engines"] == "copy, paged, transformers, vllm, vllm_colocated"
    for kind, names in lines.items():
        assert said(0, "list", kind).splitlines() == names.split(", ")
    assert "EchoTrainer" in said(0, "list", "trainers", "--plugin", plugin).splitlines()
    assert said(2, "list", "planets") == f"trlx-like list ('planets') must be one of {', '.join(KINDS)}.\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("tr", ["train"]), ("show", ["show-config"]), ("list tra", ["trainers", "trackers"]), ("show-config pp", ["ppo"])],
)
def test_the_shell_completes(typed: str, completed: list[str]) -> None:
    words = ["trlx-like", *typed.split()]
    completing = {
        "_TRLX_LIKE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    result = CliRunner().invoke(app, prog_name="trlx-like", env=completing)
    assert sorted(result.output.split()) == sorted(completed)
    shown = said(0, "--help")
    assert "--install-completion" in shown
    assert "..." not in shown.replace("[ARGS]...", "")  # a summary that is cut off


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_as_yaml_with_the_meaning_of_every_option(here: Path, name: str) -> None:
    text = said(0, "show-config", name)
    Path("preset.yml").write_text(text)
    assert TRLConfig.load_yaml("preset.yml") == PRESETS[name]()
    lines = text.splitlines()
    options = [number for number, line in enumerate(lines) if re.match(r"(  )?\w+:", line)]
    assert len(options) > 50
    assert [lines[number] for number in options if not re.match(r" *# \w", lines[number - 1])] == []
    assert "  # Seed of all random numbers of the run.\n  seed: 1000\n" in text


def test_a_file_is_completed(here: Path, plugin: Path) -> None:
    file = echo_file(here, gen_kwargs={"max_new_tokens": 3})
    text = said(0, "show-config", file, "--plugin", plugin, "--set", "train.seed=3")
    assert "  # Whether to shout.\n  loud: false\n" in text  # the plugin's
    assert "  # Fill rows of `train.seq_length` tokens with samples" in text  # its parent's
    assert yaml.safe_load(text)["train"]["seed"] == 3
    text = said(0, "show-config", "ppo", "--set", "train.batch_size=64")
    Path("changed.yml").write_text(text)
    assert TRLConfig.load_yaml("changed.yml") == default_ppo_config().evolve(train={"batch_size": 64})
    assert said(2, "show-config", "pop") == f"pop: there is no such preset ({', '.join(PRESETS)}) and no such file.\n"


def test_a_file_that_only_python_can_run_is_told_apart(here: Path) -> None:
    method = {"name": "PPOConfig", "gen_kwargs": TOKENS}
    train = {**TRAIN, "trainer": "PPOTrainer"}
    file = write_yaml(here / "ppo.yml", model={"model_path": "no/model"}, train=train, method=method)
    assert said(0, "check", str(file)).endswith(
        "All data comes from Python.\nIt trains from Python only: train() has to be given reward_fn and prompts.\n"
    )


def test_a_check_says_what_would_run_and_makes_no_run_folder(here: Path) -> None:
    assert said(0, "check", ppo_file(here, prompts="prompts.txt", reward_fn="rewards.py:score")) == (
        f"OK: PPOTrainer on {here / 'model'}, at most 2 steps of 4 samples, into {here / 'run'}. "
        "prompts: 4 rows of prompts.txt; reward_fn: rewards.py:score.\n"
    )
    assert not (here / "run").exists()


def test_a_check_of_several_reward_functions(here: Path) -> None:
    file = ppo_file(here, reward_fn=["rewards.py:score", "rewards.py:score_and_interrupt"])
    assert said(0, "check", file).endswith("reward_fn: rewards.py:score, rewards.py:score_and_interrupt.\n")
    assert said(2, "check", file, "--set", "reward.weights=[1]") == (
        "data.reward_fn must be a list of at least one function, and reward.weights have one for each: 2 functions, 1 "
        "weights.\n"
    )
    file = ppo_file(here, reward_fn=["rewards.py:score", "rewards.py:none"])
    assert said(2, "check", file) == "data.reward_fn[1] ('rewards.py:none'): rewards.py has no 'none'.\n"


def test_a_check_takes_a_folder_for_a_reward_model(here: Path) -> None:
    (here / "judge").mkdir()
    file = ppo_file(here, reward_fn="judge")
    assert said(2, "check", file).startswith("data.reward_fn ('judge') cannot be loaded as a reward model: ")
    for kind, code in (("GPT2LMHeadModel", 2), ("GPT2ForSequenceClassification", 0)):
        (here / "judge" / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": [kind]}))
        line = said(code, "check", file)
    assert line.endswith("reward_fn: judge.\n")


@pytest.mark.parametrize(
    ("judge", "code", "sentence"),
    [
        ("rewards.py:score", 0, "judge: rewards.py:score.\n"),
        ({"name": "LLM", "url": "http://localhost/v1", "model": "m"}, 0, "judge: llm.\n"),
        ("lmm", 2, "data.judge: unknown judge 'lmm'. Did you mean llm?"),
        ({"model": "m"}, 2, "data.judge: a mapping needs the registered name of a judge under 'name'."),
        (None, 0, "It trains from Python only: train() has to be given reward_fn or judge.\n"),
    ],
)
def test_a_check_knows_judges(here: Path, judge: Any, code: int, sentence: str) -> None:
    read = yaml.safe_load(ppo_file(here).read_text())
    read["method"] = {"name": "OnlineDPOConfig", "gen_kwargs": TOKENS}
    read["train"]["trainer"] = "OnlineDPOTrainer"
    read["data"] = {"prompts": "prompts.txt", "judge": judge}
    assert sentence in said(code, "check", write_yaml(here / "online.yml", **read))


def test_a_check_finds_all_that_is_wrong_with_the_data(here: Path) -> None:
    (here / "bad.jsonl").write_text('"a"\n{"words": "b"}\n')
    file = ppo_file(here, prompts="bad.jsonl", reward_fn="rewards.py:scores", eval_prompts="none.txt")
    lines = said(2, "check", file, "--set", "model.model_path=rewards.py:model").splitlines()
    assert lines == [
        "model.model_path ('rewards.py:model'): rewards.py has no 'model'.",
        'data.prompts: bad.jsonl:2 must be text or messages, or have either under "prompt", not an object with words.',
        f"data.eval_prompts ('none.txt'): there is no such file in {here}.",
        "data.reward_fn ('rewards.py:scores'): rewards.py has no 'scores'.",
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("optimizer.kwargs={learning_rate: 1}", "optimizer.kwargs ({'learning_rate': 1}): "),
        ("optimizer.name=adamv", "optimizer.name: unknown optimizer 'adamv'. Did you mean adam"),
        ("scheduler.name=cosinus", "scheduler.name: unknown scheduler 'cosinus'. Did you mean cosine?"),
        ("train.tracker=wandbb", "train.tracker: unknown tracker 'wandbb'. Did you mean wandb?"),
        ("sampler.engine=vlm", "sampler.engine: unknown sampler engine 'vlm'. Did you mean vllm? Known: copy, "),
        ("backend.kind=fsdb", "backend.kind: unknown backend 'fsdb'. Did you mean fsdp? Known: ddp, deepspeed, fsdp."),
        ("train.pipeline=Prompt", "train.pipeline: unknown data pipeline 'Prompt'."),
        ("train.trainer=SFTTrainer", "train.trainer (SFTTrainer) needs method.name: SFTConfig, not PPOConfig."),
    ],
)
def test_a_check_looks_up_every_name(here: Path, change: str, sentence: str) -> None:
    assert said(2, "check", ppo_file(here), "--set", change).startswith(sentence)
