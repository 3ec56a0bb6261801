"""`launch` starts processes, passes signals on, and reports how they ended. The processes here import no torch."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.distributed.ranks import on_ranks
from trlx_like.distributed import launch, launcher

REPORT = """
    import os, pathlib, signal, sys, time
    folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]

    def write(name, text=""):
        (folder / f"{name}_{rank}").write_text(text)

    def wait_for(path, seconds=20):
        until = time.monotonic() + seconds
        while not path.exists():
            time.sleep(0.02)
            if time.monotonic() > until:
                sys.exit(f"{path} never came")
"""


def script(folder: Path, body: str) -> list[str]:
    """A command for `launch`: a program whose output is files in `folder`, named by rank."""
    file = folder / "program.py"
    file.write_text(textwrap.dedent(REPORT) + textwrap.dedent(body))
    return [str(file), str(folder)]


def launched(rank: int, command: list[str], processes: int, patience: float) -> int:
    launcher.PATIENCE = patience
    return launch(command, processes)


def run(command: list[str], processes: int = 2, patience: float = 20.0) -> int:
    """`launch` in a process of its own, as it takes over the signals of the one it runs in."""
    code: int = on_ranks(launched, command, processes, patience, processes=1, timeout=30)[0]
    return code


def test_every_process_knows_its_place(tmp_path: Path) -> None:
    names = ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    body = f"write('place', ' '.join(os.environ[name] for name in {names}))"
    assert run(script(tmp_path, body), processes=3) == 0
    places = [(tmp_path / f"place_{rank}").read_text().split() for rank in range(3)]
    assert [place[:4] for place in places] == [["3", str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert len({place[4] for place in places}) == 1


@pytest.mark.parametrize("codes", [(0, 3), (3, 0)])
def test_the_failure_of_one_is_the_failure_of_all(codes: tuple[int, int], tmp_path: Path) -> None:
    assert run(script(tmp_path, f"sys.exit({codes}[int(rank)])")) == 3


def test_one_that_waits_for_a_failed_one_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    assert run(script(tmp_path, "sys.exit(3) if rank == '1' else time.sleep(60)"), patience=0.3) == 3
    assert time.monotonic() - began < 15


def test_one_that_was_killed_counts_as_failed(tmp_path: Path) -> None:
    assert run(script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank == '1' else None")) == -signal.SIGKILL


def test_a_failed_process_leaves_the_others_time_to_finish(tmp_path: Path) -> None:
    assert run(script(tmp_path, "sys.exit(2) if rank == '1' else (time.sleep(1), write('done'))")) == 2
    assert (tmp_path / "done_0").exists()


COUNTS = """
    runs = len(list(folder.glob(f"run_*_{rank}")))
    write(f"run_{runs}", " ".join(sys.argv[2:]))
    sys.exit(%s if rank == "1" and runs < 2 else 0)
"""


@pytest.mark.parametrize(
    ("code", "restarts", "runs", "end"),
    [(7, 2, 3, 0), (7, 1, 2, 7), (7, 0, 1, 7), (2, 3, 1, 2), (3, 3, 1, 3), (143, 3, 1, 143)],
)
def test_a_failed_run_is_resumed(code: int, restarts: int, runs: int, end: int, tmp_path: Path) -> None:
    """What the user has to mend and what a signal stopped is not started again."""
    command = script(tmp_path, COUNTS % code)
    assert launch(command, 2, restarts, [*command, "--resume"]) == end
    arguments = [(tmp_path / f"run_{run}_0").read_text() for run in range(runs)]
    assert arguments == ["", *["--resume"] * (runs - 1)] and not (tmp_path / f"run_{runs}_0").exists()


STOPS = """
    import json
    note = {"rank": int(rank), "pid": os.getpid(), "state": "running"}
    place = pathlib.Path(os.environ["TRLX_LIKE_MEETING"]) / f"rank_{rank}.json"
    signal.signal(signal.SIGTERM, lambda *_: None)
    place.write_text(json.dumps(note))
    write("ready")
    while True:
        time.sleep(0.1)
        if rank == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        os.utime(place)
"""


def launched_with_little_silence(command: list[str]) -> None:
    launcher.SILENCE = 1.0
    sys.exit(launch(command, 2))


def test_one_that_does_not_answer_to_a_signal_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A stopped process cannot save, and the others wait for it: without the launcher they would for ever."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=launched_with_little_silence, args=(script(tmp_path, STOPS),), daemon=False)
    process.start()
    assert process.pid is not None
    wait_for([tmp_path / f"ready_{rank}" for rank in range(2)])
    os.kill(process.pid, signal.SIGTERM)
    process.join(timeout=20)
    assert process.exitcode == 143
    assert re.search(r"Process 1 \(pid \d+\) does not answer to the request to stop", capfd.readouterr().err)


def test_one_that_is_killed_while_it_starts_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "os.kill(os.getpid(), signal.SIGKILL) if rank == '1' else None"
    assert launch(script(tmp_path, body), 2) == -signal.SIGKILL
    assert re.search(r"Process 1 \(pid \d+\) was killed by SIGKILL: out of memory\?", capfd.readouterr().err)


SAVES = """
    def stop(number, frame):
        write("signals", open(folder / f"signals_{rank}").read() + f"{number} ")
        wait_for(folder / "saved_1") if rank == "0" else None
        time.sleep(0.5)  # another signal on the way would still be counted
        write("saved")
        sys.exit(128 + number)

    write("signals")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    write("ready")
    wait_for(folder / "never")
"""


@pytest.mark.parametrize("to_all", [False, True], ids=["launcher", "terminal"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_once(number: int, to_all: bool, tmp_path: Path) -> None:
    """To the launcher alone, as `kill` sends them, or to its whole process group, as a terminal does."""
    command = script(tmp_path, SAVES)
    launcher = multiprocessing.get_context("fork").Process(target=launch_in_a_session, args=(command,), daemon=False)
    launcher.start()
    assert launcher.pid is not None
    wait_for([tmp_path / f"ready_{rank}" for rank in range(2)])
    (os.killpg if to_all else os.kill)(launcher.pid, number)
    launcher.join(timeout=20)
    assert launcher.exitcode == 128 + number
    for rank in range(2):
        assert (tmp_path / f"signals_{rank}").read_text().split() == [str(int(number))]
        assert (tmp_path / f"saved_{rank}").exists()


def launch_in_a_session(command: list[str]) -> None:
    os.setsid()
    sys.exit(launch(command, 2))


def wait_for(files: list[Path], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < until, f"none of {files}"
        time.sleep(0.02)
