"""The three ways to start two processes really start two that know of each other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.contract.recipes import GENERATION, PROMPTS
from tests.contract.runs import rows
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
CPU2, FSDP2 = (str(ROOT / "configs" / "accelerate" / name) for name in ("cpu2.yaml", "fsdp2.yaml"))
REWARD = "def reward(outputs):\n    return [output.count('a') - 0.1 * len(output) for output in outputs]\n"


COMMANDS = {
    "trlx-like": ["-m", "trlx_like", "train", "config.yml", "--num-processes", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "trlx_like", "train", "config.yml"],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--config_file", CPU2, "-m", "trlx_like", "train", "config.yml"),
    ],
    "accelerate fsdp": [
        *("-m", "accelerate.commands.launch", "--config_file", FSDP2, "-m", "trlx_like", "train", "config.yml"),
        *("--set", "backend.kind=fsdp"),
    ],
}


@pytest.mark.parametrize(
    "command",
    [
        COMMANDS["trlx-like"],
        # The same path through the trainer, and ten seconds of processor time for each start.
        pytest.param(COMMANDS["torchrun"], marks=pytest.mark.slow),
        pytest.param(COMMANDS["accelerate"], marks=pytest.mark.slow),
        pytest.param(COMMANDS["accelerate fsdp"], marks=pytest.mark.slow),
    ],
    ids=list(COMMANDS),
)
def test_two_processes_train_together(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    config = {
        "model": {"model_path": save_tiny(tmp_path / "model")},
        "method": {"name": "PPOConfig", "num_rollouts": 3, "chunk_size": 2, "gen_kwargs": GENERATION},
        "train": {"trainer": "PPOTrainer", "seq_length": 20, "batch_size": 2, "total_steps": 3, "epochs": 100},
        "data": {"prompts": PROMPTS, "reward_fn": "reward.py:reward"},
    }
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if "process" in line]
    assert said == ["PPOTrainer: 2 processes on cpu, at most 3 steps of 2 samples."], run.stderr
    assert [row["step"] for row in rows(tmp_path / "ckpts")] == [0, 1, 2, 3]
    state = tmp_path / "ckpts" / "checkpoint_3" / "state"
    assert len(list(state.glob("rank_*"))) == 2  # the random numbers of each
    (store,) = state.rglob("store.json")
    assert '"count": 3' in store.read_text()  # the whole round, on each of them


def started(folder: Path, *options: str, steps: int = 100_000) -> subprocess.Popen[str]:
    """A run of two processes that saves every second step."""
    (folder / "reward.py").write_text(REWARD)
    config = {
        "model": {"model_path": save_tiny(folder / "model")},
        "method": {"name": "PPOConfig", "num_rollouts": 3, "chunk_size": 2, "gen_kwargs": GENERATION},
        "train": {"trainer": "PPOTrainer", "seq_length": 20, "batch_size": 2, "total_steps": steps, "epochs": 100_000}
        | {"checkpoint_interval": 2, "keep_checkpoints": 2, "eval_interval": 100, "save_best": False},
        "data": {"prompts": PROMPTS, "reward_fn": "reward.py:reward"},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    command = [sys.executable, *COMMANDS["trlx-like"], *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def second_process(folder: Path, launcher: subprocess.Popen[str]) -> int:
    """The pid of the process of rank 1, once two checkpoints have been published."""
    until = time.monotonic() + 90
    while len(list(folder.glob("ckpts/checkpoint_*"))) < 2:  # the first is known to all then
        assert launcher.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    (child,) = [child for child in psutil.Process(launcher.pid).children() if child.environ().get("RANK") == "1"]
    return child.pid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "asked", "code", "sentence"),
    [
        (signal.SIGKILL, False, 137, r"Process 1 \(pid \d+ on \S+\) died .*The last checkpoint is ckpts/checkpoint_"),
        (signal.SIGSTOP, False, 1, r"Process 1 \(pid \d+ on \S+\) has not responded for 5 s \(backend.timeout\) "),
        (signal.SIGSTOP, True, 143, r"Process 1 \(pid \d+\) does not answer to the request to stop"),
    ],
)
def test_one_lost_process_ends_the_run(number: int, asked: bool, code: int, sentence: str, tmp_path: Path) -> None:
    """Within 30 seconds of its end (or of the time limit), with one sentence and no traceback."""
    limit = ["--set", "backend.timeout=5"] if number == signal.SIGSTOP and not asked else []
    launcher = started(tmp_path, *limit)
    os.kill(second_process(tmp_path, launcher), number)
    if asked:
        launcher.terminate()
    said = launcher.communicate(timeout=35)[1]
    assert launcher.returncode == code, said
    assert len(re.findall(sentence, said)) == 1 and "Traceback" not in said, said


@pytest.mark.slow
def test_a_run_that_lost_a_process_is_resumed(tmp_path: Path) -> None:
    launcher = started(tmp_path, "--max-restarts", "1", steps=60)
    os.kill(second_process(tmp_path, launcher), signal.SIGKILL)
    said = launcher.communicate(timeout=120)[1]
    assert launcher.returncode == 0, said
    assert "goes on from its newest checkpoint (1 of 1)" in said
    assert [row["step"] for row in rows(tmp_path / "ckpts")] == list(range(61))
