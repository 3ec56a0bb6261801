"""What the data of `train` implies: rewards beside samples, pairs of labelled answers, held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import make
from tests.unit.pipelines.test_forms import KTO
from trlx_like.config import DataConfig
from trlx_like.errors import ConfigError
from trlx_like.pipelines.given import read_arguments, shaped

NAMES = ("prompts", "eval_prompts", "samples", "eval_samples", "rewards")
LOGS = [{"prompt": "a", "output": "b", "reward": 1.5}, {"prompt": "a", "output": "c", "reward": -1}]


def data(**options: Any) -> DataConfig:
    return DataConfig.from_dict(options)


def test_data_sets_with_splits_become_training_and_evaluation_rows() -> None:
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(LOGS), test=datasets.Dataset.from_list(LOGS[:1]))
    found = read_arguments({"samples": splits}, data(columns={"completion": "output"}), NAMES)
    assert [row["completion"] for row in found["samples"]] == ["b", "c"] and len(found["eval_samples"]) == 1
    found = read_arguments({"prompts": splits, "eval_prompts": splits}, data(), NAMES)
    assert list(found["eval_prompts"]) == ["train", "test"]  # two named sets


def test_rewards_stand_in_the_rows_of_samples() -> None:
    assert shaped({"samples": LOGS}, data(), {"samples", "rewards"})["rewards"] == [1.5, -1]
    assert shaped({"samples": [{"text": "a", "score": "-1"}]}, data(), {"samples", "rewards"})["rewards"] == [
        -1.0
    ]  # csv
    assert shaped({"samples": KTO}, data(), {"samples", "rewards"})["rewards"] == [1.0, 0.0, 1.0]
    assert shaped({"samples": LOGS, "rewards": [0, 1]}, data(), {"samples", "rewards"})["rewards"] == [0, 1]
    assert shaped({"samples": ["a"]}, data(), {"samples", "rewards"})["rewards"] is None
    assert "rewards" not in shaped({"samples": LOGS}, data(), {"samples"})


def test_rows_are_held_out() -> None:
    uses = {"samples", "eval_samples", "eval_prompts"}
    found = shaped({"samples": list("abcd")}, data(eval_split=0.25), uses)
    assert sorted(found["samples"] + found["eval_samples"]) == list("abcd") and len(found["eval_samples"]) == 1
    assert shaped({}, data(eval_split=0.25), uses) == {}
    for rows in ({"samples": ["a"]}, {"samples": ["a", "b"], "eval_samples": ["c"]}):
        with pytest.raises(ConfigError, match=r"data.eval_split \(0.25\) needs a list of two samples at least, and no"):
            shaped(rows, data(eval_split=0.25), uses)
    with pytest.raises(ConfigError, match=r"data.eval_split \(0.25\) needs a trainer that evaluates on held-out rows"):
        shaped({}, data(eval_split=0.25), {"samples", "rewards"})


def test_trainers_take_rows_as_published(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    ilql = make("ILQLTrainer", tmp_path / "a", samples=pandas.DataFrame(LOGS), rewards=None)
    assert ilql.data["rewards"] == [1.5, -1]
    asked = "\n\nHuman: a\n\nAssistant:"
    pairs = (row for row in [{"chosen": f"{asked} bc", "rejected": f"{asked} bd"}])
    dpo = make("DPOTrainer", tmp_path / "c", preferences=pairs, eval_preferences=KTO, **{"train.seq_length": 60})
    assert [len(pair.chosen) for pair in dpo.preferences] == [len(" bc") + 1]  # with EOS
    assert [len(pairs) for pairs in dpo.eval_preferences.values()] == [1]
