"""What a checkpoint says that it was made with: options, data, code and versions."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import tiny_config
from trlx_like import TRLConfig
from trlx_like.errors import CheckpointError
from trlx_like.imports import import_name
from trlx_like.rewards.judges import make_judge
from trlx_like.rewards.weighted import WeightedRewards
from trlx_like.trainers.provenance import FILE, changes_since, checked, code_digest, made_with, rows_digest, table


def config(**changes: Any) -> TRLConfig:
    values = {
        "model": {"model_path": tiny_config()},
        "method": {"name": "SFTConfig"},
        "train": {"trainer": "SFTTrainer", "total_steps": 9, "epochs": 1, "batch_size": 4},
    }
    return TRLConfig.update(values, changes)


def reward(outputs: list[str]) -> list[float]:
    return [0.0 for _ in outputs]


def test_data_is_known_by_its_rows() -> None:
    rows = ["a", {"prompt": "b", "n": [1, 2.5]}, ("c", "d"), {"array": np.arange(2), "tensor": torch.ones(1)}]
    again = ["a", {"prompt": "b", "n": [1, 2.5]}, ["c", "d"], {"array": np.arange(2), "tensor": torch.ones(1)}]
    assert rows_digest(rows) == rows_digest(again)
    assert rows_digest(rows).startswith("4 rows, ")
    others = [rows[:3], [*rows[:3], "e"], [rows[1], rows[0], *rows[2:]], [*rows[:3], {"array": np.arange(3)}]]
    assert len({rows_digest(some) for some in [rows, *others]}) == 5
    assert rows_digest([object()]) == rows_digest([object()])  # no addresses


def test_code_is_known_by_its_file(tmp_path: Path) -> None:
    digests = []
    for folder, line in (("a", "0.0"), ("b", "0.0"), ("c", "1.0")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def score(outputs):\n    return [{line}]\n")
        digests.append(code_digest(import_name(f"{tmp_path / folder / 'mine.py'}:score", "x")))
    assert digests[0] == digests[1] != digests[2]
    assert all(digest.startswith("score, ") for digest in digests)
    assert code_digest(functools.partial(reward, outputs=[])) == code_digest(reward)
    assert code_digest(WeightedRewards([reward, max])) == f"{code_digest(reward)}; max"
    assert code_digest(make_judge({"name": "llm", "model": "m", "url": "http://localhost:1"}, "judge")) == "LLMJudge"


def put(folder: Path, **given: Any) -> None:
    (folder / FILE).write_text(json.dumps(made_with(config(), given)))


def test_what_has_changed_since_a_checkpoint(tmp_path: Path) -> None:
    put(tmp_path, samples=["a", "b"], reward_fn=reward, metric_fn=None)
    same = made_with(config(), {"samples": ["a", "b"], "reward_fn": reward})
    assert changes_since(tmp_path, config(), same) == []
    other = made_with(config(), {"samples": ["a"], "eval_prompts": ["c"], "reward_fn": len})
    other["versions"]["torch"] = "3.0"
    changes = changes_since(tmp_path, config(**{"train.epochs": 2}), other)
    verdicts = {change.option: change.refused is None for change in changes}
    assert verdicts == {
        **{"train.epochs": True, "samples": False, "eval_prompts": False},
        **{"code of reward_fn": True, "version of torch": True},
    }
    lines = table(changes).splitlines()
    assert len(lines) == 5 and len({line.index("->") > 0 for line in lines}) == 1
    with pytest.raises(CheckpointError, match="of which 2 cannot change:\n") as caught:
        checked(changes, tmp_path, force=False)
    assert all(line in str(caught.value) for line in lines)
    assert "forced, though the run would go on with other data" in checked(changes, tmp_path, force=True)


@pytest.mark.parametrize("content", [None, "{", '{"config": {}}', "[]"])
def test_a_checkpoint_without_a_record(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / FILE).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{FILE} cannot be read, so nothing can be compared"):
        changes_since(tmp_path, config(), made_with(config(), {}))
