"""The example that draws digits: its pipeline, its rewards, and a round of it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples import ddpo_digits
from examples.ddpo_digits import DIGITS, SAMPLES, SHOWN, TASKS, lesson, metric_fn, new_pipeline, pretrain, scans
from examples.pictures import Result, grid, table
from examples.problems import Draw


def real(count: int) -> tuple[list[Image.Image], list[str]]:
    """Scans as the pictures that are drawn, and what they show."""
    pixels, labels = scans()
    pictures = [Image.fromarray((picture * 255).round().astype(np.uint8)) for picture in pixels[:count]]
    return pictures, [DIGITS[label] for label in labels[:count]]


def test_real_scans_are_what_they_are() -> None:
    pictures, words = real(300)
    found = metric_fn(pictures, prompts=words)
    assert np.mean(found["right"]) > 0.99
    assert np.mean(metric_fn(pictures, prompts=[*words[1:], words[0]])["right"]) < 0.25
    assert 470 < np.mean(found["bytes"]) < 500
    assert np.mean(found["brightness"]) == pytest.approx(scans()[0][:300].mean(), abs=2e-3)
    blank = metric_fn([Image.new("L", (8, 8), 128)], prompts=["one"])
    assert blank["bytes"][0] < 345 < min(found["bytes"])  # so that "under 345" means that there is nothing to see


def test_every_digit_is_another_prompt() -> None:
    tokens = new_pipeline().tokenizer(DIGITS, padding="max_length").input_ids
    assert {len(row) for row in tokens} == {8}  # none is cut: a letter a token, and two around the word
    assert len({tuple(row) for row in tokens}) == 10


@pytest.mark.slow
def test_a_round_from_a_base_that_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRLX_LIKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ddpo_digits, "pretrain", functools.partial(pretrain, steps=15))
    torch.set_num_threads(1)
    found = ddpo_digits.run(dataclasses.replace(TASKS[2], rounds=1), Draw(1, 1, tmp_path), tmp_path / "run")
    assert ddpo_digits.base(1).is_relative_to(tmp_path)
    assert capsys.readouterr().out.count("base, seed 1") == 1
    assert set(found.before) == set(found.after) == {"bytes", "brightness", "right"}
    assert found.before != found.after
    assert [[picture.size for picture in row] for row in found.pictures] == [[(8, 8)] * 10] * 2
    grid([found], DIGITS, tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as page:
        # Ten columns of 128 + 8 pixels; two rows, with two lines of text each.
        assert page.size == (10 * 136, 2 * (128 + 2 * 14 + 8))


@pytest.mark.slow
def test_pretraining_learns() -> None:
    torch.manual_seed(0)
    losses = pretrain(new_pipeline(), steps=30)
    # v has variance about 1 at first, as noise and picture do together.
    assert np.mean(losses[-5:]) < 0.6 < 0.8 < losses[0]


def test_table_and_lesson() -> None:
    before = {"bytes": 480.0, "brightness": 0.305, "right": 0.995}
    results = [
        Result(task, before, {"bytes": 340.0, "brightness": 0.1 * number, "right": 0.1 + 0.4 * number}, 80.0, ([], []))
        for number, task in enumerate(TASKS)
    ]
    lines = table({3: results}, SAMPLES, SHOWN).splitlines()
    assert [line.split()[0] for line in lines] == ["seed", "3", "3", "3"]
    assert "480>340" in lines[1] and "0.99>0.10" in lines[1]  # 0.995 is written to the even digit
    assert "0.10 to 0.10 are the digit" in lesson({3: results})
    assert "with the KL 0.50 to 0.50" in lesson({3: results})
