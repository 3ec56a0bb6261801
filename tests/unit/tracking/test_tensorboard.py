"""Scalars, tables and pictures in TensorBoard's files, read back with its own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tracking.support import run_info
from trlx_like.tracking import make_trackers


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume_step in (None, 2):
        info = run_info(tmp_path, resume_step=resume_step)
        trackers = make_trackers(["tensorboard"], info, main=True)
        for step in range((resume_step or 0) + 1, 5 if resume_step is None else 4):
            trackers.log({"reward/mean": step / 4, "bad": float("nan")}, step)
        trackers.log_table("samples", ["output"], [["<b>a|b\nc</b>"]], 3)
        trackers.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    text = events.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert text == "| output |\n| --- |\n| &lt;b&gt;a\\|b<br>c&lt;/b&gt; |"
    assert b"seed: 1" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboard_goes_to_the_logging_dir(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options = {"tensorboard": {"filename_suffix": ".mine"}}
    info = run_info(tmp_path / "run", logging_dir=tmp_path / "logs", options=options)
    make_trackers(["tensorboard"], info, main=True).close()
    assert [file.suffix for file in (tmp_path / "logs").iterdir()] == [".mine"] and not (
        tmp_path / "run" / "tensorboard"
    ).exists()
