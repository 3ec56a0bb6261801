"""Steps of decoding that are replayed change no bit of what a trainer learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import make
from trlx_like.samplers import recorded
from trlx_like.samplers.recorded import Steps


@pytest.mark.parametrize(
    "name", ["PPOTrainer", "GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "RFTTrainer", "DistillTrainer"]
)
def test_weights_are_those_of_a_run_whose_modules_compute_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, record = list[Any](), Steps._record

    def keep(self: Steps, *given: Any) -> Any:
        records.append(record(self, *given))
        return records[-1]

    monkeypatch.setattr(Steps, "_record", keep)
    monkeypatch.setattr(recorded, "WORTH", 1)
    learned = []
    for tracer in (False, True):
        monkeypatch.setattr(recorded, "TRACER", tracer)
        assert not records
        trainer = make(name, tmp_path / str(tracer))
        trainer.learn()
        learned.append(trainer.model.state_dict())
    assert records and learned[0].keys() == learned[1].keys()
    for key, weight in learned[0].items():
        assert torch.equal(weight, learned[1][key]), key
