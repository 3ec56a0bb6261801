"""The calls of DeepSpeed that are not public do what the backend relies on, on a toy of two blocks and a head."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.matrix import KINDS, import_deepspeed
from tests.distributed.ranks import on_ranks, on_two_machines
from tests.distributed.test_torch_fsdp import assert_steps_are_those_of_whole_weights, started, toy

import_deepspeed()

PERSISTENT: dict[str, Any] = {"backend.deepspeed_config": {}}
"""Small weights stay gathered between their uses, which is what DeepSpeed does by itself."""


@pytest.mark.parametrize(
    ("stage", "frozen", "processes", "changes"),
    [
        pytest.param("zero1", False, 2, {}, id="1"),
        pytest.param("zero1", True, 2, {"backend.offload": "optimizer"}, id="1 offload", marks=pytest.mark.slow),
        pytest.param("zero2", False, 4, {}, id="2 on four", marks=pytest.mark.slow),
        pytest.param("zero2", True, 2, {"backend.offload": "optimizer"}, id="2 offload"),
        pytest.param("zero3", False, 4, {}, id="3 on four"),
        pytest.param("zero3", True, 2, PERSISTENT, id="3 persistent", marks=pytest.mark.slow),
        pytest.param("zero3", False, 2, {"backend.offload": "all"}, id="3 offload"),
    ],
)
def test_gradients_and_steps_are_those_of_whole_weights(
    stage: str, frozen: bool, processes: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Two micro-batches on one process, one on the others; the last weights are on the first process alone."""
    kind = KINDS[stage]["backend.kind"]
    assert_steps_are_those_of_whole_weights(tmp_path, kind, frozen, {**KINDS[stage], **changes}, processes)


def look_around(rank: int, folder: Path) -> None:
    plain: Any = toy()
    model: Any = toy()
    hooked: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: hooked.append(model.blocks[0].linear.weight.numel()))
    backend = started(folder, model, **{"train.batch_size": 4, **KINDS["zero3"]})
    weight = model.blocks[0].linear.weight
    assert weight.numel() == 0 and backend.own(weight).numel() == (5 if rank == 0 else 4)
    with backend.whole():
        with backend.whole():  # does nothing
            pass
        copied = copy.deepcopy(model)
        assert {type(part._parameters) for part in model.modules()} == {dict}
        if rank == 0:  # a process may run it alone
            hooked.clear()
            for same in (copied, model):
                assert torch.equal(same(torch.ones(1, 3)), plain(torch.ones(1, 3)))
            assert hooked == [9, 9]  # a copy has the hooks of its model
        with pytest.raises(RuntimeError, match="the change would be lost"):
            backend.write([(model.head.weight, model.head.weight)], torch.add)
    assert weight.numel() == 0
    assert torch.equal(model(torch.ones(1, 3)), plain(torch.ones(1, 3)))  # gathers
    assert weight.numel() == 0
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in backend.weights(model))


def test_whole_modules_are_plain_modules_and_divided_ones_again_after_it(tmp_path: Path) -> None:
    on_ranks(look_around, tmp_path)


def written(rank: int, folder: Path, changes: dict[str, Any]) -> None:
    on_two_machines(changes)
    model: Any = toy()
    model.blocks[1].requires_grad_(False)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    backend = started(folder, model, **{"train.batch_size": 4, **changes})
    optimizer = torch.optim.SGD(backend.trained(model), lr=1.0)
    linears = [block.linear for block in model.blocks]
    model(torch.ones(1, 3))  # small weights may stay gathered
    for weight, followed in ((linears[1].weight, linears[0].weight), (linears[0].bias, linears[1].bias)):
        backend.write([(weight, followed)], lambda own, other: own.lerp(other, 0.5))
    names = ("blocks.1.linear.weight", "blocks.0.linear.weight", "blocks.0.linear.bias", "blocks.1.linear.bias")
    for name, other in (names[:2], names[2:]):
        expected[name] = expected[name].lerp(expected[other], 0.5)
    assert all(torch.equal(value, expected[name]) for name, value in backend.weights(model))
    for _ in backend.microbatches([None], [1, 1]):
        backend.backward(model.head(model(torch.ones(1, 3))).sum())
    backend.finish()
    backend.step(optimizer, accepted=False)
    backend.clear(optimizer)  # the optimizer's part is what all get from here on
    assert all(torch.equal(value, expected[name]) for name, value in backend.weights(model))
    plain: Any = toy()
    plain.load_state_dict(expected)
    assert torch.equal(model(torch.ones(1, 3)), plain(torch.ones(1, 3)))


@pytest.mark.parametrize("changes", [*KINDS.values(), {**KINDS["zero3"], **PERSISTENT}], ids=[*KINDS, "persistent"])
def test_weights_are_changed_outside_of_the_optimizer(changes: dict[str, Any], tmp_path: Path) -> None:
    """Those of a target that is not trained, and trained ones."""
    on_ranks(written, tmp_path, changes, processes=4 if changes == KINDS["hybrid"] else 2)


def in_turn(rank: int, folder: Path, changes: dict[str, Any]) -> Any:
    """Weights after steps with and without a block, in which the block follows the head's first micro-batch."""
    model: Any = toy()
    backend = started(folder, model, **{"train.batch_size": 4, "train.max_grad_norm": None, **changes})
    optimizer = torch.optim.AdamW(backend.trained(model), lr=0.1, eps=1e-3)
    every, head = lambda x: model.head(model(x)).sum(), lambda x: model.head(x).sum()
    for number, parts in enumerate(([every, every], [head], [head, every])):
        for loss, _ in backend.microbatches(parts, [len(parts)] * 2):
            backend.backward(loss(torch.tensor([[1.0, rank, 2.0]])))
        backend.finish()
        backend.step(optimizer, accepted=number != 0)
        backend.clear(optimizer)
    return dict(backend.weights(model))


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_gradients_of_one_step_are_not_those_of_another(stage: str, tmp_path: Path) -> None:
    """The first step is dropped; the second one does not use the blocks, and AdamW would let unused weights decay."""
    plain, divided = (on_ranks(in_turn, tmp_path, changes)[0] for changes in (KINDS["ddp"], KINDS[stage]))
    assert all(torch.allclose(divided[name], value, atol=1e-6) for name, value in plain.items())
