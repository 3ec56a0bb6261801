"""The command line: a whole run from YAML, and what is made of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from tests.tiny import save_tiny, tiny_tokenizer
from tests.unit.cli_support import ppo_file, run, said
from trlx_like.config import TRLConfig


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a PPO run of two steps that the command line made."""
    folder = tmp_path_factory.mktemp("cli")
    save_tiny(folder / "model")
    assert run("train", ppo_file(folder)).exit_code == 0
    return folder


def steps(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "losses/total_loss" in row]


def test_a_run_from_yaml(finished: Path) -> None:
    assert steps(finished) == [1, 2]
    config = TRLConfig.load_yaml(finished / "run" / "config.yml")
    assert (config.train.total_steps, config.data.prompts) == (2, str(finished / "prompts.txt"))
    assert (finished / "run" / "checkpoint_2" / "hf_model" / "config.json").is_file()


def test_a_run_with_several_rewards_in_workers(finished: Path, here: Path) -> None:
    """All of it from the file: the functions are in one that only its path names."""
    (here / "model").symlink_to(finished / "model")
    file = ppo_file(here, reward_fn=["rewards.py:score", f"{here / 'rewards.py'}:score"])
    options = ["--set", "reward.weights=[1, -0.5]", "--set", "reward.workers=1"]
    assert run("train", file, *options).exit_code == 0
    for line in (here / "run" / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["reward/score"] == row["reward/score_2"] == row["output"].count("a") == 2 * row["reward"]


def test_text_from_a_run_a_checkpoint_and_a_model(finished: Path) -> None:
    words = ["--prompt", "ab", "--prompt", "cd", "--num", 2, "--max-new-tokens", 3, "--seed", 1]
    made = {name: said(0, "generate", finished / name, *words) for name in ("model", "run", "run/checkpoint_2")}
    for text in made.values():
        samples = text.removesuffix("\n").split("\n\n")
        assert [sample[:2] for sample in samples] == ["ab", "ab", "cd", "cd"]
        assert all(len(sample) <= 5 for sample in samples)
    assert said(0, "generate", finished / "model", *words) == made["model"]
    assert said(0, "generate", finished / "model", *words[:-1], 2) != made["model"]
    for greedy in (["--temperature", 0], ["--top-k", 1]):
        first, second = said(0, "generate", finished / "model", *words[2:6], *greedy).removesuffix("\n").split("\n\n")
        assert first == second


def test_the_best_checkpoint_is_what_a_run_stands_for(finished: Path, here: Path) -> None:
    best = here / "run" / "best_checkpoint"
    best.parent.mkdir()
    os.rename(finished / "run" / "checkpoint_2", best)
    try:
        greedy = ["--prompt", "ab", "--temperature", 0]
        assert said(0, "generate", here / "run", *greedy).startswith("ab")
        weights = best / "hf_model" / "config.json"
        content = weights.read_bytes()
        weights.write_bytes(content.replace(b"gpt2", b"gpt3"))
        assert "config.json" in said(2, "generate", here / "run", *greedy)  # damaged
        weights.write_bytes(content)
    finally:
        os.rename(best, finished / "run" / "checkpoint_2")


def test_text_from_an_encoder_decoder(here: Path) -> None:
    save_tiny(here / "model", "t5", seed=9)
    tiny_tokenizer(ends=True).save_pretrained(here / "model")
    words = ["--prompt", "ab", "--prompt", "the cat", "--max-new-tokens", 5, "--temperature", 0]
    first, second = said(0, "generate", here / "model", *words).removesuffix("\n").split("\n\n")
    lm = AutoModelForSeq2SeqLM.from_pretrained(here / "model")
    for text, prompt in ((first, "ab"), (second, "the cat")):
        ids = torch.tensor([tiny_tokenizer(ends=True)(prompt).input_ids])
        made = lm.generate(ids, max_new_tokens=5, do_sample=False)[0]
        assert text == f"{prompt}\n{tiny_tokenizer().decode(made, skip_special_tokens=True)}"


def test_nothing_to_generate_from(here: Path, finished: Path) -> None:
    assert said(2, "generate", here, "--prompt", "a") == (
        f"{here} is not a model, a checkpoint, or a run with a checkpoint.\n"
    )
    for name in ("none", "none/of/it"):
        assert said(2, "generate", here / name, "--prompt", "a") == f"{here / name}: there is no such folder.\n"
    assert said(2, "generate", finished / "model", "--prompt", "a", "--max-new-tokens", 64) == (
        "--max-new-tokens (64) must be below the model's 64 positions.\n"
    )


def test_the_page_of_a_run(finished: Path, here: Path) -> None:
    page = finished / "run" / "report.html"
    page.unlink(missing_ok=True)
    assert said(0, "report", finished / "run").strip() == str(page)
    assert "losses/total_loss" in page.read_text(encoding="utf-8")
    assert said(2, "report", here) == f"{here} is not a run folder: it has no metrics.jsonl.\n"
    assert "there is no such folder" in said(2, "report", here / "none")


def test_a_run_that_is_interrupted_is_saved_and_continued(finished: Path, here: Path) -> None:
    os.symlink(finished / "model", here / "model")
    file = ppo_file(here, reward_fn=f"{here / 'rewards.py'}:score_and_interrupt")
    assert run("train", file).exit_code == 130
    assert steps(here) == [1]
    assert (here / "run" / "checkpoint_1").is_dir()
    assert run("train", file, "--resume").exit_code == 0
    assert steps(here) == [1, 2]
