"""Two processes are one trainer: the same gradients, the same weights on both, and neither waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import LORA, NO_DROPOUT, RECIPES, checks, few, kinds, make
from tests.contract.runs import StopAfter, assert_same, rows, state_of
from tests.distributed.ranks import on_ranks
from tests.tiny import tiny_config
from trlx_like.testing.checks import WHOLE_ROUND
from trlx_like.tracking.jsonl import FILES
from trlx_like.tracking.ledger import check_ledger
from trlx_like.trainers import trunk

trainers = pytest.mark.parametrize("name", list(RECIPES))
AUTO = {"train.resume_from_checkpoint": "auto"}


def own_metrics(trainer: Any) -> dict[str, float]:
    """What was logged last, without what a clock says."""
    return {name: value for name, value in trainer.last_metrics.items() if not name.startswith("time/")}


@pytest.mark.parametrize("scenario", few(kinds(), kept=(*RECIPES, "PPOTrainer-seq2seq")))
@pytest.mark.parametrize("minibatch_size", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_the_weights_are_those_of_one_process(scenario: str, minibatch_size: int | None) -> None:
    """One of two has more samples."""
    name, changes = kinds()[scenario]
    checks(name, **changes).steps_on_processes(5, minibatch_size)


@pytest.mark.parametrize("scenario", few(kinds()))
@pytest.mark.parametrize("minibatch_size", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_without_data(scenario: str, minibatch_size: int | None) -> None:
    name, changes = kinds()[scenario]
    checks(name, **changes).steps_on_processes(1, minibatch_size)


def learn(rank: int, name: str, folder: Path, changes: dict[str, Any], stops: Sequence[int] = ()) -> dict[str, Any]:
    """A run. stops: for each rank the step in which a signal comes to it alone, 0 for none."""
    callbacks = [StopAfter(stops[rank])] if stops else []
    trainer = make(name, folder, **{"train.batch_size": 4, **changes}, callbacks=callbacks)
    trainer.learn()
    state = state_of(trainer)
    return {
        "shared": {key: value for key, value in state.items() if not trainer.state.items[key].local},
        "own": {key: value for key, value in state.items() if trainer.state.items[key].local},
        "metrics": own_metrics(trainer),
        "columns": sorted(getattr(trainer.store.elements, "columns", {})),
    }


@pytest.mark.parametrize("name", few(RECIPES))
def test_both_end_with_the_same_weights_and_metrics(name: str, tmp_path: Path) -> None:
    """Five samples in batches of two a process: one process has three, the other two, so one has batches left."""
    first, second = on_ranks(learn, name, tmp_path, {"train.eval_interval": 2})
    assert_same(second["shared"], first["shared"])
    assert_same(second["metrics"], first["metrics"])
    assert RECIPES[name].evaluated in rows(tmp_path)[-1]
    assert [row["step"] for row in rows(tmp_path)] == list(range(first["shared"]["progress"]["step"] + 1))


@pytest.mark.parametrize("name", few(RECIPES, kept=("DPOTrainer", "PPOTrainer")))
def test_a_resumed_run_is_the_run_that_never_stopped(name: str, tmp_path: Path) -> None:
    """The signal comes to the second process only; both stop at the same step."""
    changes = {"train.eval_interval": 2, **AUTO}
    whole = on_ranks(learn, name, tmp_path / "whole", changes)
    assert on_ranks(learn, name, tmp_path / "parts", changes, (0, 2), exits=True) == [143, 143]
    assert rows(tmp_path / "parts")[-1]["step"] < rows(tmp_path / "whole")[-1]["step"]
    resumed = on_ranks(learn, name, tmp_path / "parts", changes)
    for got, expected in zip(resumed, whole, strict=True):
        assert_same([got["shared"], got["own"]], [expected["shared"], expected["own"]])
    for file in FILES:
        assert_same(rows(tmp_path / "parts", file), rows(tmp_path / "whole", file), file)
    assert all(len(row["rows"]) == 2 for row in rows(tmp_path / "parts", "ledger.jsonl"))
    assert check_ledger(tmp_path / "parts")[1]


@pytest.mark.parametrize("name", ["PPOTrainer", "SFTTrainer"])
def test_an_adapter_is_the_same_on_both(name: str, tmp_path: Path) -> None:
    first, second = on_ranks(learn, name, tmp_path, {"model.peft_config": LORA, "train.eval_interval": 2})
    assert_same(second["shared"], first["shared"])
    assert_same(second["metrics"], first["metrics"])


def half_steps(rank: int, folder: Path, elements: Sequence[Any]) -> tuple[dict[str, torch.Tensor], float]:
    """Weights and the scale of gradients after two rounds in fp16 on given experience."""
    trainer = make("DDPOTrainer", folder, **WHOLE_ROUND, **{"backend.mixed_precision": "fp16"})
    trainer.push_to_store(trainer.world.share(list(elements)))
    for number in range(2):
        trainer.begin_round()
        for batch in trainer.round_batches():
            trainer.accept = lambda metrics, number=number: number > 0
            trainer.optimize(batch)
    return trainer.model.state_dict(), trainer.accelerator.scaler.get_scale()


@pytest.mark.parametrize("count", [5, 1], ids=["ragged", "a rank without data"])
def test_in_fp16_both_scale_alike(count: int, tmp_path: Path) -> None:
    """Also one that has no data, and where the first steps are refused."""
    source = make("DDPOTrainer", tmp_path, **WHOLE_ROUND)
    source.make_experience()
    first, second = on_ranks(half_steps, tmp_path, source.store.elements[:count])
    assert_same(second, first)
    assert any(not torch.equal(weight, source.model.state_dict()[name]) for name, weight in first[0].items())


LIVE = {"method.precompute_ref_log_probs": False}


FSDP = {"backend.kind": "fsdp"}


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(
    ("name", "own"),
    [("SFTTrainer", {}), ("DPOTrainer", {}), ("DPOTrainer", LIVE), ("RewardTrainer", {}), ("DPOTrainer", FSDP)],
)
def test_kept_states(
    name: str, own: dict[str, Any], in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes end as one that keeps none, wherever the states are, and start from kept states."""
    monkeypatch.setattr(trunk, "OF_MEMORY", 0.0 if in_file else 0.5)
    changes = {"model.num_layers_unfrozen": 1, "model.model_path": tiny_config(layers=3, **NO_DROPOUT)}
    changes |= {"optimizer.kwargs": {"lr": 3e-3, "eps": 1e-6}, "train.epochs": 5}
    changes |= own
    first, second = on_ranks(learn, name, tmp_path / "two", changes)
    assert any(column.endswith("_trunk") for column in first["columns"])
    assert_same(second["metrics"], first["metrics"])
    plain = learn(0, name, tmp_path / "one", {**changes, "train.keep_trunk": False, "backend.kind": "ddp"})
    for key, value in plain["metrics"].items():
        assert first["metrics"][key] == pytest.approx(value, abs=1e-4), key
    if own == FSDP:  # each has a part of the weights
        return
    assert_same(second["shared"], first["shared"])
    for key, weight in plain["shared"]["model"].items():
        torch.testing.assert_close(first["shared"]["model"][key], weight, rtol=0, atol=1e-5)
