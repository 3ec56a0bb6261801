"""Processes whose launcher was killed end by themselves, and save before if they can."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import save_tiny
from trlx_like.checkpoint import CheckpointStore

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="a handle cannot be passed on there")

DEAF = """
import os, signal, time
from trlx_like.distributed import orphans
orphans.GRACE = 0.5
signal.signal(signal.SIGTERM, signal.SIG_IGN)
orphans.watch_launcher()
os.write(1, f"{os.environ['RANK']} {orphans.VARIABLE in os.environ}\\n".encode())  # at once, since two processes do
time.sleep(300)
"""


def started(*words: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def seconds_after_kill(launcher: subprocess.Popen[str]) -> float:
    """Seconds from the launcher's death until nothing that it started has its output open."""
    assert launcher.stdout is not None
    launcher.kill()
    start = time.monotonic()
    launcher.stdout.read()
    return time.monotonic() - start


OURS = ["-c", f"from trlx_like.distributed import launch; launch(['-c', {DEAF!r}], 2)"]


@pytest.mark.parametrize(
    "words",
    [
        OURS,
        pytest.param(
            ["-m", "torch.distributed.run", "--nproc_per_node", "2", "deaf.py"], marks=pytest.mark.slow, id="torchrun"
        ),
    ],
)
def test_a_process_that_does_not_listen_ends_all_the_same(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    launcher = started(*words, folder=tmp_path)
    assert launcher.stdout is not None
    assert sorted(launcher.stdout.readline().split() for _ in range(2)) == [["0", "False"], ["1", "False"]]
    assert 0.5 <= seconds_after_kill(launcher) < 10


def test_a_run_whose_launcher_was_killed_is_saved(tmp_path: Path) -> None:
    (tmp_path / "samples.txt").write_text("ab cd\nthe cat\nzz top.\nb\n")
    config: dict[str, Any] = {
        "model": {"model_path": save_tiny(tmp_path / "model")},
        "method": {"name": "SFTConfig"},
        "train": {"trainer": "SFTTrainer", "seq_length": 20, "batch_size": 2, "total_steps": 10**6, "epochs": 10**6},
        "data": {"samples": "samples.txt"},
    }
    config["train"] |= {"eval_interval": 10**6, "checkpoint_interval": 10**6}
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    launcher = started("-m", "trlx_like", "train", "config.yml", "--num-processes", "2", folder=tmp_path)
    metrics = tmp_path / "ckpts" / "metrics.jsonl"
    until = time.monotonic() + 150
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 4:
        assert launcher.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    assert seconds_after_kill(launcher) < 10
    assert launcher.returncode != 0 and launcher.wait() == -signal.SIGKILL
    saved = CheckpointStore(tmp_path / "ckpts").newest()
    assert saved is not None
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert saved.name == f"checkpoint_{last:07d}"
