"""Probing the memory changes nothing of a run, and meets the longest sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import RECIPES, few, make
from tests.contract.runs import rows
from trlx_like.models.compaction import Compaction
from trlx_like.trainers.probe import probe


def trace(name: str, folder: Path, **changes: Any) -> Any:
    trainer = make(name, folder, **{"train.total_steps": 3, **changes})
    trainer.learn()
    timeless = [{key: value for key, value in row.items() if "time" not in key} for row in rows(folder)]
    return timeless, [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("name", few(RECIPES))
def test_a_probe_changes_nothing(name: str, tmp_path: Path) -> None:
    probed, plain = (
        trace(name, tmp_path / str(on), **{"train.probe_memory": on, "train.minibatch_size": 1}) for on in (True, False)
    )
    assert probed[0] == plain[0]
    assert all(map(torch.equal, probed[1], plain[1]))


def test_it_meets_the_longest_sample_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"train.probe_memory": True, "train.total_steps": 1, "sampler.batch_size": 1, "method.chunk_size": 2}
    trainer = make("PPOTrainer", tmp_path, **options)
    seen: list[tuple[str, int, int]] = []
    at_once: list[tuple[int, int | None]] = []
    generate, loss = trainer.sampler.engine.generate, trainer.loss

    def generated(*args: Any, **kwargs: Any) -> Any:
        made = generate(*args, **kwargs)
        seen.append(("generate", made.prompt.shape[1], made.response.shape[1]))
        at_once.append((len(made), kwargs.get("at_once")))
        return made

    def learned(batch: Any) -> Any:
        seen.append(("loss", batch.prompt.shape[1], batch.response.shape[1]))
        return loss(batch)

    monkeypatch.setattr(trainer.sampler.engine, "generate", generated)
    monkeypatch.setattr(trainer, "loss", learned)
    trainer.learn()
    assert at_once[0] == (2, 1)  # one prompt takes the place of the other
    assert seen[:2] == [("generate", 14, 6), ("loss", 14, 6)]  # seq_length 20, max_new_tokens 6
    offline = make("ILQLTrainer", tmp_path / "offline")
    offline.make_experience()
    assert offline.longest(1).response.shape[1] == max(len(element.response) for element in offline.store.elements)


def test_it_reads_every_row_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts are equal, and would be read once."""
    shared: list[str] = []
    of = Compaction.of
    trainer = make("GRPOTrainer", tmp_path, **{"train.probe_memory": True, "train.total_steps": 1})

    def counted(self: Compaction, *args: Any, **kwargs: Any) -> Any:
        shared.append("batch")
        return of(self, *args, **kwargs)

    monkeypatch.setattr(Compaction, "of", counted)
    probe(trainer)
    assert not shared
    trainer.learn()
    assert shared and trainer.model.compaction.share
