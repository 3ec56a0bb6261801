"""Options that change between a stop and a resume: applied from that step on and recorded, or refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.contract.recipes import RECIPES, few, make
from tests.contract.runs import StopAfter, rows, run_until_stopped
from trlx_like.checkpoint.claim import LIST
from trlx_like.errors import CheckpointError
from trlx_like.tracking import TRACKERS
from trlx_like.trainers.run import names_of

AUTO = {"train.resume_from_checkpoint": "auto"}
LR = "optimizer.kwargs.lr"


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def trained(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("name", few(RECIPES))
def test_a_changed_learning_rate_takes_effect_and_is_recorded(name: str, tmp_path: Path) -> None:
    """With a rate of 0 the weights stay as they were at the stop, whatever the optimiser remembers."""
    first = make(name, tmp_path, callbacks=[StopAfter(2)])
    run_until_stopped(first)
    resumed = make(name, tmp_path, **{LR: 0.0}, **AUTO)
    resumed.learn()
    assert resumed.progress.step > 2
    assert all(torch.equal(a, b) for a, b in zip(trained(resumed), trained(first), strict=True))
    rates = {row["step"]: row["learning_rate"] for row in rows(tmp_path) if "learning_rate" in row}
    assert {step: rate for step, rate in rates.items() if step <= 2} == {1: 3e-3, 2: 3e-3}
    assert {rate for step, rate in rates.items() if step > 2} == {0.0}
    start, again = history(tmp_path)
    assert (start["event"], start["step"], start["changes"]) == ("started", 0, [])
    assert (again["event"], again["step"], again["from"]) == ("resumed", 2, str(tmp_path / "checkpoint_002"))
    assert again["changes"] == [{"option": LR, "was": 3e-3, "now": 0.0, "refused": None}]
    assert yaml.safe_load((tmp_path / "config.yml").read_text())["optimizer"]["kwargs"]["lr"] == 0.0


@pytest.mark.parametrize("name", list(RECIPES))
def test_other_data_is_refused_and_leaves_the_folder_as_it_was(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_until_stopped(make(name, tmp_path, callbacks=[StopAfter(1)]))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != LIST}
    data = next(key for key in ("prompts", "samples", "preferences") if key in RECIPES[name].arguments)
    rows_of = RECIPES[name].arguments[data]
    other: dict[str, Any] = {data: rows_of() if callable(rows_of) else [*rows_of[1:], rows_of[0]]}
    changes = {"train.seed": 8, "train.checkpoint_interval": 7, "train.batch_size": 5, **other, **AUTO}
    with pytest.raises(CheckpointError) as caught:
        make(name, tmp_path, **changes).learn()
    verdicts = {line.split()[0]: line for line in str(caught.value).splitlines() if line.startswith("  ")}
    assert all("refused: " in verdicts[option] for option in ("train.seed", "train.batch_size"))
    assert callable(rows_of) or "refused: the run would go on with other data" in verdicts[data]
    assert verdicts["train.checkpoint_interval"].endswith("applied")
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != LIST}
    assert after == before


def test_force_resumes_all_the_same_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_until_stopped(make("SFTTrainer", tmp_path, callbacks=[StopAfter(1)]))
    with caplog.at_level(logging.INFO, logger="trlx_like"):
        make("SFTTrainer", tmp_path, **{"train.seed": 8, "train.force_resume": True}, **AUTO).learn()
    assert "forced, though the random numbers of the run follow from it" in caplog.text
    (change,) = history(tmp_path)[1]["changes"]
    assert (change["option"], change["was"], change["now"]) == ("train.seed", 3, 8)


def test_a_changed_schedule_is_where_it_would_be_had_it_been_so_from_the_start(tmp_path: Path) -> None:
    """Linear from 1 to 0 within 4 steps: steps 3 and 4 have the factors 1 - 2/4 and 1 - 3/4."""
    run_until_stopped(make("SFTTrainer", tmp_path, callbacks=[StopAfter(2)], **{LR: 0.01}))
    linear = {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 4}
    changes = {"scheduler.name": "linear", "scheduler.kwargs": linear, "train.total_steps": 4, LR: 0.02}
    make("SFTTrainer", tmp_path, **changes, **AUTO).learn()
    rates = [row["learning_rate"] for row in rows(tmp_path) if "learning_rate" in row]
    assert rates == pytest.approx([0.01, 0.01, 0.01, 0.005])


def test_a_changed_schedule_of_another_kind_of_class(tmp_path: Path) -> None:
    """From torch's to one of transformers and back, whose states have other fields. Warm-up: step n has n - 1 of 10."""
    warm = {"scheduler.name": "constant_with_warmup", "scheduler.kwargs": {"num_warmup_steps": 10}}
    run_until_stopped(make("SFTTrainer", tmp_path, callbacks=[StopAfter(1)]))
    run_until_stopped(make("SFTTrainer", tmp_path, callbacks=[StopAfter(3)], **warm, **AUTO))
    make("SFTTrainer", tmp_path, **{"train.total_steps": 4}, **AUTO).learn()
    rates = [row["learning_rate"] for row in rows(tmp_path) if "learning_rate" in row]
    assert rates == pytest.approx([3e-3, 3e-4, 6e-4, 3e-3])
    assert [row["step"] for row in history(tmp_path)] == [0, 1, 3]


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_file_of_a_run_is_on_its_list(name: str, tmp_path: Path) -> None:
    """What is not on it would never be set aside, and a second run would be refused its name."""
    trainer = make(name, tmp_path, **{"train.checkpoint_interval": 2, "train.total_steps": 3})
    trainer.learn()
    listed: set[str] = set()
    for line in (tmp_path / LIST).read_text().splitlines():
        row = json.loads(line)
        listed = (listed | set(row.get("made", ()))) - set(row.get("gone", ()))
    assert {path.name for path in tmp_path.iterdir()} == listed | {LIST}
    assert "config.yml" in listed and any(name.startswith("checkpoint_") for name in listed)
    assert {name for name in names_of(trainer.config) if (tmp_path / name).exists()} <= listed
    assert "jsonl" in TRACKERS.names()
