"""Log-probabilities of the reference that are computed once are those that it would compute in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import LORA, make
from tests.contract.runs import rows
from tests.tiny import save_tiny
from trlx_like.data.columns import ColumnRows
from trlx_like.errors import DataError


@pytest.mark.parametrize(("trained", "other"), [({}, True), ({"model.peft_config": LORA}, False)])
def test_of_kto(trained: dict[str, Any], other: bool, tmp_path: Path) -> None:
    """And the rows lie in flat tensors, beside no second model."""
    trained = {**trained, "model.ref_model_path": save_tiny(tmp_path / "other", seed=7) if other else None}
    held_out = [{"prompt": "ab", "completion": " d", "label": True}, {"prompt": "b", "completion": "a", "label": False}]
    runs = []
    for precompute in (True, False):
        changes: dict[str, Any] = {"method.precompute_ref_log_probs": precompute, "eval_samples": held_out}
        changes |= {"eval_prompts": None, "train.total_steps": 4, "train.save_best": False, "train.eval_interval": 2}
        trainer = make("KTOTrainer", tmp_path / str(precompute), **changes, **trained)
        trainer.learn()
        assert isinstance(trainer.store.elements, ColumnRows)
        assert precompute is False or trainer.model.reference_modules() == []
        runs.append(rows(tmp_path / str(precompute)))
    for got, expected in zip(*runs, strict=True):
        assert got == pytest.approx(expected, abs=1e-4)
    assert "eval/kl" in runs[0][0] and abs(runs[0][-1]["rewards/chosen"]) > 1e-3


def test_a_resumed_run_wants_the_same_data(tmp_path: Path) -> None:
    once = {"method.precompute_ref_log_probs": True, "train.total_steps": 2}
    make("KTOTrainer", tmp_path, **once).learn()
    others = [{"prompt": "ab", "completion": " cd"}, *[("the", " sat.")] * 4]
    forced = {"train.resume_from_checkpoint": "auto", "train.force_resume": True}
    resumed = make("KTOTrainer", tmp_path, samples=others, **once, **forced)
    with pytest.raises(DataError, match=r"^samples: the resumed run had 5 rows, which are not the 5 given now"):
        resumed.learn()
