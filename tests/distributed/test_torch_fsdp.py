"""The calls of FSDP2 that are not public do what the backend relies on, on a toy of two blocks and a head."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.fsdp import FSDPModule

from tests.contract.recipes import ingredients
from tests.distributed.ranks import on_ranks, whole
from trlx_like.config import OptimizerConfig
from trlx_like.distributed import World, make_accelerator, make_backend
from trlx_like.distributed.backend import Backend
from trlx_like.optim import make_optimizer, norms_and_biases


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Toy(nn.Module):
    """Its forward pass runs the blocks; a loss calls the head after it, as ILQL does."""

    _no_split_modules = ["Block"]

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block()).requires_grad_(not frozen)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.blocks(x)
        return states


def started(folder: Path, model: nn.Module, kind: str = "fsdp", **changes: Any) -> Backend:
    config, _ = ingredients("SFTTrainer", folder, **{"backend.kind": kind, **changes})
    backend = make_backend(World(make_accelerator(config)), config)
    backend.prepare(model)
    return backend


def toy(frozen: bool = False) -> Toy:
    torch.manual_seed(0)
    return Toy(frozen)


def look_around(rank: int, folder: Path) -> None:
    plain = toy()
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model = toy()
    hooked: list[str] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: hooked.append(type(model.blocks[0]).__name__))
    backend = started(folder, model)
    assert [type(part).__name__ for part in (model, *model.blocks)] == ["FSDPToy", "FSDPBlock", "FSDPBlock"]
    with backend.whole():
        with backend.whole():  # does nothing
            pass
        assert not any(isinstance(part, FSDPModule) for part in model.modules())
        state = model.state_dict()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        copied = copy.deepcopy(model)
        if rank == 0:  # a process may run it alone
            assert torch.equal(copied(torch.ones(1, 3)), plain(torch.ones(1, 3)))
            assert torch.equal(model(torch.ones(1, 3)), plain(torch.ones(1, 3)))
        assert not any(hasattr(part, "_is_fsdp_managed_module") for part in model.modules())
        with pytest.raises(RuntimeError, match="the change would be lost"):
            backend.write([(model.head.weight, model.head.weight)], torch.add)
    assert isinstance(model.blocks[0], FSDPModule) and len(model.blocks[0]._forward_pre_hooks) == 2
    hooked.clear()
    assert torch.equal(model(torch.ones(1, 3)), plain(torch.ones(1, 3)))  # gathers the blocks
    assert hooked == ["FSDPBlock"] * len(hooked) and len(hooked) == 1
    assert all(torch.equal(value, expected[name]) for name, value in backend.weights(model))


def test_whole_modules_are_plain_modules_and_divided_ones_again_after_it(tmp_path: Path) -> None:
    on_ranks(look_around, tmp_path)


def gradients(rank: int, folder: Path, kind: str, frozen: bool, changes: dict[str, Any]) -> Any:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    model = toy(frozen)
    backend = started(folder, model, kind, **changes)
    trained = backend.trained(model)
    section = OptimizerConfig(kwargs={"lr": 0.1, "eps": 1e-3, "weight_decay": 0.5}, no_decay="norms_and_biases")
    optimizer = make_optimizer(trained, section, norms_and_biases(model))
    batches = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -1.0, 2.0]])][: max(1, 2 - rank)]
    norms = []
    for _ in range(3):
        for batch, weight in backend.microbatches(batches, [2, 1, 1, 1][: dist.get_world_size()]):
            states = model(batch)
            loss = model.head(states.detach() if frozen else states).sum() + states.sum()
            backend.backward(weight * loss)
        norms.append(float(backend.finish()))
        backend.step(optimizer, accepted=True)
        backend.clear(optimizer)
        assert all(p.grad is None for p in model.parameters())
    return norms, dict(backend.weights(model)), whole(backend, backend.stateful(optimizer).state_dict())


@pytest.mark.parametrize(
    ("frozen", "processes", "changes"),
    [
        pytest.param(False, 2, {}, id="all trained"),
        pytest.param(True, 2, {}, id="only the head"),
        pytest.param(False, 4, {"backend.shard": "hybrid"}, id="hybrid"),
        pytest.param(False, 2, {"backend.shard": "gradients"}, id="gradients"),
        pytest.param(False, 2, {"backend.offload": "all"}, id="offload"),
    ],
)
def test_gradients_and_steps_are_those_of_whole_weights(
    frozen: bool, processes: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """With only the head trained, no output of the forward pass has a gradient; it is summed all the same."""
    assert_steps_are_those_of_whole_weights(tmp_path, "fsdp", frozen, changes, processes)


def assert_steps_are_those_of_whole_weights(
    folder: Path, kind: str, frozen: bool, changes: dict[str, Any], processes: int = 2
) -> None:
    changes = {"train.max_grad_norm": 0.5, "train.batch_size": 4, **changes}
    ranks = on_ranks(gradients, folder, kind, frozen, changes, processes=processes)
    (norms, weights, state), (other_norms, *_) = ranks[:2]
    same = {"backend.shard": "full", "backend.offload": "none", "backend.deepspeed_config": {}}
    expected_norms, expected, expected_state = on_ranks(
        gradients, folder, "ddp", frozen, {**changes, **same}, processes=processes
    )[0]
    assert norms == other_norms == pytest.approx(expected_norms, rel=1e-6)
    assert all(torch.allclose(weights[name], value, atol=1e-6) for name, value in expected.items())
    assert (
        list(state["state"]) == list(expected_state["state"])
        and state["param_groups"] == expected_state["param_groups"]
    )
    for number, values in expected_state["state"].items():
        for name, value in values.items():
            assert torch.allclose(state["state"][number][name], value, atol=1e-6), (number, name)
