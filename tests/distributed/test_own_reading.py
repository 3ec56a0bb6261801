"""Models whose weights stay in their files until each process reads its own part of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.contract.recipes import few, make
from tests.distributed import matrix
from tests.distributed.ranks import on_ranks
from tests.tiny import save_tiny
from trlx_like.errors import ConfigError
from trlx_like.imagined import LiveBytes


def loaded(rank: int, name: str, folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The whole weights and buffers of policy and references, as two processes have them."""
    found = {}
    for case, changes in cases.items():
        trainer = make(name, folder, **{**matrix.SIX_STEPS, "backend.kind": "fsdp", **changes})
        modules = [trainer.model, *trainer.model.reference_modules()]
        found[case] = [
            {
                **{key: value.clone() for key, value in trainer.run.backend.weights(module)},
                **{key: value.clone() for key, value in module.named_buffers()},
            }
            for module in modules
        ]
    return found


@pytest.mark.parametrize("name", few(["PPOTrainer", "ILQLTrainer"]))
def test_weights_are_those_of_a_whole_load(name: str, tmp_path: Path) -> None:
    paths = {family: save_tiny(tmp_path / family, family) for family in ("gpt2", "llama")}
    cases: dict[str, dict[str, Any]] = {
        f"{family} {layers}": {"model.model_path": path, "model.num_layers_unfrozen": layers}
        for family, path in paths.items()
        for layers in (-1, 1)
    }
    cases["adapter"] = {"model.model_path": paths["llama"], "model.peft_config": {"peft_type": "LORA", "r": 2}}
    alone = loaded(0, name, tmp_path / "alone", {case: {**c, "backend.kind": "ddp"} for case, c in cases.items()})
    for divided in on_ranks(loaded, name, tmp_path / "divided", cases):
        for case in cases:
            assert len(alone[case]) == len(divided[case])
            for one, other in zip(alone[case], divided[case], strict=True):
                assert list(one) == list(other)
                assert [key for key in one if not torch.equal(one[key], other[key])] == []


class Storages(LiveBytes):
    """Count the memory behind divided tensors, which have none of their own, and not what is on the meta device."""

    def _add(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            super()._add(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def peak(rank: int, name: str, folder: Path, changes: Mapping[str, Any]) -> dict[str, float]:
    """The most bytes of live tensors while a trainer is made, and what they may be."""
    with Storages() as storages:
        trainer = make(name, folder, **{**matrix.SIX_STEPS, "backend.kind": "fsdp", **changes})
    modules = [trainer.model, *trainer.model.reference_modules()]
    state = sum(weight.numel() for module in modules for weight in module.parameters())
    units = [part for part in trainer.model.modules() if type(part).__name__.startswith("FSDP")]
    blocks = [sum(w.numel() for w in part.parameters()) for part in units if part is not trainer.model]
    root = sum(w.numel() for w in trainer.model.parameters()) - sum(blocks)
    return {"state": 4 * state, "unit": 4 * max(root, *blocks), "peak": storages.peak.total()}


@pytest.mark.parametrize("name", few(["PPOTrainer", "DPOTrainer", "ILQLTrainer"], kept=["PPOTrainer"]))
def test_loading_takes_a_share_and_two_units(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", n_embd=96, n_head=4, layers=12)
    for changes in ({}, {"model.num_layers_unfrozen": 2}):
        for found in on_ranks(peak, name, tmp_path / "run", {"model.model_path": folder, **changes}):
            print(name, changes, found)
            assert found["state"] / 2 < found["peak"] <= 1.1 * (found["state"] / 2 + 2 * found["unit"]), found


def refused(rank: int, folder: Path, path: str) -> str:
    with pytest.raises(ConfigError) as error:
        make("SFTTrainer", folder, **{**matrix.SIX_STEPS, "backend.kind": "fsdp", "model.model_path": path})
    return str(error.value)


def test_what_one_process_cannot_read_ends_all(tmp_path: Path) -> None:
    """The last row of a weight is the second process's alone."""
    path = Path(save_tiny(tmp_path / "model", layers=2))
    weights = load_file(path / "model.safetensors")
    weights["transformer.h.1.mlp.c_fc.weight"][-1] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    said = on_ranks(refused, tmp_path / "run", str(path))
    assert "another process cannot read it" in said[0]
    assert "the weight transformer.h.1.mlp.c_fc.weight has NaN" in said[1]
