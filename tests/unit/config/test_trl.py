"""What a configuration file may say, and the sentence for everything it may not."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trlx_like.config import METHODS, TRAINERS, PPOConfig, RewardFnConfig, Section, TRLConfig
from trlx_like.config.problems import listed
from trlx_like.errors import ConfigError

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
VALID = """\
model:
  model_path: gpt2
train:
  total_steps: 10
  seq_length: 64
  epochs: 2
  batch_size: 8
  trainer: PPOTrainer
method:
  name: PPOConfig
"""


def errors_of(tmp_path: Path, text: str | bytes, *overrides: str) -> list[str]:
    """The lines of the error, with the file called `x.yml`."""
    file = tmp_path / "x.yml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        TRLConfig.load_yaml(file, overrides)
    return str(error.value).replace(str(file), "x.yml").split("\n")


def loaded(tmp_path: Path, text: str, *overrides: str) -> TRLConfig:
    (tmp_path / "x.yml").write_text(text)
    return TRLConfig.load_yaml(tmp_path / "x.yml", overrides)


def test_the_shortest_file_gets_the_defaults(tmp_path: Path) -> None:
    config = loaded(tmp_path, VALID)
    assert config.tokenizer.to_dict() == {
        "tokenizer_path": None,
        "padding_side": "left",
        "truncation_side": "right",
        "tokenizer_extra_configs": {},
        "chat_template": None,
        "chat_template_kwargs": {},
    }
    assert (config.optimizer.name, config.scheduler.name, config.scheduler.kwargs) == (
        "adamw",
        "constant",
        {},
    )
    assert config.optimizer.kwargs == {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-6}
    assert (config.train.seed, config.train.max_grad_norm, config.train.trackers) == (1000, 1.0, [])
    assert isinstance(config.method, PPOConfig) and config.method.ratio_threshold == 10.0
    assert config.inert() == []


def test_options_of_rewards_that_do_nothing() -> None:
    assert RewardFnConfig(worker_memory=100, worker_start_limit=5.0, error_value=1.0).inert() == [
        *("worker_memory", "worker_start_limit", "error_value")
    ]
    assert RewardFnConfig(workers=1, worker_memory=100, on_error="value", error_value=1.0).inert() == []


# A setting that is added to the file, and the sentence about it.
TRAIN = {
    "batch_sise: 8": "batch_sise: unknown key. Did you mean train.batch_size?",
    "num_rollouts: 8": "num_rollouts: unknown key. Did you mean method.num_rollouts?",
    "keep_checkpoints: 0": "keep_checkpoints: must be a whole number of at least 1 or null, got 0.",
    "seed: -1": "seed: must be a whole number of at least 0, got -1.",
    "seed: 2.0": "seed: must be a whole number of at least 0, got 2.0.",
    "seed: true": "seed: must be a whole number of at least 0, got true.",
    "seed: '2'": "seed: must be a whole number of at least 0, got '2'.",
    "seed: [1]": "seed: must be a whole number of at least 0, got [1].",
    "seed:": "seed: must be a whole number of at least 0, got null.",
    "seed: !!python/tuple [1]": "seed: the YAML tag !!python/tuple is not allowed; write a plain value.",
    "seed: !mine 1": "seed: the YAML tag !mine is not allowed; write a plain value.",
    "seed: !!int two": "seed: 'two' is not of the type int that it is tagged with.",
    "seed: &a [*a]": "seed.0: contains itself.",
    "minibatch_size: 3": "minibatch_size: 3 does not divide train.batch_size (8).",
    "max_grad_norm: 0": "max_grad_norm: must be a number above 0 or null, got 0.",
    "max_grad_norm: .nan": "max_grad_norm: must be a number above 0 or null, got nan.",
    "group_name: 7": "group_name: must be text or null, got 7.",
    "max_grad_norm: none": ("max_grad_norm: must be a number above 0 or null, got 'none'. Write null for no value."),
    "tags: [a, 1]": "tags: must be a list of texts, got ['a', 1].",
    "tracker: 3": "tracker: must be text, a list of texts or null, got 3.",
    "save_best: no": "save_best: must be true or false, got 'no'.",
    "logging_dir: 7": "logging_dir: must be text or null, got 7.",
    "trainer_kwargs: 1": "trainer_kwargs: must be a mapping of settings, got 1.",
    "1: 2": "1: a key must be text.",
}
METHOD = {
    "gamma: 2": "gamma: must be a number from 0 to 1, got 2.",
    "kl_penalty: k3": "kl_penalty: must be 'kl', 'abs', 'mse' or 'full', got 'k3'.",
    "kl_in: value": "kl_in: must be 'reward' or 'loss', got 'value'.",
    "scale_reward: whiten": "scale_reward: must be 'running', 'ref' or null, got 'whiten'.",
    "cliprange_reward: -1": "cliprange_reward: must be a number above 0 or null, got -1.",
    "norm_reward: true": "norm_reward: true needs method.scale_reward (null) to be 'running' or 'ref'.",
    "gen_kwargs: 5": "gen_kwargs: must be a mapping of settings, got 5.",
    "gen_kwargs: {}": "gen_kwargs.max_new_tokens: missing. It must be a whole number of at least 1.",
    "gen_kwargs: {max_new_tokens: 0}": ("gen_kwargs.max_new_tokens: must be a whole number of at least 1, got 0."),
    "gen_kwargs: {max_new_tokens: 64}": ("gen_kwargs.max_new_tokens: 64 must be below train.seq_length (64)."),
    "gen_kwargs: {max_new_tokens: 4, max_length: 9}": (
        "gen_kwargs.max_length: counts the prompt as well; use max_new_tokens."
    ),
    "gen_kwargs: {max_new_tokens: 4, temperature: 0}": ("gen_kwargs.temperature: must be a number above 0, got 0."),
    "gen_kwargs: {max_new_tokens: 4, x: {y: off}}": ("gen_kwargs.x.y: 'off' is text here; write true or false."),
    "gen_experience_kwargs: {max_new_tokens: 64}": (
        "gen_experience_kwargs.max_new_tokens: 64 must be below train.seq_length (64)."
    ),
    "gen_experience_kwargs: {max_new_tokens: 4, top_p: 0.9}": (
        "gen_experience_kwargs.top_p: 0.9 samples text in a way the loss cannot account for; use 1.0 or null."
    ),
    "gen_experience_kwargs: {max_new_tokens: 4, temperature: [1, 2]}": (
        "gen_experience_kwargs.temperature: [1, 2] is a sweep; text to train on needs one value."
    ),
}
TOP = {
    "trian: {}": "trian: unknown section. Did you mean train?",
    "plugins: p.py": "plugins: must be a list of texts, got 'p.py'.",
    "backend: {device: gpu}": "backend.device: must be 'auto' or 'cpu', got 'gpu'.",
    "data: 7": "data: must be a mapping of settings, got 7.",
    "reward: {time_limit: 0}": "reward.time_limit: must be a number above 0 or null, got 0.",
    "reward: {on_error: skip}": "reward.on_error: must be 'raise', 'abstain' or 'value', got 'skip'.",
    "reward: {max_abstained: 1.5}": "reward.max_abstained: must be a number from 0 to 1, got 1.5.",
    "reward: {weights: [a]}": "reward.weights: must be a list or null, got ['a'].",
    "sampler: {engine: 7}": "sampler.engine: must be text, got 7.",
    "optimizer: {kwargs: {amsgrad: no}}": "optimizer.kwargs.amsgrad: 'no' is text here; write true or false.",
    "zzz: {}": (
        "zzz: unknown section. The sections are model, tokenizer, optimizer, scheduler, method, train, data, reward, "
        "sampler, backend and plugins."
    ),
    "plugins: [no_such_mod]": (
        "plugins.0: plugin 'no_such_mod': no module or installed entry point 'no_such_mod'; "
        "for a file give its path, ending in .py."
    ),
    "tokenizer: {tokenizer_path: 1}": (
        "tokenizer.tokenizer_path: must be a folder, a hub name, a loaded tokenizer or null, got 1."
    ),
    "scheduler: {nam: linear}": "scheduler.nam: unknown key. Did you mean scheduler.name?",
    "scheduler: {x: 1}": "scheduler.x: unknown key. SchedulerConfig has name, kwargs.",
}


@pytest.mark.parametrize(("setting", "sentence"), TRAIN.items())
def test_errors_of_train(tmp_path: Path, setting: str, sentence: str) -> None:
    text = VALID.replace("train:\n", f"train:\n  {setting}\n")
    assert errors_of(tmp_path, text) == [f"x.yml:4: train.{sentence}"]


@pytest.mark.parametrize(("setting", "sentence"), METHOD.items())
def test_errors_of_the_method(tmp_path: Path, setting: str, sentence: str) -> None:
    assert errors_of(tmp_path, VALID + f"  {setting}\n") == [f"x.yml:11: method.{sentence}"]


@pytest.mark.parametrize(("setting", "sentence"), TOP.items())
def test_errors_of_sections(tmp_path: Path, setting: str, sentence: str) -> None:
    assert errors_of(tmp_path, VALID + f"{setting}\n") == [f"x.yml:11: {sentence}"]


MODEL_PATH = "a folder, a hub name, a PretrainedConfig or a loaded model"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("  epochs: 2\n", "", "x.yml:3: train.epochs: missing. It must be a whole number of at least 1."),
        ("  name: PPOConfig", "", f"x.yml:9: method.name: missing. It must be {listed(METHODS.names())}."),
        ("  model_path: gpt2\n", "", f"x.yml:1: model.model_path: missing. It must be {MODEL_PATH}."),
        ("gpt2", "5", f"x.yml:2: model.model_path: must be {MODEL_PATH}, got 5."),
        ("gpt2", "' '", f"x.yml:2: model.model_path: must be {MODEL_PATH}, got ' '."),
        ("model:\n  model_path:", "model:", "x.yml:1: model: must be a mapping of settings, got 'gpt2'."),
        ("model:\n  model_path: gpt2\n", "", "x.yml: model: missing section, with at least model_path."),
        ("method:\n  name: PPOConfig\n", "", "x.yml: method: missing section, with at least name."),
        ("64", "40", "x.yml:9: method.gen_kwargs.max_new_tokens: 40 must be below train.seq_length (40)."),
        ("PPOConfig", "3", "x.yml:10: method.name: the name of a method is text, got 3."),
        ("epochs: 2", "epochs: 2\n  epochs: 3", "x.yml:7: train.epochs: given twice, first on line 6."),
        ("epochs: 2", "epochs: 2\n  [a]: 2", "x.yml:7: train: a key must be text."),
        (
            "epochs: 2",
            "epochs: 2\n  tags: [a",
            "x.yml:8: is not valid YAML: expected ',' or ']', but got ':'.",
        ),
    ],
)
def test_errors_of_what_is_missing_or_malformed(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert VALID.count(old) == 1
    assert errors_of(tmp_path, VALID.replace(old, new)) == [sentence]


def test_a_method_or_trainer_that_is_not_registered(tmp_path: Path) -> None:
    lines = errors_of(tmp_path, VALID.replace("PPOConfig", "PPOConfg").replace("PPOTrainer", "PPOTrainr"))
    assert lines == [
        "x.yml:8: train.trainer: unknown trainer 'PPOTrainr'. Did you mean PPOTrainer? Known: "
        f"{', '.join(TRAINERS.names())}.",
        "x.yml:10: method.name: unknown method 'PPOConfg'. Did you mean PPOConfig? Known: "
        f"{', '.join(METHODS.names())}.",
    ]


REFUSED = [
    ("top_k", 5, "0 or null"), ("top_p", 0.9, "1.0 or null"), ("min_p", 0.1, "null or 0.0"),
    ("typical_p", 0.9, "1.0 or null"), ("eta_cutoff", 0.1, "0.0 or null"),
    ("epsilon_cutoff", 0.1, "0.0 or null"),
    ("repetition_penalty", 1.1, "1.0 or null"), ("no_repeat_ngram_size", 2, "0 or null"),
    ("encoder_repetition_penalty", 1.1, "1.0 or null"), ("encoder_no_repeat_ngram_size", 2, "0 or null"),
    ("num_beams", 2, "1 or null"), ("do_sample", False, "true"), ("min_length", 3, "0 or null"),
    ("min_new_tokens", 3, "null or 0"), ("bad_words_ids", [[1]], "null"), ("suppress_tokens", [1], "null"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["PPOConfig", "GRPOConfig", "RLOOConfig", "OnlineDPOConfig"])
@pytest.mark.parametrize(("option", "value", "use"), REFUSED)
def test_sampling_that_a_loss_cannot_account_for_is_refused(option: str, value: Any, use: str, name: str) -> None:
    kind: Any = METHODS.get(name)
    gen_kwargs = {"max_new_tokens": 4, option: value}
    with pytest.raises(ConfigError) as error:
        kind(gen_kwargs=gen_kwargs)
    shown = "false" if value is False else repr(value)
    assert str(error.value) == (
        f"method.gen_kwargs.{option}: {shown} samples text in a way the loss cannot account for; use {use}. "
        "To keep it for evaluation, set method.gen_experience_kwargs for the training."
    )
    config = kind(gen_kwargs=gen_kwargs, gen_experience_kwargs={"max_new_tokens": 4, "temperature": 0.7})
    assert config.experience_kwargs == {"max_new_tokens": 4, "temperature": 0.7}


def test_values_that_switch_an_option_off_are_accepted() -> None:
    neutral = {
        "top_k": 0,
        "top_p": 1,
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "do_sample": True,
        "min_p": None,
    }
    assert PPOConfig(gen_kwargs={"max_new_tokens": 4, **neutral}).experience_kwargs["top_k"] == 0


def test_a_sweep_in_gen_kwargs_needs_its_own_kwargs_for_experience() -> None:
    sweep = {"max_new_tokens": [4, 60], "temperature": [0.5, 1.0], "eos_token_id": [1, 2]}
    with pytest.raises(ConfigError) as error:
        PPOConfig(gen_kwargs=sweep)
    advice = "To keep it for evaluation, set method.gen_experience_kwargs for the training."
    assert str(error.value).split("\n") == [
        f"method.gen_kwargs.max_new_tokens: [4, 60] is a sweep; text to train on needs one value. {advice}",
        f"method.gen_kwargs.temperature: [0.5, 1.0] is a sweep; text to train on needs one value. {advice}",
    ]
    PPOConfig(gen_kwargs=sweep, gen_experience_kwargs={"max_new_tokens": 4})
    with pytest.raises(ConfigError, match="method.gen_kwargs.temperature: must be a number above 0, got -1"):
        PPOConfig(gen_kwargs={**sweep, "temperature": [0.5, -1]}, gen_experience_kwargs={"max_new_tokens": 4})
    with pytest.raises(ConfigError, match="method.gen_kwargs.temperature: an empty list has no value to try"):
        PPOConfig(gen_kwargs={**sweep, "temperature": []}, gen_experience_kwargs={"max_new_tokens": 4})


def test_the_longest_of_a_sweep_must_fit(tmp_path: Path) -> None:
    text = VALID + "  gen_kwargs: {max_new_tokens: [8, 64]}\n  gen_experience_kwargs: {max_new_tokens: 8}\n"
    assert errors_of(tmp_path, text) == [
        "x.yml:11: method.gen_kwargs.max_new_tokens: 64 must be below train.seq_length (64)."
    ]


def test_all_problems_are_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = VALID.replace("epochs: 2", "epochs: x").replace("gpt2", "1") + "  lam: 3\ntrian: {}\n"
    keys = [line.split(": ")[:2] for line in errors_of(tmp_path, text, "train.seed=x")]
    assert keys == [
        ["--set", "train.seed"],
        ["x.yml:2", "model.model_path"],
        ["x.yml:6", "train.epochs"],
        ["x.yml:11", "method.lam"],
        ["x.yml:12", "trian"],
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "x.yml: must be a mapping of sections (model, train, method, ...)."),
        (b"just words", "x.yml: must be a mapping of sections (model, train, method, ...)."),
        (b"- a\n- b", "x.yml: must be a mapping of sections (model, train, method, ...)."),
        (b"a: 1\n\xff", "x.yml: is not UTF-8 text (byte 5)."),
        (b"{a: 1", "x.yml:1: is not valid YAML: expected ',' or '}', but got '<stream end>'."),
        (
            b"a: \x07",
            "x.yml: is not valid YAML: unacceptable character #x0007: special characters are not allowed.",
        ),
        (b"---\na: 1\n---\nb: 1\n", "x.yml:3: is not valid YAML: but found another document."),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, sentence: str) -> None:
    assert errors_of(tmp_path, content) == [sentence]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path, sentence in (
        (tmp_path / "none.yml", "no such file."),
        (tmp_path, "is a folder, not a YAML file."),
    ):
        with pytest.raises(ConfigError) as error:
            TRLConfig.load_yaml(path)
        assert str(error.value) == f"{path}: {sentence}"


def test_yaml_is_read_as_people_mean_it(tmp_path: Path) -> None:
    text = VALID + (
        "  init_kl_coef: 1e-5\n  horizon: 10_000\n  whiten_rewards: True\n"
        "  gen_kwargs: {max_new_tokens: 0x10, do_sample: true}\n"
        "backend: {mixed_precision: no}\noptimizer: {name: sgd, kwargs: {lr: 1e-3, momentum: .9}}\n"
        "data: {stop_sequences: ['no', off, 2024-01-02]}\nsampler:\n"
    )
    config = loaded(tmp_path, "\ufeff" + text)
    assert config.method.to_dict()["init_kl_coef"] == 1e-5
    assert config.method.to_dict()["horizon"] == 10000
    assert config.method.to_dict()["gen_kwargs"] == {"max_new_tokens": 16, "do_sample": True}
    assert config.backend.mixed_precision == "no"
    assert config.optimizer.kwargs == {"lr": 0.001, "momentum": 0.9}
    assert config.data.stop_sequences == ["no", "off", "2024-01-02"]


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = "defaults: &d {epochs: 5, seed: 1}\n" + VALID.replace("  epochs: 2\n", "  <<: *d\n  seed: 2\n")
    assert errors_of(tmp_path, text)[0].startswith("x.yml:1: defaults: unknown section.")
    config = loaded(tmp_path, VALID.replace("  epochs: 2\n", "  <<: [{epochs: 5, seed: 1}, {epochs: 6}]\n  seed: 2\n"))
    assert (config.train.epochs, config.train.seed) == (5, 2)


def test_overrides_of_the_command_line(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        VALID.replace("epochs: 2", "epochs: x"),
        *("train.epochs=3", "train.run_name=", "method.gen_kwargs={max_new_tokens: 4}"),
        *(
            "method.gen_kwargs.temperature=7e-1",
            "backend.mixed_precision=no",
            "data.reward_fn=module:function",
        ),
        "train.checkpoint_dir=a=b",
    )
    assert (config.train.epochs, config.train.run_name, config.train.checkpoint_dir) == (3, None, "a=b")
    assert config.method.to_dict()["gen_kwargs"] == {"max_new_tokens": 4, "temperature": 0.7}
    assert (config.backend.mixed_precision, config.data.reward_fn) == ("no", "module:function")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.batch_sise=4", "--set: train.batch_sise: unknown key. Did you mean train.batch_size?"),
        ("train.epochs=x", "--set: train.epochs: must be a whole number of at least 1, got 'x'."),
        (
            "train.epochs=!!set {}",
            "--set: train.epochs: the YAML tag !!set is not allowed; write a plain value.",
        ),
        ("train.epochs", "--set train.epochs: must be key=value, for example train.seed=1."),
        ("=3", "--set =3: must be key=value, for example train.seed=1."),
        ("train..epochs=3", "--set train..epochs=3: must be key=value, for example train.seed=1."),
        ("train.epochs.x=3", "--set train.epochs.x=3: train.epochs is not a mapping."),
        (
            "train.tags=[a",
            "--set train.tags=[a: is not valid YAML: expected ',' or ']', but got '<stream end>'.",
        ),
        ("trian.epochs=3", "--set: trian: unknown section. Did you mean train?"),
    ],
)
def test_errors_of_overrides(tmp_path: Path, override: str, sentence: str) -> None:
    assert errors_of(tmp_path, VALID, override) == [sentence]


def test_every_field_has_a_docstring() -> None:
    folder = Path(str(sys.modules[Section.__module__].__file__)).parent
    fields = []
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                    if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                        fields.append((node.name, ast.unparse(field.target), after))
    assert len(fields) > 80
    undocumented = [
        (section, name)
        for section, name, after in fields
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert undocumented == []


def test_importing_loads_no_torch() -> None:
    code = "import sys, trlx_like.config; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
