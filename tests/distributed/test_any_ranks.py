"""A run is the same on one, two and four processes: the same samples, the same metrics, the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import RECIPES, make
from tests.contract.runs import StopAfter, assert_same, rows
from tests.distributed.matrix import KINDS, exported
from tests.distributed.ranks import on_ranks, on_two_machines, whole
from trlx_like.errors import CheckpointError
from trlx_like.testing.compare import apart
from trlx_like.trainers.interrupt import Interrupted

FEW = ("DDPOTrainer", "PPOTrainer", "SFTTrainer")
"""Of images, of rollouts, of given data."""
SIX_STEPS = {
    **{"train.batch_size": 4, "train.total_steps": 6, "train.epochs": 20, "train.eval_interval": 3},
    # Adam divides by roots of squares: where a gradient is all but 0, eps bounds what it makes of a rounding error.
    "optimizer.kwargs": {"lr": 5e-4, "eps": 1e-6},
}
# A diffusion model's log-probabilities divide by small variances: the norm of its gradients is up to 2.6, and 1e-7 of
# that, a rounding error, is not small beside the gradients of some weights.
LARGER = {"DDPOTrainer": {"optimizer.kwargs": {"lr": 5e-4, "eps": 1e-4}}}
REPLAYED: dict[str, dict[str, Any]] = {
    **{name: {"method.replay_best": True} for name in ("GRPOTrainer", "OnlineDPOTrainer")},
    "PPOTrainer": {"method.replay_best": True, "method.num_rollouts": 8},  # to 5 prompts
}
AUTO = {"train.resume_from_checkpoint": "auto"}
SAMPLED = ("response", "chosen", "rejected", "order")


def learned(rank: int, name: str, folder: Path, stop: int = 0, changes: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Train, and return weights before and after, the ids of the store's elements in their order, and the export.

    stop: the step in which a signal ends the run; 0 for none. A run in a folder with a checkpoint goes on from it.
    """
    on_two_machines(changes)
    callbacks = [StopAfter(stop)] if stop else []
    of_all = {**SIX_STEPS, **LARGER.get(name, {}), **REPLAYED.get(name, {}), **AUTO}
    trainer = make(name, folder, **{**of_all, **changes}, callbacks=callbacks)
    backend = trainer.run.backend
    before = {key: value.clone() for key, value in backend.weights(trainer.model)}
    trainer.learn()
    ids = [
        [getattr(element, field).tolist() for field in SAMPLED if hasattr(element, field)]
        for element in trainer.store.elements
    ]
    after = {key: value.clone() for key, value in backend.weights(trainer.model)}
    return {"before": before, "after": after, "ids": ids, "exported": exported(folder / "checkpoint_6")}


@pytest.mark.parametrize(
    ("name", "kind", "ranks"),
    [
        pytest.param(name, kind, ranks, marks=[] if name in FEW and ranks == 2 else pytest.mark.slow)
        for name in RECIPES
        for kind, ranks in (("ddp", 2), ("ddp", 4), ("fsdp", 4), ("hybrid", 4))
    ],
)
def test_the_run_is_that_of_one_process(name: str, kind: str, ranks: int, tmp_path: Path) -> None:
    """Drawn samples, and pairs or responses that the trainer leaves out, in chunks of another size on each number."""
    alone = learned(0, name, tmp_path / "1")
    many = on_ranks(learned, name, tmp_path / "n", 0, KINDS[kind], processes=ranks)
    assert_close(many, alone, tmp_path / "n", tmp_path / "1")
    moved = max(float((alone["after"][key] - weight).abs().max()) for key, weight in alone["before"].items())
    assert moved > 1e-3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "PPOTrainer" else pytest.mark.slow) for name in RECIPES]
)
def test_a_run_resumes_on_another_number_of_processes(name: str, tmp_path: Path) -> None:
    """Stopped on two in the third step, which is in the middle of a round, then on four in the fifth, ends on one."""
    alone = learned(0, name, tmp_path / "1")
    for ranks, after in ((2, 2), (4, 4)):  # several processes agree on a stop in the next step
        codes = on_ranks(learned, name, tmp_path / "n", after, processes=ranks, exits=True)
        assert codes == [143] * ranks
    assert_close([learned(0, name, tmp_path / "n")], alone, tmp_path / "n", tmp_path / "1")


def state_at(rank: int, folder: Path, backend: dict[str, Any], stop: int, save: str | None) -> dict[str, Any]:
    """The weights and moments of a run in a folder: after it was stopped in a step, or as a checkpoint has them.

    save: where to write them once more.
    """
    trainer = make("PPOTrainer", folder, **SIX_STEPS, **backend, callbacks=[StopAfter(stop)])
    if stop:
        with pytest.raises(Interrupted):
            trainer.learn()
    else:
        trainer.load(folder)
    if save is not None:
        trainer.save(folder / save)
    items = trainer.state.items
    return {name: whole(trainer.run.backend, items[name].item.state_dict()) for name in ("model", "optimizer", "store")}


def test_any_backend_and_number_of_processes_reads_any_others_checkpoint(tmp_path: Path) -> None:
    """Divided over four, then on one process, then divided over two: weights, moments and experience bit by bit."""
    four = on_ranks(state_at, tmp_path, KINDS["fsdp"], 2, None, processes=4)
    files = {path.name for path in (tmp_path / "checkpoint_3" / "state" / "shared").iterdir()}
    assert {f"{name}.rank_{rank}.safetensors" for name in ("model", "optimizer") for rank in range(4)} < files
    alone = state_at(0, tmp_path, KINDS["ddp"], 0, "checkpoint_4")
    two = on_ranks(state_at, tmp_path / "checkpoint_4", KINDS["fsdp"], 0, None)
    for state in (alone, *two):
        assert_same(state, four[0])
    damaged = tmp_path / "checkpoint_3" / "state" / "shared" / "optimizer.rank_3.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"optimizer\.rank_3\.safetensors is damaged"):
        state_at(0, tmp_path / "checkpoint_3", KINDS["ddp"], 0, None)
    damaged.unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.rank_3\.safetensors is missing"):
        state_at(0, tmp_path / "checkpoint_3", KINDS["ddp"], 0, None)


def assert_close(found: Sequence[dict[str, Any]], alone: dict[str, Any], folder: Path, other: Path) -> None:
    for one in found:
        assert one["ids"] == alone["ids"]
        for key, weight in alone["after"].items():
            torch.testing.assert_close(one["after"][key], weight, rtol=0, atol=2e-6, msg=(key + ": {}").format)
    assert alone["exported"] and apart(found[0]["exported"], alone["exported"], "export") < 2e-6
    for got, expected in zip(rows(folder), rows(other), strict=True):
        assert got == pytest.approx(expected, rel=2e-6, abs=1e-5, nan_ok=True)


def learned_with_a_cut(rank: int, folder: Path) -> dict[str, Any]:
    """As `learned`, of rollouts with top-p."""
    cut = {"method.gen_kwargs": {**RECIPES["PPOTrainer"].method["gen_kwargs"], "top_p": 0.8}}
    trainer = make("PPOTrainer", folder, **SIX_STEPS, **cut)
    trainer.learn()
    assert all(element.choices is not None for element in trainer.store.elements)
    ids = [[element.response.tolist(), element.choices.tolist()] for element in trainer.store.elements]
    return {"after": trainer.model.state_dict(), "ids": ids, "exported": exported(folder / "checkpoint_6")}


@pytest.mark.slow
def test_rollouts_with_a_cut_are_the_same_on_two(tmp_path: Path) -> None:
    alone = learned_with_a_cut(0, tmp_path / "1")
    assert_close(on_ranks(learned_with_a_cut, tmp_path / "n", processes=2), alone, tmp_path / "n", tmp_path / "1")
