"""Nested state in two files comes back bit by bit; what cannot is refused by its place."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from trlx_like.checkpoint import load_tree, save_tree
from trlx_like.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
    torch.bool,
]


def same(left: Any, right: Any) -> bool:
    """True of states that agree in every type and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))
    if isinstance(left, np.ndarray | np.generic):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, dict):
        keys = [(type(key), key) for key in left] == [(type(key), key) for key in right]
        return keys and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    equal: bool = left == right
    return equal


def bits(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.resolve_conj().resolve_neg().reshape(-1), torch.zeros(1, dtype=tensor.dtype)]).view(
        torch.uint8
    )


def tensors() -> st.SearchStrategy[Tensor]:
    """Random bits of every dtype, 0 to 3 dimensions, some strided, expanded or transposed."""

    def build(dtype: torch.dtype, shape: list[int], seed: int, view: str) -> Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        raw = torch.randint(256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
        if view == "transposed":
            return tensor.permute(tuple(reversed(range(tensor.dim()))))
        if view == "expanded":
            return tensor.unsqueeze(0).expand(2, *shape)
        return tensor[::2] if view == "strided" and shape else tensor

    shapes = st.lists(st.integers(0, 3), max_size=3)
    views = st.sampled_from(["whole", "transposed", "expanded", "strided"])
    return st.builds(build, st.sampled_from(DTYPES), shapes, st.integers(0, 99), views)


def arrays() -> st.SearchStrategy[Any]:
    kinds = st.sampled_from(["?", "<i4", ">i2", "<f8", "<f2", "<c8", "<U3", "S2", "<M8[ns]"])
    arrays = st.builds(
        lambda kind, rows: np.asfortranarray(np.arange(3 * rows).reshape(rows, 3).astype(kind)),
        kinds,
        st.integers(0, 3),
    )
    return arrays | arrays.filter(lambda array: array.size > 0).map(lambda array: array[-1, -1])


def trees() -> st.SearchStrategy[Any]:
    surrogates = st.text(st.characters(exclude_categories=()), max_size=4)
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | surrogates
    keys = surrogates | st.integers()
    return st.recursive(
        scalars | tensors() | arrays(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=3)
            | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        ),
        max_leaves=8,
    )


class TestTree:
    @given(trees())
    @settings(max_examples=150, deadline=None)
    def test_every_tree_comes_back_bit_by_bit(self, tree: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            save_tree(tree, Path(folder) / "state.v1")
            assert sorted(os.listdir(folder)) == ["state.v1.json", "state.v1.safetensors"]
            assert same(load_tree(Path(folder) / "state.v1"), tree)

    @pytest.mark.parametrize(
        "value",
        [
            *(float("nan"), float("-inf"), -0.0, 5e-324, struct.unpack(">d", bytes.fromhex("7ff8dead0000beef"))[0]),
            *(2**63, -(2**63) - 1, 7**9000, True, 1, "\ud83d\ude00", "😀", "", {"!": "int"}, {1: 0, "1": 1}),
            *(
                Counter({"a": 2}),
                torch.tensor(3.5),
                torch.zeros(0, 4),
                torch.tensor(1 + 2j).conj(),
                torch.tensor(1 + 2j).conj().imag,
            ),
            *(np.float64("nan"), np.bool_(True), np.array(5, dtype=">i8"), np.datetime64("2020-01-01"), ()),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_the_odd_ones(self, tmp_path: Path, value: Any) -> None:
        save_tree({"value": [value]}, tmp_path / "state")
        assert same(load_tree(tmp_path / "state"), {"value": [value]})

    def test_the_same_memory_is_written_once(self, tmp_path: Path) -> None:
        embedding = nn.Parameter(torch.randn(1000))
        save_tree({"in": embedding, "out": embedding, "part": embedding[:10]}, tmp_path / "state")
        assert (tmp_path / "state.safetensors").stat().st_size < 4 * 1010 + 500
        loaded = load_tree(tmp_path / "state")
        assert loaded["in"] is loaded["out"]
        loaded["in"].zero_()
        assert torch.equal(loaded["part"], embedding[:10])

    def test_what_is_loaded_does_not_need_the_file(self, tmp_path: Path) -> None:
        save_tree(torch.arange(5000), tmp_path / "state")
        loaded = load_tree(tmp_path / "state")
        with (tmp_path / "state.safetensors").open("r+b") as file:
            size = file.seek(0, 2)
            file.seek(0)
            file.write(bytes(size))
        assert torch.equal(loaded, torch.arange(5000))

    @pytest.mark.parametrize(
        ("tree", "message"),
        [
            ({"a": [1, {"b": {1, 2}}]}, r"a\.1\.b is a builtins\.set"),
            ({3: (None, print)}, r"3\.1 is a builtins\.builtin_function_or_method"),
            ({"a": {("x", 1): 0}}, r"a has the key \('x', 1\) of type tuple"),
            ({"a": {True: 0}}, r"a has the key True of type bool"),
            ({"w": torch.eye(2).to_sparse()}, r"w is a tensor that is not dense \(torch.sparse_coo"),
            ({"w": torch.empty(2, device="meta")}, r"w is a tensor that is not dense .*meta"),
            ({"x": np.array([print])}, r"x is a numpy ndarray of dtype object"),
            ({"x": np.zeros(2, dtype=[("a", "i4")])}, r"x is a numpy ndarray of dtype \[\('a'"),
            (object(), r"the state is a builtins\.object"),
        ],
    )
    def test_what_cannot_be_held_is_refused_by_its_place(self, tmp_path: Path, tree: Any, message: str) -> None:
        with pytest.raises(CheckpointError, match=f"^{message}"):
            save_tree(tree, tmp_path / "state")
        assert list(tmp_path.iterdir()) == []

    def test_a_list_that_contains_itself(self, tmp_path: Path) -> None:
        endless: list[Any] = [1]
        endless.append(endless)
        with pytest.raises(CheckpointError, match=r"^a\.1\.1\.1\.1 is nested deeper than 100, or contains itself"):
            save_tree({"a": endless}, tmp_path / "state")

    def test_a_disk_that_refuses_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="gone/state cannot be written"):
            save_tree({"a": 1}, tmp_path / "gone" / "state")

    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("state.json", None, r"state\.json is missing"),
            ("state.safetensors", None, r"state\.safetensors is missing"),
            ("state.json", b'{"format": "trlx_like.tree"', "damaged: JSONDecodeError"),
            ("state.json", b"[1]", "damaged: TypeError"),
            ("state.json", b"\xff", "damaged: Unicode"),
            ("state.safetensors", b"\x08" + bytes(9), "damaged: SafetensorError"),
        ],
    )
    def test_damage_is_found(self, tmp_path: Path, file: str, content: bytes | None, message: str) -> None:
        save_tree({"w": torch.ones(3)}, tmp_path / "state")
        (tmp_path / file).unlink()
        if content is not None:
            (tmp_path / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            load_tree(tmp_path / "state")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 9}, "version 9; this release reads 'trlx_like.tree', version 1"),
            ({"tree": {"!": "object", "module": "os"}}, "damaged: KeyError"),
            ({"tree": {"!": "tensor", "name": "7"}}, "damaged: KeyError"),
            ({"tree": {"!": "tensor", "name": "0", "dtype": "load", "shape": []}}, "no dtype 'load'"),
            ({"tree": {"!": "numpy", "name": "0", "dtype": "O", "shape": [1]}}, "'O' is never written"),
            ({"tree": {"!": "numpy", "name": "0", "dtype": "f,,", "shape": [1]}}, "damaged: SyntaxError"),
            ({"tree": {"!": "float", "bits": "00"}}, "damaged: error"),
        ],
    )
    def test_nodes_that_are_never_written(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        save_tree({"w": torch.ones(3)}, tmp_path / "state")
        structure = tmp_path / "state.json"
        structure.write_text(json.dumps(json.loads(structure.read_text()) | change))
        with pytest.raises(CheckpointError, match=message):
            load_tree(tmp_path / "state")
