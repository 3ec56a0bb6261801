"""Pictures of a run: as one image, and as the trackers of others have them, read back with their own readers."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.unit.tracking.support import run_info, run_python
from trlx_like.tracking import make_trackers
from trlx_like.tracking.pictures import Picture, grid, table_grid

COLORS = {"images/0.png": (255, 0, 0), "images/1.png": (0, 0, 255)}
COLUMNS = ["prompt", "reward", "image"]


def table(directory: Path) -> list[list[Any]]:
    """Rows with a red and a blue picture, whose files are made, and one without."""
    (directory / "images").mkdir(parents=True, exist_ok=True)
    for name, color in COLORS.items():
        Image.new("RGB", (8, 8), color).save(directory / name)
    red, blue = (Picture(directory, name) for name in COLORS)
    return [["a red one", 0.5, red], ["日本", float("nan"), blue], ["no picture", None, None]]


def is_the_grid(image: Image.Image) -> bool:
    """Whether it is that of `table`: two pictures enlarged to 128 pixels, two lines of text under each."""
    pixels = [image.convert("RGB").getpixel((4 + 136 * column + 64, 4 + 64)) for column in (0, 1)]
    text = np.asarray(image.convert("L"))[4 + 128 :, :136]
    return image.size == (2 * 136, 128 + 2 * 14 + 8) and pixels == list(COLORS.values()) and bool((text < 128).any())


def test_the_grid_of_a_table(tmp_path: Path) -> None:
    rows = table(tmp_path)
    found = table_grid(COLUMNS, rows)
    assert found is not None and is_the_grid(found)
    assert table_grid(COLUMNS, rows[2:]) is None
    assert table_grid(["output"], [["images/0.png"]]) is None


def test_large_pictures_are_made_smaller() -> None:
    """64 evaluated images of 1024 pixels in full would be a picture of 200 MB."""
    found = grid([Image.new("RGB", (1024, 512), "green")] * 4, ["a"] * 4)
    assert found.size == (2 * (256 + 8), 2 * (128 + 14 + 8))
    assert found.getpixel((100, 60)) == (0, 128, 0)


def test_tensorboard_has_the_picture(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = make_trackers(["tensorboard"], run_info(tmp_path), main=True)
    trackers.log_table("samples", COLUMNS, table(tmp_path), 3)
    trackers.log_table("training", ["output"], [["a text"]], 4)
    trackers.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["images"] == ["samples"]
    (event,) = events.Images("samples")
    assert event.step == 3
    assert is_the_grid(Image.open(io.BytesIO(event.encoded_image_string)))


def test_wandb_has_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them as one in the run; and each in the table, which wandb keeps beside the run and refers to in it."""
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "DATA_DIR": str(tmp_path / "data")}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    trackers = make_trackers(["wandb"], run_info(tmp_path / "run"), main=True)
    trackers.log_table("samples", COLUMNS, table(tmp_path / "run"), 3)
    trackers.close()
    wandb.teardown()
    (together,) = (tmp_path / "run").glob("wandb/offline-run-*/files/media/images/samples/grid_*.png")
    assert is_the_grid(Image.open(together))
    (record,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    staged = {path.read_bytes() for path in (tmp_path / "data").rglob("staging/*") if path.is_file()}
    for name in COLORS:
        content = (tmp_path / "run" / name).read_bytes()
        assert content in staged
        assert f"media/images/{hashlib.sha256(content).hexdigest()[:20]}/".encode() in record.read_bytes()
    assert any(b'"wb_type": "image-file"' in content for content in staged)


TRACKIO = """
from pathlib import Path
from tests.unit.tracking.test_pictures import COLUMNS, is_the_grid, table
from tests.unit.tracking.support import run_info
from trlx_like.tracking import make_trackers
trackers = make_trackers(["trackio"], run_info(Path("run"), run_name="mine"), main=True)
trackers.log_table("samples", COLUMNS, table(Path("run")), 3)
trackers.close()
from PIL import Image
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import MEDIA_DIR
(row,) = [row for row in SQLiteStorage.get_logs("tests", "mine") if "samples" in row]
assert is_the_grid(Image.open(MEDIA_DIR / row["samples/grid"]["file_path"])), row
first, second, third = row["samples"]["_value"]
assert Image.open(MEDIA_DIR / second["image"]["file_path"]).getpixel((3, 3)) == (0, 0, 255), row
assert (first["prompt"], first["reward"], third["image"]) == ("a red one", 0.5, None), row
print("all is there")
"""


def test_trackio_has_the_pictures(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    done = run_python(TRACKIO, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert "all is there" in done.stdout, done.stderr


def test_a_tracker_that_knows_no_pictures_sees_their_names(tmp_path: Path) -> None:
    trackers = make_trackers([], run_info(tmp_path), main=True)
    trackers.log_table("samples", COLUMNS, table(tmp_path), 3)
    trackers.close()
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert '"image": "images/0.png"' in lines[0] and '"image": null' in lines[2]
    assert os.fspath(tmp_path) not in lines[0]
