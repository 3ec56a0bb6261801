"""Tensors that several processes write in ranges, read whole or in other ranges, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from trlx_like.checkpoint import TrainState, load_tree, save_tree
from trlx_like.checkpoint.ranges import has_parts
from trlx_like.errors import CheckpointError
from trlx_like.functional.parts import Part, flat_range

TENSORS = {
    "weight": torch.randn(7, 3, generator=torch.Generator().manual_seed(0)),
    "bias": torch.tensor([1.5, float("nan"), -0.0]),
    "half": torch.arange(5).bfloat16(),
    "one": torch.tensor([[3.0, 4.0]]),
}


def divided(rank: int, ranks: int) -> dict[str, Any]:
    """The state of one of several processes; the last tensor is held by all."""
    parts: dict[str, Any] = {}
    for name, tensor in TENSORS.items():
        begin, end = flat_range(tensor.shape, rank, ranks)
        parts[name] = Part(tensor.flatten()[begin:end], tuple(tensor.shape), begin)
    return {"deep": [parts, {"step": 3}], "plain": torch.ones(2)}


def write(path: Path, ranks: int) -> None:
    for rank in range(ranks):
        save_tree(divided(rank, ranks), path, rank, main=rank == 0)


def same(got: Tensor, expected: Tensor) -> bool:
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (got, expected)]
    return got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(*bits)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(writers=st.integers(1, 9), readers=st.integers(1, 9))
def test_any_number_of_processes_reads_what_any_number_wrote(
    tmp_path_factory: pytest.TempPathFactory, writers: int, readers: int
) -> None:
    path = tmp_path_factory.mktemp("ranges") / "model"
    write(path, writers)
    whole = load_tree(path)
    assert all(same(whole["deep"][0][name], tensor) for name, tensor in TENSORS.items())
    assert whole["deep"][1] == {"step": 3} and not has_parts(whole)
    for rank in range(readers):
        read = load_tree(path, parts=True)
        for name, part in divided(rank, readers)["deep"][0].items():
            got = read["deep"][0][name]
            assert got.shape == part.shape and same(part.like(got), part.values)
            assert same(part.like(TENSORS[name]), part.values) and same(part.like(part), part.values)


def test_a_range_that_several_processes_hold_is_written_once(tmp_path: Path) -> None:
    for rank in range(4):
        begin, end = 4 * (rank % 2), 4 * (rank % 2) + 4
        part = Part(torch.arange(8.0)[begin:end], (8,), begin, writes=rank < 2)
        save_tree({"weight": part}, tmp_path / "model", rank, main=rank == 0)
    assert load_tree(tmp_path / "model")["weight"].tolist() == list(range(8))
    sizes = [(tmp_path / f"model.rank_{rank}.safetensors").stat().st_size for rank in range(4)]
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3]


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model", 3)
    for kind in ("json", "safetensors"):
        (tmp_path / f"model.rank_1.{kind}").unlink()
    message = r"model\.rank_\*: no file has the numbers 9 to 21 of tensor 0 of shape \[7, 3\]"
    with pytest.raises(CheckpointError, match=message):
        load_tree(tmp_path / "model")
    first = load_tree(tmp_path / "model", parts=True)
    assert same(first["deep"][0]["weight"].read(0, 9), TENSORS["weight"].flatten()[:9])


@pytest.mark.parametrize("content", ["{", '{"format": "other", "version": 1}', '{"format": "trlx_like.ranges"}'])
def test_a_damaged_list_of_ranges_is_named(content: str, tmp_path: Path) -> None:
    write(tmp_path / "model", 2)
    (tmp_path / "model.rank_1.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model.*(is damaged|is 'other')"):
        load_tree(tmp_path / "model")


class Divided:
    """An item whose state is divided over `ranks` processes."""

    reads_parts = True

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.loaded: Any = None

    def state_dict(self) -> Any:
        return divided(self.rank, self.ranks)

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def test_every_process_writes_its_own_part_of_a_shared_item(tmp_path: Path) -> None:
    def state(rank: int, ranks: int) -> tuple[TrainState, Divided]:
        item, state = Divided(rank, ranks), TrainState()
        state.register("model", item)
        return state, item

    for rank in (1, 0):
        state(rank, 2)[0].save(tmp_path, rank, main=rank == 0)
    for rank in range(3):
        other, item = state(rank, 3)
        other.load(tmp_path, rank, ranks=3)
        for name, part in divided(rank, 3)["deep"][0].items():
            assert same(part.like(item.loaded["deep"][0][name]), part.values)
