"""Sampling block by block (`backend.rollout: layers`): the same run, in less memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import make
from tests.distributed import matrix
from tests.distributed.ranks import on_ranks
from tests.distributed.test_fsdp import CASES, live_bytes, references
from tests.tiny import tiny_config
from tests.unit import test_estimate
from trlx_like.estimate import estimate

BLOCK = 4 * (12 * 96**2 + 13 * 96)
"""Bytes of a block of GPT-2 of this width."""


def sampling(folder: Path, rollout: str, **more: Any) -> Any:
    options = {"model.model_path": tiny_config(n_embd=96, n_layer=6, n_head=4), "backend.kind": "fsdp", **more}
    return make("PPOTrainer", folder, **{**matrix.SIX_STEPS, **options, "backend.rollout": rollout})


def held_in_sampling(rank: int, folder: Path, rollout: str) -> tuple[int, int]:
    """Bytes of all blocks of the policy and its reference, and the most that were held while one of them ran."""
    gc.collect()
    gc.freeze()
    before, most = live_bytes(), 0
    trainer = sampling(folder, rollout)

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, min(counts()))

    def counts() -> Iterator[int]:
        """A thread of gloo holds what it has gathered a little longer than it is needed: until it runs again."""
        for _ in range(8):
            gc.collect()  # or tensors in cycles that nobody needs would count
            yield live_bytes() - before
            time.sleep(0.01)

    named = [part for top in (trainer.model, *references(trainer.model)) for part in top.modules()]
    blocks = [part for part in dict.fromkeys(named) if type(part).__name__ == "FSDPGPT2Block"]
    for block in (blocks[5], blocks[-1]):
        block.mlp.register_forward_hook(look)
    with trainer.run.backend.sampling():
        trainer.make_experience()
    return sum(4 * weight.numel() for block in blocks for weight in block.parameters()), most


@pytest.mark.slow
def test_blocks_are_whole_while_they_run_alone(tmp_path: Path) -> None:
    """With `rollout: layers` a process holds half of the blocks and the one that runs, of 12 here. As estimated."""
    found = {}
    for rollout in ("layers", "whole"):
        (blocks, found[rollout]), _ = on_ranks(held_in_sampling, tmp_path / rollout, rollout)
        row = estimate(sampling(tmp_path / f"{rollout} alone", rollout).config, gpus=2).table["generate"]
        expected = row.total() - row["optimizer"] - row["copies"]  # these are made by the first step
        assert found[rollout] == pytest.approx(expected, rel=0.1)
    assert found["whole"] - found["layers"] > 0.8 * blocks * 11 / 12


def allocated_in_sampling(rank: int, folder: Path, precision: str) -> int:
    """The most bytes that the allocator gives out in a round, beside what is there before it."""
    trainer = sampling(folder, "layers", **{"backend.mixed_precision": precision})
    with test_estimate.measured() as made, trainer.run.backend.sampling():
        trainer.make_experience()
    return test_estimate.most(made)


@pytest.mark.slow
def test_bfloat16_takes_no_copy_of_all_weights(tmp_path: Path) -> None:
    """Autocast would keep a copy of each block in 16 bits, half as large, until all have run."""
    found = {
        precision: min(
            count for _ in range(3) for count in on_ranks(allocated_in_sampling, tmp_path / precision, precision)
        )
        for precision in ("no", "bf16")
    }  # the least of three runs, as gloo's threads hold what they gather for different times
    print(found)
    assert found["bf16"] < found["no"] + 1.5 * BLOCK


@pytest.mark.parametrize("case", ["PPOTrainer / ragged", pytest.param("ILQLTrainer / plain", marks=pytest.mark.slow)])
def test_sampling_block_by_block_makes_the_same_run(case: str) -> None:
    """On processes that run the model differently often; `matrix --kind layers` tries all."""
    name, changes = CASES[case]
    found = matrix.differences(name, changes, kind="layers")
    assert matrix.too_large(case, found) == [], found


def saved_while_sampling(rank: int, folder: Path) -> None:
    trainer = make("SFTTrainer", folder, **{"backend.kind": "fsdp", "backend.rollout": "layers"})
    with trainer.run.backend.sampling(), pytest.raises(RuntimeError, match=r"backend\.rollout \(layers\)"):
        trainer.save_pretrained(folder / "model")


def test_nothing_is_exported_while_weights_are_divided(tmp_path: Path) -> None:
    on_ranks(saved_while_sampling, tmp_path)
