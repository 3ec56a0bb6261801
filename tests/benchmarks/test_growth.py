"""Data does not grow: what a row takes, what a start reads, and what a step makes, counted and not timed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.growth import BATCH, KINDS, config, measure, rows, write
from tests.unit.data.test_columns import assert_equal
from trlx_like.api import make_trainer
from trlx_like.data import Experience
from trlx_like.data.flat import FlatRows, LazyRows
from trlx_like.pipelines import prepared
from trlx_like.pipelines.sources import load_rows
from trlx_like.pipelines.tokens import TextEncoder

ROWS = 300


def made(kind: str, folder: Path, count: int = ROWS) -> Any:
    """A trainer on the benchmark's rows, with a store that is filled."""
    file = folder / f"{kind}.jsonl"
    write(file, rows(kind, count))
    reward: dict[str, Any] = {"reward_fn": lambda samples, **_: [0.0] * len(samples)} if kind == "prompts" else {}
    trainer = make_trainer(config(kind, file, folder / "run"), **reward)
    if kind != "prompts":
        trainer.make_experience()
    return trainer


def experiences() -> list[object]:
    """The rows that the process holds as objects."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Experience)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_flat_and_are_read_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    ahead = TextEncoder.read_ahead

    def watched(self: TextEncoder, texts: Any) -> None:
        read.append(1)
        ahead(self, texts)

    monkeypatch.setattr(TextEncoder, "read_ahead", watched)
    monkeypatch.setattr(prepared, "FEWEST", ROWS)
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path / "cache"))
    before = experiences()  # of other tests of the process
    trainer = made(kind, tmp_path)
    asked = len(read)
    assert asked > 0
    held = trainer.prompts.pipeline.ids if kind == "prompts" else trainer.store.elements
    assert isinstance(held, LazyRows) and (len(held) == ROWS or (kind == "packed" and len(held) < ROWS))
    assert not {id(thing) for thing in experiences()} - {id(thing) for thing in before}
    (file,) = (tmp_path / "cache").iterdir()
    tokens = {"prompts": 60, "dpo": 310, "reward": 310}.get(kind, 160) + 8 * (kind in ("ilql", "kto")) * 100
    assert file.stat().st_size < ROWS * (5 * tokens + 64)
    again = made(kind, tmp_path)
    assert len(read) - asked == (1 if kind == "prompts" else 0)  # the evaluation prompts are few
    if kind == "prompts":
        assert again.prompts.take(BATCH) == trainer.prompts.take(BATCH)
    else:
        monkeypatch.setattr(FlatRows, "row", None)  # a batch is gathered, not made of its rows
        batches = (next(each.store.batches(BATCH, torch.Generator().manual_seed(0))) for each in (trainer, again))
        assert_equal(*batches)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_all_forms_hold_the_same_rows(form: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows.{form}"
    write(file, rows("dpo", 3))
    assert load_rows(str(file), "data.preferences") == list(rows("dpo", 3))


def test_the_benchmark_runs(tmp_path: Path) -> None:
    made("dpo", tmp_path, 20)
    assert min(measure("dpo", tmp_path / "dpo.jsonl").values()) > 0
