"""Runs of MLflow and SwanLab on this machine, resumed and read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tracking.support import run_python

LOGGED = """
from pathlib import Path
from accelerate import PartialState
from trlx_like.tracking import RunInfo, make_trackers
PartialState(cpu=True)  # a run has one
state = {}
for resume_step in (None, 1):
    run = RunInfo(Path("mine"), {"train": {"seed": resume_step}}, "tests", 10, resume_step=resume_step, state=state)
    run.options = OPTIONS
    trackers = make_trackers([NAME], run, main=True)
    trackers.log({"reward/mean": 0.25, "reward/mean@b": 0.5, "bad": float("nan")}, (resume_step or 0) + 1)
    trackers.log_table("samples", ["output", "reward"], [["text", 0.5]], (resume_step or 0) + 1)
    trackers.close()
"""
MLFLOW = """
import mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
assert run.info.run_id == state["mlflow"] and run.info.run_name == "mine" and run.info.status == "FINISHED"
assert run.data.params == {"train.seed": "None"} and run.data.tags["mlflow.note.content"] == "a try"
rewards = client.get_metric_history(run.info.run_id, "reward/mean")
assert [(one.step, one.value) for one in rewards] == [(1, 0.25), (2, 0.25)]
assert run.data.metrics["reward/mean_b"] == 0.5
assert [one.path for one in client.list_artifacts(run.info.run_id, "samples")] == [
    "samples/00000001.json", "samples/00000002.json"
]
table = mlflow.artifacts.load_dict(f"runs:/{run.info.run_id}/samples/00000002.json")
assert table == {"columns": ["output", "reward"], "data": [["text", 0.5]]}
print("all is there")
"""
SWANLAB = """
folders = list(Path("mine/swanlog").glob("run-*"))
assert len(folders) == 2 and all(folder.name.endswith(state["swanlab"]) for folder in folders), folders
logged = b"".join(file.read_bytes() for folder in folders for file in folder.rglob("*") if file.is_file())
assert b"reward/mean@b" in logged and b"a try" in logged
print("all is there")
"""


def test_mlflow_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    given = "NAME, OPTIONS = 'mlflow', {'mlflow': {'description': 'a try'}}\n"
    done = run_python(
        given + LOGGED + MLFLOW,
        tmp_path,
        MLFLOW_TRACKING_URI=(tmp_path / "runs").as_uri(),
        MLFLOW_ALLOW_FILE_STORE="true",
    )
    assert "all is there" in done.stdout, done.stderr


@pytest.mark.parametrize(("error", "status"), [("OSError", "FAILED"), ("SystemExit", "KILLED")])
def test_mlflow_shows_a_run_that_failed(error: str, status: str, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    script = f"""
import contextlib, mlflow
from pathlib import Path
from accelerate import PartialState
from trlx_like.tracking import RunInfo, make_trackers
PartialState(cpu=True)
run = RunInfo(Path("mine"), {{}}, "tests", 10)
with contextlib.suppress({error}), contextlib.closing(make_trackers(["mlflow"], run, main=True)):
    raise {error}("no space")
print(mlflow.get_run(run.state["mlflow"]).info.status)
"""
    uri = (tmp_path / "runs").as_uri()
    done = run_python(script, tmp_path, MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true")
    assert done.stdout.splitlines()[-1:] == [status], done.stderr


def test_an_argument_that_mlflow_does_not_know(tmp_path: Path) -> None:
    """SwanLab takes any."""
    pytest.importorskip("mlflow")
    given = "NAME, OPTIONS = 'mlflow', {'mlflow': {'nots': 'a try'}}\n"
    done = run_python(given + LOGGED, tmp_path, MLFLOW_TRACKING_URI=tmp_path.as_uri())
    assert "ConfigError: train.tracker_kwargs.mlflow ({'nots': 'a try'}): " in done.stderr


def test_swanlab_offline_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    given = "NAME, OPTIONS = 'swanlab', {'swanlab': {'description': 'a try'}}\n"
    done = run_python(given + LOGGED + SWANLAB, tmp_path, SWANLAB_MODE="offline")
    assert "all is there" in done.stdout, done.stderr
