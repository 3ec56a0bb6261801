"""Checkpoints that a thread writes: what was copied, and what becomes of parts that fail."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file, save_file

from trlx_like.checkpoint import CheckpointStore
from trlx_like.checkpoint.beside import Beside
from trlx_like.errors import CheckpointError


def begin(root: Path, beside: Beside, weights: torch.Tensor) -> None:
    with CheckpointStore(root, keep=1).publish("checkpoint_1", beside=beside) as folder:
        beside.mark(folder)
        (folder / "hf_model").mkdir()
        save_file({"weights": weights}, folder / "hf_model" / "model.safetensors", {"format": "pt"})


def test_what_is_written_is_what_was_there_when_it_was_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, go_on, write = Beside(0, 1), Event(), Beside.write
    monkeypatch.setattr(Beside, "write", lambda self, folder: go_on.wait(10) and write(self, folder))
    weights = torch.arange(1000.0)
    begin(tmp_path, beside, weights)
    assert not (tmp_path / "checkpoint_1").exists() and sum(map(len, beside.files.values())) > 4000
    weights.zero_()
    save_file({"weights": weights}, tmp_path / "another")  # after the block it is written at once
    go_on.set()
    beside.wait()
    CheckpointStore(tmp_path).verify(tmp_path / "checkpoint_1")
    assert [path.name for path in sorted((tmp_path / "checkpoint_1").iterdir())] == ["hf_model", "manifest.json"]
    saved = tmp_path / "checkpoint_1" / "hf_model" / "model.safetensors"
    save_file({"weights": torch.arange(1000.0)}, tmp_path / "at once", {"format": "pt"})
    assert saved.read_bytes() == (tmp_path / "at once").read_bytes() and not beside.files
    assert not load_file(tmp_path / "another")["weights"].any()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the full disk of Linux")
def test_a_disk_that_refuses_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    beside = Beside(0, 1)
    begin(tmp_path, beside, torch.zeros(3))
    beside.wait()
    begin(tmp_path, beside, torch.ones(3))
    beside.wait()
    before = (tmp_path / "checkpoint_1" / "hf_model" / "model.safetensors").read_bytes()

    with CheckpointStore(tmp_path).publish("checkpoint_1", lambda: 7, beside) as folder:
        beside.mark(folder)
        beside.files[Path("/dev/full")] = b"abc"
    with pytest.raises(CheckpointError, match=r"No space left.*About 7 bytes are needed.*Earlier checkpoints are as"):
        beside.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_1"]
    assert (tmp_path / "checkpoint_1" / "hf_model" / "model.safetensors").read_bytes() == before


def test_the_main_process_waits_for_the_parts_of_all(tmp_path: Path) -> None:
    """Of three processes the second is the last one, and the third fails."""
    parts = [Beside(rank, 3) for rank in range(3)]
    for part in parts:
        part.mark(tmp_path)
    parts[0].write(tmp_path)
    parts[2].files[tmp_path / "missing" / "weights"] = b"abc"
    with pytest.raises(FileNotFoundError):
        parts[2].write(tmp_path)
    seen: list[bool] = []
    parts[0].start(lambda: seen.append(parts[0].all_written(tmp_path)))
    assert parts[0].running is not None and not parts[0].running.done()
    parts[1].write(tmp_path)
    parts[0].wait()
    assert seen == [False]
    assert Beside(0, 2).all_written(tmp_path)
