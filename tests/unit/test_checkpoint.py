"""State in files: trees come back bit by bit, random numbers go on where they were, runs resume exactly."""

from __future__ import annotations

import json
import logging
import os
import random
import struct
import tempfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trlx_like.checkpoint import (
    RngState,
    TrainState,
    fields,
    isolated_rng,
    load_tree,
    rng_state,
    save_tree,
    seed_everything,
    set_rng_state,
)
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
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        keys = [(type(key), key) for key in left] == [(type(key), key) for key in right]
        return keys and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    return bool(left == right)


def bits(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.resolve_conj().reshape(-1), torch.zeros(1, dtype=tensor.dtype)]).view(torch.uint8)


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
            *(Counter({"a": 2}), torch.tensor(3.5), torch.zeros(0, 4), torch.tensor(1 + 2j).conj()),
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
            file.write(bytes(file.seek(0, 2)))
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
        ],
    )
    def test_nodes_that_are_never_written(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        save_tree({"w": torch.ones(3)}, tmp_path / "state")
        structure = tmp_path / "state.json"
        structure.write_text(json.dumps(json.loads(structure.read_text()) | change))
        with pytest.raises(CheckpointError, match=message):
            load_tree(tmp_path / "state")


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class TestRng:
    def test_seeds_reach_every_generator(self) -> None:
        # First numbers of Mersenne twisters seeded with 0, as documented all over: random.seed(0), np.random.seed(0),
        # torch.manual_seed(0).
        with isolated_rng(0):
            assert draws() == pytest.approx((0.8444218515, 0.5488135039, 0.4962565899), abs=1e-9)
        with isolated_rng(2**40 + 1):
            first = draws()
        with isolated_rng(2**40 + 1):
            assert draws() == first

    def test_state_through_a_file_gives_the_same_numbers(self, tmp_path: Path) -> None:
        seed_everything(7)
        random.gauss(0, 1)  # leaves half of a pair behind
        np.random.randn()
        save_tree(rng_state(), tmp_path / "rng")
        expected = [random.gauss(0, 1), float(np.random.randn()), *draws()]
        seed_everything(8)
        set_rng_state(load_tree(tmp_path / "rng"))
        assert [random.gauss(0, 1), float(np.random.randn()), *draws()] == expected

    def test_isolation_holds_when_the_block_raises(self) -> None:
        seed_everything(3)
        expected = draws()
        seed_everything(3)
        with pytest.raises(KeyError), isolated_rng(99):
            draws()
            raise KeyError
        assert draws() == expected

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    def test_cuda_is_isolated_from_its_first_use_on(self) -> None:
        seed_everything(3)
        expected = torch.rand(4, device="cuda")
        torch.manual_seed(3)
        with isolated_rng(99):
            torch.rand(4, device="cuda")
        assert torch.equal(torch.rand(4, device="cuda"), expected)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_other_devices_than_there_were_are_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "trlx_like"):
            set_rng_state({**rng_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)]})
        assert "1 CUDA devices were saved and this machine has 0" in caplog.text


class Run:
    """A tiny training run with everything that a real one has: dropout, AdamW, a schedule, counters."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.step, self.best, self.mean, self.seen = 0, None, torch.zeros(2), {"prompts": 3}
        self.state = TrainState(meta={"trainer": "PPOTrainer", "version": "0.1"})
        self.state.register("model", self.model, small=False)
        self.state.register("optimizer", self.optimizer, small=False)
        self.state.register("scheduler", self.scheduler)
        self.state.register("loop", fields(self, "step", "best", "mean", "seen"))
        self.state.register("rng", RngState(), local=True)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(16, 4)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            self.mean = self.mean + loss.detach()
            losses.append(loss.item())
        return losses


class TestTrainState:
    def test_a_resumed_run_is_the_run_that_never_stopped(self, tmp_path: Path) -> None:
        first = Run(seed=1)
        first.train(3)
        first.state.save(tmp_path, rank=0, main=True)
        expected = first.train(3)
        second = Run(seed=2)
        second.train(1)
        second.state.load(tmp_path, rank=0)
        assert (second.step, second.seen) == (3, {"prompts": 3})
        assert second.train(3) == expected
        assert same(second.model.state_dict(), first.model.state_dict())
        assert same(second.optimizer.state_dict(), first.optimizer.state_dict())
        assert torch.equal(second.mean, first.mean)

    def test_a_snapshot_of_the_small_items_can_be_put_back(self) -> None:
        run = Run(seed=1)
        before = run.state.snapshot()
        assert set(before) == {"scheduler", "loop", "rng"}
        expected, run.seen["prompts"] = draws(), 99
        run.train(2)
        run.state.restore(before)
        assert (run.step, run.seen, draws()) == (0, {"prompts": 3}, expected)

    def test_each_process_gets_its_own_local_items_back(self, tmp_path: Path) -> None:
        def state(rank: int) -> tuple[TrainState, dict[str, int]]:
            values = {"shared": 10 + rank, "own": 20 + rank}
            train_state = TrainState()
            train_state.register("model", Holder(values, "shared"))
            train_state.register("store", Holder(values, "own"), local=True)
            return train_state, values

        for rank in (1, 0):
            state(rank)[0].save(tmp_path, rank, main=rank == 0)
        for rank in (0, 1):
            train_state, values = state(5)
            train_state.load(tmp_path, rank, ranks=2)
            assert values == {"shared": 10, "own": 20 + rank}
        message = r"state of 2 processes \(store\), and this run has 4\. Start 2, or"
        with pytest.raises(CheckpointError, match=message):
            state(0)[0].load(tmp_path, 0, ranks=4)

    def test_without_local_items_any_number_of_processes_will_do(self, tmp_path: Path) -> None:
        values = {"a": 1}
        state = TrainState()
        state.register("model", Holder(values, "a"))
        state.save(tmp_path, 0, True)
        values["a"] = 2
        state.load(tmp_path, 2, ranks=3)
        assert values == {"a": 1}

    def test_a_checkpoint_of_another_run_is_refused_and_nothing_touched(self, tmp_path: Path) -> None:
        run = Run(seed=1)
        run.state.save(tmp_path, 0, True)
        values = {"a": 1}
        other = TrainState(meta={"trainer": "SFTTrainer"})
        other.register("model", Holder(values, "a"))
        other.register("critic", Holder(values, "a"))
        other.register("rng", RngState())
        with pytest.raises(CheckpointError) as caught:
            other.load(tmp_path, 0)
        message = str(caught.value)
        assert message.startswith(f"{tmp_path}, written by trainer PPOTrainer, version 0.1, does not fit trainer SFT")
        assert "it lacks critic; it has optimizer, which this run does not; it has scheduler" in message
        assert "rng is local there and shared here" in message
        assert values == {"a": 1}

    def test_an_item_that_does_not_take_its_state_is_named(self, tmp_path: Path) -> None:
        first, second = TrainState(), TrainState()
        first.register("model", nn.Linear(2, 2))
        second.register("model", nn.Linear(3, 2))
        first.save(tmp_path, 0, True)
        with pytest.raises(CheckpointError, match=r"^model cannot be restored from .*size mismatch"):
            second.load(tmp_path, 0)

    def test_an_item_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        state = TrainState()
        state.register("controller", Holder({"a": {1}}, "a"))
        with pytest.raises(CheckpointError, match=r"^controller cannot be saved: a is a builtins\.set"):
            state.save(tmp_path, 0, True)

    @pytest.mark.parametrize("content", [None, "{", "[]", '{"version": 1}', '{"version": 2, "items": {}}'])
    def test_an_index_that_is_missing_or_wrong(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            (tmp_path / "state").mkdir()
            (tmp_path / "state" / "index.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"no state/index\.json|index\.json (is damaged|has version 2)"):
            TrainState().load(tmp_path, 0)

    def test_registering_wrongly(self) -> None:
        state = TrainState()
        state.register("model", nn.Linear(1, 1))
        with pytest.raises(CheckpointError, match="'model' is the name of a registered Linear"):
            state.register("model", nn.Linear(1, 1))
        with pytest.raises(CheckpointError, match=r"'\.\./up' cannot be saved under this name"):
            state.register("../up", nn.Linear(1, 1))
        wrong: Any = 3
        with pytest.raises(CheckpointError, match=r"'step' is a int, which has no state_dict\(\)"):
            state.register("step", wrong)

    def test_fields_keep_to_their_names(self) -> None:
        run = Run(seed=0)
        with pytest.raises(CheckpointError, match="Run has no worst, last to save yet"):
            fields(run, "step", "worst", "last")
        with pytest.raises(ValueError, match=r"it has the fields \['best'\], and \['step'\] are wanted"):
            fields(run, "step").load_state_dict({"best": 1})


class Holder:
    """One entry of a dict as state."""

    def __init__(self, values: dict[str, Any], key: str) -> None:
        self.values, self.key = values, key

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.values[self.key]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.update(state)
