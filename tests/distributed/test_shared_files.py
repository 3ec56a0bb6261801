"""The checkpoint of a step and the best one of that step share their large files, those of all processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import matrix
from tests.distributed.ranks import on_ranks
from tests.unit.trainers.test_run import LARGE, best_at_2
from tests.unit.trainers.test_saving import contents
from trlx_like import Callback
from trlx_like.checkpoint import CheckpointStore, manifest

KINDS = {kind: matrix.KINDS[kind] for kind in ("ddp", "fsdp")}


def both(rank: int, folder: Path, kind: str, beside: bool) -> None:
    options = {**KINDS[kind], "train.batch_size": 4, "train.async_save": beside}
    best_at_2(folder / "alone", callbacks=[Callback()], **options)
    manifest.LEAST_SHARED = 0
    best_at_2(folder / "shared", **options)


@pytest.mark.parametrize(
    ("kind", "beside"), [("fsdp", True), *[pytest.param(kind, False, marks=pytest.mark.slow) for kind in KINDS]]
)
def test_two_processes_share_files_too(kind: str, beside: bool, tmp_path: Path) -> None:
    on_ranks(both, tmp_path, kind, beside)
    for name in ("best_checkpoint", "checkpoint_2", "checkpoint_4"):
        CheckpointStore(tmp_path / "shared").verify(tmp_path / "shared" / name)
        written = contents(tmp_path / "shared" / name)
        assert written == contents(tmp_path / "alone" / name)
        ranges = [f"state/shared/optimizer.rank_{rank}.safetensors" for rank in range(2)] if kind == "fsdp" else []
        for file in [*LARGE, *ranges]:
            assert (tmp_path / "shared" / name / file).stat().st_nlink == (1 if name == "checkpoint_4" else 2), file
