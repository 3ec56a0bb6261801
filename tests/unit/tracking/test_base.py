"""All trackers as one: registered, closed, refused by name, and imported without their libraries."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.tracking.support import run_info, run_python, write_run
from trlx_like.errors import ConfigError, RegistryError, RewardError
from trlx_like.tracking import RunInfo, Trackers, make_trackers, register_tracker


class Recorder:
    """A plugin's tracker."""

    last: Recorder

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.calls: list[Any] = []
        Recorder.last = self

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append((dict(metrics), step))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.calls.append((name, columns, rows, step))

    def close(self) -> None:
        self.calls.append("closed")


register_tracker("recorder")(Recorder)


def test_a_registered_tracker_gets_everything(tmp_path: Path) -> None:
    trackers = make_trackers(["Recorder"], run_info(tmp_path), main=True)
    trackers.log({"a": torch.tensor(0.25)}, 1)
    trackers.log_table("t", ["x"], [[1]], 1)
    trackers.close()
    trackers.close()
    assert Recorder.last.run.directory == tmp_path
    assert Recorder.last.calls == [({"a": 0.25}, 1), ("t", ["x"], [[1]], 1), "closed"]
    assert type(Recorder.last.calls[0][0]["a"]) is float


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    trackers = make_trackers(["recorder"], run_info(tmp_path / "run"), main=False)
    trackers.log({"a": 1.0}, 1)
    trackers.log_table("t", ["x"], [[1]], 1)
    trackers.close()
    assert not (tmp_path / "run").exists()


def test_all_are_closed_when_one_raises(tmp_path: Path) -> None:
    class Broken(Recorder):
        def close(self) -> None:
            raise OSError("disk full")

    good, broken = Recorder(run_info(tmp_path)), Broken(run_info(tmp_path))
    with pytest.raises(OSError, match="disk full"):
        Trackers([good, broken]).close()
    assert good.calls == ["closed"]


def test_a_value_that_is_no_number_names_its_metric(tmp_path: Path) -> None:
    trackers = Trackers([Recorder(run_info(tmp_path))])
    with pytest.raises(RewardError, match=r"metric 'metrics/x' must be one number, got list: \[1, 2\]"):
        trackers.log({"metrics/x": [1, 2]}, 0)


@pytest.mark.parametrize("main", [True, False])
def test_unknown_tracker(tmp_path: Path, main: bool) -> None:
    with pytest.raises(RegistryError, match="unknown tracker 'wandbb'. Did you mean wandb?"):
        make_trackers(["wandbb"], run_info(tmp_path), main)


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio", "mlflow", "swanlab"])
def test_missing_package(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, steps=1)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for module in [module for module in sys.modules if module.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf'train.tracker \("{name}"\).*pip install "trlx-like\[{name}\]"'):
        make_trackers([name], run_info(tmp_path), main=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "metrics.1.jsonl").exists()


def test_importing_trackers_imports_none_of_their_libraries() -> None:
    heavy = "('torch', 'wandb', 'tensorboard', 'trackio')"
    done = run_python(f"import sys, trlx_like.tracking; print([m for m in {heavy} if m in sys.modules])", Path.cwd())
    assert done.stdout.strip() == "[]", done.stderr
