"""Whose a run folder is: the list of files that runs made there, and the lock of the run that uses it."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from trlx_like.checkpoint import claim
from trlx_like.checkpoint.claim import LIST, RunFiles
from trlx_like.errors import ConfigError

NAMES = ["metrics.jsonl", "config.yml"]


@contextmanager
def opened(folder: Path, names: list[str] = NAMES) -> Iterator[RunFiles]:
    files = RunFiles(folder)
    files.open()
    try:
        files.claim(names)
        yield files
    finally:
        files.close()


def used(folder: Path) -> RunFiles:
    """A folder in which a run has written its files, and ended."""
    with opened(folder) as files:
        for name in NAMES:
            (folder / name).write_text("of the run")
    return files


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestList:
    def test_what_a_run_made_may_be_made_again(self, tmp_path: Path) -> None:
        used(tmp_path / "a" / "run")
        with opened(tmp_path / "a" / "run") as files:
            assert files.owns("config.yml") and not files.owns("checkpoint_1")

    def test_what_no_run_made_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "config.yml").write_text("mine")
        message = refusal(lambda: RunFiles(tmp_path).check(NAMES))
        assert message == (
            f"train.checkpoint_dir ({str(tmp_path)!r}): a run would write config.yml, which no run has made (those are "
            f"in {LIST}). Move it away, or choose another folder."
        )
        assert [path.name for path in tmp_path.iterdir()] == ["config.yml"]
        with opened(tmp_path, []) as files:
            assert "config.yml" in refusal(lambda: files.claim(NAMES))
            assert not files.owns("metrics.jsonl")

    def test_a_file_that_is_gone_is_not_the_runs_any_more(self, tmp_path: Path) -> None:
        used(tmp_path)
        (tmp_path / "config.yml").unlink()
        with opened(tmp_path, []) as files:
            (tmp_path / "config.yml").write_text("mine")
            assert files.owns("metrics.jsonl") and not files.owns("config.yml")
        assert "config.yml" in refusal(lambda: RunFiles(tmp_path).check(NAMES))

    def test_only_files_of_the_list_are_set_aside(self, tmp_path: Path) -> None:
        used(tmp_path)
        (tmp_path / "reward_fn.py").write_text("mine")
        (tmp_path / "earlier_1").mkdir()  # this, too
        with opened(tmp_path, []) as files:
            assert files.set_aside() == tmp_path / "earlier_2"
            assert files.set_aside() is None
        assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier_1", "earlier_2", "reward_fn.py", LIST]
        assert (tmp_path / "earlier_2" / "config.yml").read_text() == "of the run"
        with opened(tmp_path / "earlier_2") as files:  # a run folder of its own
            assert files.owns("metrics.jsonl")

    def test_a_line_that_a_kill_cut_short_is_passed_over(self, tmp_path: Path) -> None:
        used(tmp_path)
        with (tmp_path / LIST).open("a") as file:
            file.write('{"made": ["chec')
        with opened(tmp_path, ["checkpoint_1"]):
            (tmp_path / "checkpoint_1").mkdir()
        with opened(tmp_path, []) as files:
            assert files.owns("checkpoint_1") and files.owns("config.yml")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("a,b\n1,2\n", "is not the list of a run's files"),
            ('{"format": "trlx_like.run_files", "version": 2}\n', "is of version 2; this release reads version 1"),
        ],
    )
    def test_another_file_of_that_name(self, tmp_path: Path, content: str, message: str) -> None:
        (tmp_path / LIST).write_text(content)
        for action in (RunFiles(tmp_path).open, lambda: RunFiles(tmp_path).check([])):
            assert message in refusal(action)
        assert (tmp_path / LIST).read_text() == content

    def test_what_is_no_file_is_not_read(self, tmp_path: Path) -> None:
        for make in (os.mkfifo, os.mkdir, partial(os.symlink, "/dev/zero")):
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            make(folder / LIST)
            assert "is not the list of a run's files" in refusal(partial(RunFiles(folder).check, []))

    def test_a_report_of_a_run_that_goes_on(self, tmp_path: Path) -> None:
        with opened(tmp_path, ["report.html"]), RunFiles(tmp_path).claimed(["report.html"]):
            (tmp_path / "report.html").write_text("page")
        (tmp_path / "other.html").write_text("mine")
        with pytest.raises(ConfigError, match=r"other\.html"), RunFiles(tmp_path).claimed(["other.html"]):
            raise AssertionError


class TestFolder:
    def test_what_cannot_be_a_run_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for place in ("file", "file/below"):
            for action in (RunFiles(tmp_path / place).open, lambda p=place: RunFiles(tmp_path / p).check([])):
                message = refusal(action)
                assert message.startswith(f"train.checkpoint_dir ({str(tmp_path / place)!r}): ") and "file" in message

    @pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
    def test_a_place_that_cannot_be_written_to(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o555)
        before = os.geteuid()
        read_only = tmp_path / "runs" / "a"
        for parent in tmp_path.parents[:2]:
            parent.chmod(0o755)
        os.seteuid(before or 65534)
        try:
            assert "ermission denied" in refusal(RunFiles(read_only).open)
        finally:
            os.seteuid(before)


class TestLock:
    def test_the_second_run_is_told_who_the_first_is(self, tmp_path: Path) -> None:
        with opened(tmp_path):
            for action in (RunFiles(tmp_path).open, lambda: RunFiles(tmp_path).check([])):
                message = refusal(action)
                assert f"process {os.getpid()} on {socket.gethostname()} (since 2" in message
        with opened(tmp_path):
            pass

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_the_lock_ends_with_its_process_and_not_with_a_forked_one(self, tmp_path: Path) -> None:
        """A process that is killed leaves no lock behind, even if a process that it forked goes on."""
        reading, writing = os.pipe()
        holder = os.fork()
        if holder == 0:
            RunFiles(tmp_path).open()
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            os.write(writing, str(worker).encode())
            time.sleep(60)
            os._exit(0)
        worker = int(os.read(reading, 20))
        assert f"process {holder} " in refusal(RunFiles(tmp_path).open)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        try:
            with opened(tmp_path):
                os.kill(worker, 0)  # it is still there
        finally:
            os.kill(worker, signal.SIGKILL)

    @pytest.mark.parametrize("kernel", [True, False])
    def test_a_run_on_another_host(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool) -> None:
        """The kernel's lock may be of one host only, or missing; then a run is in use while it gives signs of life."""
        monkeypatch.setattr(claim, "WATCH", 0.4)
        if not kernel:
            monkeypatch.setattr(claim, "_lock", lambda handle, shared=False: False)
        used(tmp_path)
        self.held_by(tmp_path, "elsewhere", 1)
        with monkeypatch.context() as patched:
            patched.setattr(claim, "BEAT", 0.05)
            with beating(tmp_path):
                assert "process 1 on elsewhere" in refusal(RunFiles(tmp_path).open)
        start = time.monotonic()
        with opened(tmp_path):
            assert time.monotonic() - start >= 0.4
        self.held_by(tmp_path, "elsewhere", 1)
        os.utime(tmp_path / LIST, (0, 0))  # long ago
        start = time.monotonic()
        with opened(tmp_path):
            assert time.monotonic() - start < 0.4

    def test_a_dead_process_where_the_kernel_has_no_locks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(claim, "_lock", lambda handle, shared=False: False)
        used(tmp_path)
        self.held_by(tmp_path, socket.gethostname(), 2**22 + 1)  # above every process id of Linux
        start = time.monotonic()
        with opened(tmp_path):
            assert time.monotonic() - start < 1

    @staticmethod
    def held_by(folder: Path, host: str, pid: int) -> None:
        with (folder / LIST).open("a") as file:
            file.write(json.dumps({"run": {"pid": pid, "host": host, "since": "today"}}) + "\n")


@contextmanager
def beating(folder: Path) -> Iterator[None]:
    """What the thread of a run on another host does."""
    ended = threading.Event()
    thread = threading.Thread(target=claim._beat, args=(folder / LIST, ended))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
