"""`train.async_save` with several processes: each writes its part, and the main process publishes all or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import make
from tests.contract.runs import assert_same, state_of
from tests.distributed import matrix
from tests.distributed.ranks import on_ranks
from tests.unit.trainers.test_saving import BESIDE, OPTIONS, contents
from trlx_like.checkpoint.beside import Beside


def both(rank: int, folder: Path, changes: dict[str, Any]) -> None:
    for name, options in (("at once", OPTIONS), ("beside", BESIDE)):
        make("SFTTrainer", folder / name, **{**options, **changes, "train.batch_size": 4}).learn()


def same(kind: str, folder: Path) -> None:
    """Both write the same checkpoints."""
    on_ranks(both, folder, matrix.KINDS[kind])
    for name in ("checkpoint_2", "checkpoint_4"):
        written = contents(folder / "beside" / name)
        assert written == contents(folder / "at once" / name)
        assert kind == "ddp" or "state/shared/optimizer.rank_1.safetensors" in written


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_every_process_writes_its_part(kind: str, tmp_path: Path) -> None:
    same(kind, tmp_path)


def learn_with_a_broken_disk(rank: int, folder: Path) -> tuple[Any, list[str]]:
    """A run in which the disk refuses what the second process writes of the first checkpoint."""
    write = Beside.write

    def broken(self: Beside, place: Path) -> None:
        if rank == 1 and place.name.endswith("checkpoint_1"):
            self.files[place / "missing" / "weights"] = b"abc"
        write(self, place)

    Beside.write = broken  # type: ignore
    options = {**BESIDE, **matrix.KINDS["fsdp"], "train.batch_size": 4, "train.checkpoint_interval": 1}
    trainer = make("SFTTrainer", folder, **options, **{"train.on_checkpoint_error": "continue"})
    trainer.learn()
    return state_of(trainer)["progress"], sorted(path.name for path in folder.glob("*checkpoint_*"))


def test_a_part_that_cannot_be_written_is_the_whole_checkpoint(tmp_path: Path) -> None:
    first, second = on_ranks(learn_with_a_broken_disk, tmp_path)
    assert_same(first[0], second[0])
    assert first[1] == ["checkpoint_2", "checkpoint_3", "checkpoint_4"]
