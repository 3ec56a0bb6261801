"""Reward functions in processes of their own: killed, replaced, ended, and what can be sent to them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import trlx_like
from tests.unit.rewards import faulty
from tests.unit.rewards.support import GIVEN, RIGHT, Runners, score, scores_of
from trlx_like.errors import RewardError
from trlx_like.rewards.make import make_reward
from trlx_like.rewards.runner import OUTPUT_FILE


def test_what_a_worker_prints_is_kept_apart(runner: Runners, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert scores_of(runner(faulty.prints, workers=1)).rewards == RIGHT
    written = (tmp_path / OUTPUT_FILE).read_bytes()
    assert written.count(b"printed") == 5000 and b"\x00\x00\x00\x05written\n" in written
    assert capfd.readouterr() == ("", "")


def test_prints_in_this_process_are_the_users(runner: Runners, capfd: pytest.CaptureFixture[str]) -> None:
    assert scores_of(runner(faulty.prints)).rewards == RIGHT
    assert capfd.readouterr().out.count("printed") == 5000


def test_a_key_of_a_prompt_that_a_worker_cannot_read(runner: Runners) -> None:
    own = runner(faulty.length, workers=1)
    with pytest.raises(RewardError, match="^A worker cannot read a key of the prompts: ZeroDivisionError: not here"):
        score(own, GIVEN, [{"x": faulty.Unreadable()}] * 3)
    assert scores_of(own).rewards == RIGHT


def test_an_argument_that_nobody_gives_ends_the_run(runner: Runners) -> None:
    """Whatever on_error says: it would be so for every sample."""
    for workers in (0, 1):
        with pytest.raises(RewardError, match="tokens wants tokenizer|mutates wants goals, which is neither samples"):
            scores_of(runner(faulty.mutates, workers=workers, on_error="abstain"))


def test_functions_of_files_and_of_the_script(tmp_path: Path) -> None:
    """A script, run as one, whose functions are in itself and in a file that only a path names."""
    (tmp_path / "own.py").write_text("def twice(outputs):\n    return [2.0 * len(output) for output in outputs]\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = _python(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[3.0, 9.0] {'thrice': [1.0, 3.0], 'twice': [2.0, 6.0]}\n"
    script.write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    done = _python(script)
    assert (
        "a worker imports the script for its functions" in done.stderr and 'if __name__ == "__main__":' in done.stderr
    )


SCRIPT = """
import trlx_like
from trlx_like.config import RewardFnConfig
from trlx_like.rewards.make import make_reward
from trlx_like.rewards.runner import RewardRunner
from trlx_like.rewards.worker import refuse_in_worker

def thrice(outputs):
    return [float(len(output)) for output in outputs]

if __name__ == "__main__":
    refuse_in_worker()  # as train() does
    runner = RewardRunner(make_reward([thrice, "own.py:twice"]), RewardFnConfig(workers=1))
    scores = runner.result(runner.submit({"outputs": ["a", "bad"]}, [{}, {}]))
    runner.close()
    print(scores.rewards, scores.components)
"""


def _python(script: Path) -> Any:
    path = {**os.environ, "PYTHONPATH": str(Path(trlx_like.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env=path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise OSError('no model here')", "OSError: no model here"),
        ("import os; os._exit(5)", "exit code 5"),
        ("import time; time.sleep(60)", r"not within reward\.worker_start_limit \(0\.4 s\)"),
    ],
    ids=["raises", "exits", "hangs"],
)
def test_a_worker_that_cannot_start(body: str, why: str, runner: Runners, tmp_path: Path) -> None:
    """Always an error: it would be so for every batch. The module was good when this process imported it."""
    file = tmp_path / "own.py"
    file.write_text("def score(outputs):\n    return [0.0 for _ in outputs]\n")
    limit = 0.4 if "sleep" in body else 60
    own = runner(make_reward(f"{file}:score"), workers=1, on_error="abstain", worker_start_limit=limit)
    file.write_text(body)
    with pytest.raises(RewardError, match=rf"^A process of reward\.workers did not start: {why}\n.*{OUTPUT_FILE}"):
        scores_of(own)


def test_a_worker_does_not_outlive_a_killed_run(tmp_path: Path) -> None:
    """Not even one that hangs."""
    script = tmp_path / "script.py"
    script.write_text(HANGING)
    path = {**os.environ, "PYTHONPATH": str(Path(trlx_like.__file__).parents[1])}
    with subprocess.Popen([sys.executable, script], cwd=tmp_path, env=path, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        os.kill(worker, 0)
        run.kill()
    until = time.monotonic() + 30
    while time.monotonic() < until and runs(worker):
        time.sleep(0.05)
    assert not runs(worker)


def runs(process: int) -> bool:
    """A process that has ended stays in the table until somebody asks how; nobody may."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


HANGING = """
import os, sys, time
from trlx_like.config import RewardFnConfig
from trlx_like.rewards.runner import RewardRunner

def hangs(outputs):
    open("pid", "w").write(str(os.getpid()))
    os.rename("pid", "began")
    while True:
        time.sleep(1)

if __name__ == "__main__":
    RewardRunner(hangs, RewardFnConfig(workers=1)).submit({"outputs": ["a"]}, [{}])
    while not os.path.exists("began"):
        time.sleep(0.01)
    print(open("began").read(), flush=True)
    time.sleep(60)
"""
