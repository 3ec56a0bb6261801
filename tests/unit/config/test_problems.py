"""All problems of a configuration at once, in the same words from a file and from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.config.support import TRAIN, VALID, errors_of, sentence_of
from trlx_like.config import TRLConfig
from trlx_like.config.methods.ppo import PPOConfig


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


def test_errors_from_python_have_the_same_words_without_a_place() -> None:
    problems: dict[str, Any] = {"gamma": 2, "lamm": 1}
    assert sentence_of(lambda: PPOConfig(**problems)) == (
        "method.gamma: must be a number from 0 to 1, got 2.\nmethod.lamm: unknown key. Did you mean method.lam?"
    )
    values = {"method": {"name": "PPOConfig"}, "model": {"model_path": "a"}, "train": {**TRAIN, "sede": 1}}
    assert sentence_of(lambda: TRLConfig.from_dict(values)) == "train.sede: unknown key. Did you mean train.seed?"
    assert sentence_of(lambda: TRLConfig.from_dict({})).split("\n") == [
        "model: missing section, with at least model_path.",
        "method: missing section, with at least name.",
        "train: missing section, with at least trainer.",
    ]
    wrong: Any = [1]
    assert sentence_of(lambda: TRLConfig.from_dict(wrong)) == "must be a mapping of settings, got [1]."
