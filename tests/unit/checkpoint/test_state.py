"""What a run has to remember: saved, refused or put back so that a resumed run is the run that never stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.unit.checkpoint.test_rng import draws
from trlx_like.checkpoint import (
    RngState,
    TrainState,
    fields,
)
from trlx_like.errors import CheckpointError

assert_same = partial(assert_close, rtol=0, atol=0)


FILES = ("json", "safetensors")


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
        assert_same(second.model.state_dict(), first.model.state_dict())
        assert_same(second.optimizer.state_dict()["state"], first.optimizer.state_dict()["state"])
        assert_same(second.mean, first.mean)

    def test_large_items_may_be_left_to_the_caller(self, tmp_path: Path) -> None:
        """Their files from another checkpoint make a whole one of it."""
        run = Run(seed=1)
        run.train(2)
        for name, large in (("whole", True), ("small", False)):
            run.state.save(tmp_path / name, rank=0, main=True, large=large)
        whole, small = (
            {str(path.relative_to(tmp_path / name)): path for path in (tmp_path / name).rglob("*") if path.is_file()}
            for name in ("whole", "small")
        )
        left_out = whole.keys() - small.keys()
        assert left_out == {f"state/shared/{name}.{end}" for name in ("model", "optimizer") for end in FILES}
        assert {name for name in whole if run.state.is_large(name)} == left_out
        assert run.state.sizes["model"] == 4 * (4 * 8 + 8 + 8 + 1)
        for name in left_out:
            (tmp_path / "small" / name).write_bytes(whole[name].read_bytes())
        expected, again = run.train(2), Run(seed=2)
        again.state.load(tmp_path / "small", rank=0)
        assert again.train(2) == expected

    @pytest.mark.parametrize(
        ("file", "large"),
        [
            ("state/shared/model.rank_1.safetensors", True),
            ("state/shared/models.json", False),
            ("state/rank_0/model.json", False),
            ("model.json", False),
        ],
    )
    def test_files_are_large_by_the_whole_name_of_their_item(self, file: str, large: bool) -> None:
        assert Run(seed=1).state.is_large(file) is large

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

        for rank in (0, 1):
            state(rank)[0].save(tmp_path, rank, main=rank == 0)
        for rank in (0, 1):
            train_state, values = state(5)
            train_state.load(tmp_path, rank, ranks=2)
            assert values == {"shared": 10, "own": 20 + rank}
        message = r"state of 2 processes \(store\), and this run has 4\. Start 2, or"
        other, values = state(5)
        with pytest.raises(CheckpointError, match=message):
            other.load(tmp_path, 0, ranks=4)
        assert values == {"shared": 15, "own": 25}

    def test_another_number_of_processes_makes_local_items_anew(self, tmp_path: Path) -> None:
        values, renewed = {"step": 7, "own": 1}, list[int]()
        state = TrainState()
        state.register("progress", Holder(values, "step"))
        state.register("rng", Holder(values, "own"), local=True, renew=lambda: renewed.append(values["step"]))
        for rank in (0, 1):
            state.save(tmp_path, rank, main=rank == 0)
        values |= {"step": 0, "own": 2}
        state.load(tmp_path, 2, ranks=3)
        assert (values, renewed) == ({"step": 7, "own": 2}, [7]), "what was registered before is restored before"
        state.load(tmp_path, 1, ranks=2)
        assert (values, renewed) == ({"step": 7, "own": 1}, [7])

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

    @pytest.mark.parametrize("content", [None, "{", "[]", '{"version": 1}', '{"version": 1, "items": {}}'])
    def test_an_index_that_is_missing_or_wrong(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            (tmp_path / "state").mkdir()
            (tmp_path / "state" / "index.json").write_text(content)
        with pytest.raises(
            CheckpointError, match=r"no state/index\.json|index\.json (is damaged|has version 1; .*hf_model\))"
        ):
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
