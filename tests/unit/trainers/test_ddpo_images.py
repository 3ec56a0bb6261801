"""What a run of DDPO shows: files, tables of evaluations and rounds, and what trackers get."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.contract.images import PROMPTS, brightness
from tests.contract.recipes import make
from tests.contract.runs import rows

NAME = "DDPOTrainer"


def ones(images: Any) -> list[float]:
    return [1.0 for _ in images]


def test_evaluation_leaves_pictures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(NAME, tmp_path)
    with caplog.at_level(logging.INFO):
        trainer.learn()
    table = rows(tmp_path, "samples.jsonl")
    assert [(row["step"], row["table"]) for row in table] == [(0, "samples")] * 3 + [(8, "samples")] * 3
    assert [row["prompt"] for row in table] == PROMPTS[:3] * 2
    for row in table:
        assert list(row)[-1] == "image"  # behind what is read first
        picture = Image.open(tmp_path / row["image"])
        assert picture.size == (8, 8)
        assert brightness([picture]) == [row["reward"]]
    assert sorted(path.name for path in (tmp_path / "images").glob("*.png")) == ["step_000.png", "step_008.png"]
    assert Image.open(tmp_path / "images" / "step_000.png").width > 2 * 128
    assert f"Images: {tmp_path / 'images' / 'step_008.png'}" in caplog.messages
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["reward/mean"] == pytest.approx(np.mean([row["reward"] for row in table[:3]]))


def test_every_nth_round_is_shown_with_rewards_and_advantages(tmp_path: Path) -> None:
    """In the run folder, the report and other people's trackers alike; of several rewards each."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    changes = {"method.grid_interval": 2, "train.epochs": 4, "train.tracker": "tensorboard"}
    trainer = make(NAME, tmp_path, **changes, reward_fn=[brightness, ones])
    trainer.learn()
    table = [row for row in rows(tmp_path, "samples.jsonl") if row["table"] == "training"]
    first = trainer.round_steps * 1 + 1
    assert [row["step"] for row in table] == [first] * 5 + [first + 2 * trainer.round_steps] * 5
    assert sorted(row["prompt"] for row in table[:5]) == sorted(PROMPTS)
    for row in table:
        picture = Image.open(tmp_path / row["image"])
        assert [row["reward/brightness"]] == brightness([picture])
        assert row["reward"] == row["reward/brightness"] + 1 == row["reward/brightness"] + row["reward/ones"]
    # The store has the last round, in the order of the table.
    assert [row["advantage"] for row in table[5:]] == pytest.approx(
        [float(element.advantages) for element in trainer.store.elements]
    )
    names = sorted(path.name for path in (tmp_path / "images").glob("round_*.png"))
    assert names == ["round_00002.png", "round_00004.png"]
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Images("training")] == [first, first + 2 * trainer.round_steps]
    assert [event.step for event in events.Images("samples")] == [0, trainer.progress.step]
    page = (tmp_path / "report.html").read_text()
    assert page.count('"data:image/png;base64,iVBOR') == len(rows(tmp_path, "samples.jsonl")) == 16


def test_an_image_that_is_left_out_has_no_advantage(tmp_path: Path) -> None:
    def some(images: Any) -> list[float | None]:
        return [None, *(float(place) for place in range(1, len(images)))]

    make(NAME, tmp_path, **{"method.grid_interval": 1, "train.epochs": 1}, reward_fn=some).learn()
    table = [row for row in rows(tmp_path, "samples.jsonl") if row["table"] == "training"]
    assert [row["reward"] for row in table] == [None, 1.0, None, 1.0, None]
    assert [row["advantage"] is None for row in table] == [True, False, True, False, True]


def test_images_of_an_earlier_run_are_moved_aside(tmp_path: Path) -> None:
    for epochs in (2, 1):
        make(NAME, tmp_path, **{"train.epochs": epochs}).learn()
    assert (tmp_path / "earlier_1" / "images" / "step_008.png").is_file()
    assert not (tmp_path / "images" / "step_008.png").exists()


def test_an_evaluation_starts_from_the_same_noise(tmp_path: Path) -> None:
    trainer = make(NAME, tmp_path)
    first = trainer.evaluate()
    torch.manual_seed(99)
    assert trainer.evaluate() == first
