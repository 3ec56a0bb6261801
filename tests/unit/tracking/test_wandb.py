"""Runs of wandb, offline and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.tracking.support import run_info, run_python
from trlx_like.errors import ConfigError
from trlx_like.tracking import make_trackers


def test_wandb_offline_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    state: dict[str, str] = {}
    for resume_step, reward in [(None, 0.123456), (1, 0.654321)]:
        info = run_info(tmp_path / "mine", tags=["t1"], resume_step=resume_step, state=state)
        info.options = {"WandB": {"notes": "a first try", "tags": ["t1", "t2"]}}
        trackers = make_trackers(["wandb"], info, main=True)
        assert wandb.run is not None and wandb.run.name == "mine"
        trackers.log({"reward/mean": reward, "bad": float("inf")}, (resume_step or 0) + 1)
        trackers.log_table("samples", ["output", "reward"], [["some text", 0.5], ["other", None]], 2)
        trackers.close()
        wandb.teardown()  # until then its service may still be writing
        folders = list((tmp_path / "mine" / "wandb").glob("offline-run-*"))
        assert folders and all(
            state["wandb"] in folder.name for folder in folders
        )  # two in a second: the other ends in -1
        record = b"".join(path.read_bytes() for folder in folders for path in folder.glob("*.wandb"))
        assert all(
            word in record for word in (str(reward).encode(), b"t1", b"t2", b"a first try", b"reward/mean", b"seed")
        )
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("media/table/*.json")]
    assert tables[0] == {"columns": ["output", "reward"], "data": [["some text", 0.5], ["other", None]]}


def test_an_argument_that_wandb_does_not_know(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    info = run_info(tmp_path, options={"wandb": {"nots": "a try"}})
    with pytest.raises(ConfigError, match=r"train.tracker_kwargs.wandb \(\{'nots': 'a try'\}\): .*nots"):
        make_trackers(["wandb"], info, main=True)


def test_wandb_without_an_account_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    script = (
        "from pathlib import Path; from trlx_like.tracking import *\n"
        "make_trackers(['wandb'], RunInfo(Path('run'), {}, 'p', 1), True)"
    )
    done = run_python(script, tmp_path, WANDB_MODE="online", WANDB_API_KEY="", NETRC=str(tmp_path / "netrc"))
    assert done.stderr.splitlines()[-1].startswith('trlx_like.errors.ConfigError: train.tracker ("wandb") cannot start')
    assert done.stderr.rstrip().endswith("Run `wandb login`, or set WANDB_MODE=offline.")
