"""`trlx-like generate` on a run with a chat template, a stop sequence and reward functions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.cli_support import said

HI = json.dumps([{"role": "user", "content": "hi"}])
OPENING = "calm user hi assistant "


def test_messages_are_written_by_the_template_of_the_run(talking: Path) -> None:
    greedy = ["--temperature", 0, "--max-new-tokens", 6]
    made = said(0, "generate", talking, "--messages", HI, *greedy)
    assert made.startswith(OPENING)
    assert made == said(0, "generate", talking, "--prompt", OPENING, *greedy)


def test_a_stop_sequence_of_the_run_ends_samples(talking: Path, tmp_path: Path) -> None:
    shutil.copytree(talking / "checkpoint_1" / "hf_model", tmp_path / "model")
    words = ["--prompt", "ab", "--num-samples", 40, "--seed", 1]
    ended, free = (said(0, "generate", place, *words).split("\n\n") for place in (talking, tmp_path / "model"))
    assert len(ended) == len(free) == 40  # more than are generated at once
    assert any("e" in text for text in free)
    assert [text.strip("\n") for text in ended] == [text.strip("\n").partition("e")[0] for text in free]


def test_a_file_of_prompts_with_the_reward_of_each_sample(talking: Path) -> None:
    file = talking.parent / "data.jsonl"
    made = said(0, "generate", talking, "--prompts", file, "--num-samples", 2, "--reward").split("\n\n")
    assert len(made) == 8
    for number, (opening, letter) in enumerate([(OPENING, "a")] * 2 + [("ab", "b")] * 2):
        text, score = made[number].strip("\n").split("\n")
        output = text.removeprefix(opening)
        assert text == opening + output
        found, length = output.count(letter), len(output)
        assert score == f"[reward {found - length / 2:.4g}, reward/found {found}, reward/length {length}]"


def test_mistakes_are_found_before_a_model_is_loaded(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trlx_like.continuation import generator

    monkeypatch.setattr(generator, "load_model", None)
    assert "Give a prompt: --prompt, --messages or --prompts." in said(2, "generate", talking)
    assert said(2, "generate", talking, "--messages", "[{").startswith("--messages ('[{') must be JSON: ")
    assert "--prompts ('none.jsonl'): there is no such file" in said(2, "generate", talking, "--prompts", "none.jsonl")
    alone = said(2, "generate", talking.parent / "model", "--prompt", "a", "--reward")
    assert alone.startswith(f"--reward: {talking.parent / 'model'} has no config.yml of a run with data.reward_fn.")
