"""A step that is not finite on one process is dropped by all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import make
from tests.contract.test_nonfinite import BAD_STEP, OPTIONS, Weights, spoil
from tests.distributed.matrix import KINDS, import_deepspeed
from tests.distributed.ranks import on_ranks


def learn(rank: int, folder: str, kind: str) -> dict[str, Any]:
    weights = Weights()
    trainer = make("PPOTrainer", Path(folder), **{**OPTIONS, "train.batch_size": 2}, callbacks=[weights])
    if rank == 1:
        spoil(trainer, kind, range(BAD_STEP, BAD_STEP + 1))
    trainer.learn()
    before, after, later = weights.seen[BAD_STEP - 2 : BAD_STEP + 1]
    return {
        "unchanged": all(torch.equal(after[name], value) for name, value in before.items()),
        "changed": any(not torch.equal(later[name], value) for name, value in after.items()),
        "counted": trainer.progress.nonfinite_steps,
        "end": sum(float(p.detach().double().sum()) for p in trainer.model.parameters()),
    }


@pytest.mark.parametrize("kind", ["loss", "gradient", "update"])
def test_all_drop_what_one_cannot_use(kind: str, tmp_path: Path) -> None:
    first, second = on_ranks(learn, str(tmp_path), kind)
    assert first == second and math.isfinite(first["end"])
    assert (first["unchanged"], first["changed"], first["counted"]) == (True, True, 1)
    (record,) = [json.loads(line) for line in (tmp_path / "nonfinite_steps.jsonl").read_text().splitlines()]
    if kind == "loss":
        assert record["rank"] == 1 and record["samples"]


def rolled_back(rank: int, folder: str, verb: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Train; before the verb from step 4 on the second process gets weights that it cannot sample from."""
    options = {**OPTIONS, "train.batch_size": 2, "train.total_steps": 8, "train.checkpoint_interval": 2, **changes}
    options |= {"train.on_divergence": "rollback"}
    trainer = make("GRPOTrainer", Path(folder), **options)
    called, rollbacks = getattr(trainer, verb), list[bool]()

    def after_spoiling(*args: Any, **options: Any) -> Any:
        if trainer.progress.step >= 4 and not rollbacks:
            rollbacks.append(True)
            if rank == 1:
                with torch.no_grad():
                    for weight in (trainer.model.lm.lm_head.weight, trainer.model.lm.transformer.ln_f.weight):
                        weight.mul_(1e30)
        return called(*args, **options)

    setattr(trainer, verb, after_spoiling)
    trainer.learn()
    end = sum(float(p.detach().double().sum()) for p in trainer.model.parameters())
    return {"step": trainer.progress.step, "rollbacks": trainer.progress.rollbacks, "end": end}


@pytest.mark.parametrize(("verb", "changes"), [("make_experience", {}), ("evaluate", {"train.eval_interval": 4})])
def test_all_roll_back_if_one_cannot_sample(verb: str, changes: dict[str, Any], tmp_path: Path) -> None:
    first, second = on_ranks(rolled_back, str(tmp_path), verb, changes)
    assert first == second and math.isfinite(first["end"])
    assert (first["step"], first["rollbacks"]) == (8, 1)
    _, event = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert "On process 1: The model computes NaN or infinite scores of the next token" in event["why"]


NAMED = "lm.transformer.h.1.mlp.c_proj.weight"


def spoiled(rank: int, folder: str, kind: str) -> str | None:
    """Train with a gradient of one weight that is NaN on the second process, and return the name in the record."""
    trainer = make("SFTTrainer", Path(folder), **{**OPTIONS, "train.batch_size": 2, **KINDS[kind]})

    def spoil_weight(module: torch.nn.Module, *_: Any) -> None:
        weight = module.weight  # the one that the pass uses, with all its numbers
        if rank == 1 and torch.is_grad_enabled():
            assert isinstance(weight, torch.Tensor)
            weight.register_hook(lambda grad: grad * math.nan if trainer.progress.step + 1 == BAD_STEP else grad)

    trainer.model.get_submodule(NAMED.removesuffix(".weight")).register_forward_pre_hook(spoil_weight)
    trainer.learn()
    (record,) = [json.loads(line) for line in (Path(folder) / "nonfinite_steps.jsonl").read_text().splitlines()]
    named: str = record["parameter"]
    return named


def test_a_gradient_that_is_nan_is_named_when_weights_are_divided(tmp_path: Path) -> None:
    assert on_ranks(spoiled, str(tmp_path), "fsdp") == [NAMED, NAMED]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3"])
def test_a_gradient_that_is_nan_is_named(kind: str, tmp_path: Path) -> None:
    if kind != "ddp":
        import_deepspeed()
    assert on_ranks(spoiled, str(tmp_path), kind) == [NAMED, NAMED]
