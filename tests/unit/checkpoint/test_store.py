"""Checkpoints are published whole or not at all, by one process or several, and damage to them is found."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trlx_like.checkpoint import CheckpointStore, manifest
from trlx_like.checkpoint.manifest import share_files
from trlx_like.errors import CheckpointError


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A disk on which no file can grow above `size` bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def put(store: CheckpointStore, name: str, text: str = "weights") -> Path:
    with store.publish(name) as folder:
        (folder / "hf_model").mkdir()
        (folder / "hf_model" / "model.txt").write_text(text)
    return store.directory / name


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


class TestStore:
    def test_publishes_a_folder_that_verifies(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path / "new" / "run")
        path = put(store, "checkpoint_3", "abc")
        store.verify(path)
        assert store.newest() == path
        files = json.loads((path / "manifest.json").read_text())["files"]
        # sha256("abc"), FIPS 180-2 appendix B.1
        digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        assert files == {"hf_model/model.txt": {"size": 3, "sha256": digest}}
        assert names(store.directory) == ["checkpoint_3"]

    def test_everything_is_on_disk_before_it_has_its_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        events: list[str] = []
        fsync, replace = os.fsync, os.replace

        def record_fsync(handle: int) -> None:
            events.append(os.readlink(f"/proc/self/fd/{handle}") if os.path.isdir("/proc/self/fd") else "?")
            fsync(handle)

        def record_replace(source: Path, target: Path) -> None:
            events.append("renamed")
            replace(source, target)

        monkeypatch.setattr(os, "fsync", record_fsync)
        monkeypatch.setattr(os, "replace", record_replace)
        put(CheckpointStore(tmp_path), "checkpoint_1")
        if "?" in events:
            pytest.skip("this system does not tell the names of open files")
        writing = tmp_path / ".trlx_like-writing-checkpoint_1"
        renamed = events.index("renamed")
        flushed = [writing / "hf_model/model.txt", writing / "manifest.json", writing / "hf_model", writing]
        assert events[:renamed] == [str(path) for path in flushed]
        assert str(tmp_path) in events[renamed:]

    def test_a_name_that_is_taken_is_replaced(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        put(store, "best_checkpoint", "old")
        path = put(store, "best_checkpoint", "new")
        assert (path / "hf_model" / "model.txt").read_text() == "new"
        assert names(tmp_path) == ["best_checkpoint"]

    def test_keeps_the_newest_by_step(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=2)
        (tmp_path / "checkpoint_1").mkdir()  # of another program: no manifest
        (tmp_path / "checkpoint_notes").mkdir()
        put(store, "best_checkpoint")
        for step in (8, 9, 10, 11):
            put(store, f"checkpoint_{step}")
        others = ["best_checkpoint", "checkpoint_1"]
        assert names(tmp_path) == [*others, "checkpoint_10", "checkpoint_11", "checkpoint_notes"]
        put(store, "checkpoint_5")  # of a run that went back: the one just written always stays
        assert names(tmp_path) == [*others, "checkpoint_11", "checkpoint_5", "checkpoint_notes"]
        with pytest.raises(CheckpointError, match=r"keep \(0\) must be at least 1"):
            CheckpointStore(tmp_path, keep=0)

    def test_a_failing_body_leaves_what_was_there(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        put(store, "checkpoint_1", "old")
        for error in (ValueError("no"), KeyboardInterrupt()):
            with pytest.raises(type(error)) as caught, store.publish("checkpoint_1") as folder:
                (folder / "half").write_text("x")
                raise error
            assert caught.value is error
            assert names(tmp_path) == ["checkpoint_1"]
        assert store.newest() == tmp_path / "checkpoint_1"

    def test_a_full_disk_is_explained(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        path = put(store, "checkpoint_1")
        message = r"checkpoint_2 cannot be written: .*File too large.* Earlier checkpoints are as they were"
        for write in (lambda folder: (folder / "w").write_bytes(bytes(9000)), save_with_safetensors):
            with file_size_limit(4096), pytest.raises(CheckpointError, match=message):
                written_by(store, write)
            assert names(tmp_path) == ["checkpoint_1"]
        with pytest.raises(ConnectionError), store.publish("checkpoint_2"):
            raise ConnectionError  # not the disk's: left alone
        store.verify(path)

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match=r"file/run/checkpoint_1 cannot be written: .*Not a directory"):
            put(CheckpointStore(tmp_path / "file" / "run"), "checkpoint_1")
        for name in ("../up", ".hidden", "a/b", ""):
            with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
                put(CheckpointStore(tmp_path), name)

    def test_links_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="secret is a link"):
            written_by(CheckpointStore(tmp_path), lambda folder: (folder / "secret").symlink_to("/etc/passwd"))
        assert names(tmp_path) == []

    def test_leftovers_of_killed_runs_are_removed(self, tmp_path: Path) -> None:
        for name in (".trlx_like-writing-checkpoint_7", ".trlx_like-removed-checkpoint_1", ".mine", "tmp"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "part").write_text("x")
        put(CheckpointStore(tmp_path), "checkpoint_8")
        assert names(tmp_path) == [".mine", "checkpoint_8", "tmp"]

    def test_what_was_set_aside_for_one_that_never_came_is_found(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        for path in [put(store, "checkpoint_7"), put(store, "best_checkpoint")]:
            path.rename(path.with_name(f".trlx_like-old-{path.name}"))
        assert store.newest() == tmp_path / ".trlx_like-old-checkpoint_7"
        assert store.resolve(str(tmp_path / "best_checkpoint")) == tmp_path / ".trlx_like-old-best_checkpoint"
        put(store, "checkpoint_8")
        assert names(tmp_path) == ["best_checkpoint", "checkpoint_7", "checkpoint_8"]

    def test_files_of_file_managers_do_no_harm(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        path = put(store, "checkpoint_1")
        (path / "hf_model" / ".DS_Store").touch()
        store.verify(path)

    def test_resolve(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path / "run")
        assert store.resolve("auto") is None
        old, new = put(store, "checkpoint_9"), put(store, "checkpoint_10")
        assert store.resolve("auto") == new
        assert store.resolve(str(old)) == old
        assert CheckpointStore(tmp_path / "other").resolve(str(tmp_path / "run")) == new
        for path in (old, new):
            (path / "manifest.json").unlink()
        cases = {
            "run": r"no checkpoint_<step> in .*run can be used\. .*checkpoint_10 has no .*checkpoint_9 has no .*Choose",
            "run/checkpoint_9": r"checkpoint_9 has no manifest\.json",
            "nowhere": "there is no such folder",
            ".": r"has no manifest\.json: it is not a checkpoint",
        }
        for spec, message in cases.items():
            with pytest.raises(CheckpointError, match=rf"train\.resume_from_checkpoint \(.*\): .*{message}"):
                store.resolve(str(tmp_path / spec))
        put(store, "best_checkpoint")
        with pytest.raises(
            CheckpointError, match=r"\('auto'\): no checkpoint_<step> .*best_checkpoint is whole: resume"
        ):
            store.resolve("auto")

    def test_checkpoints_of_a_newer_release_are_not_called_damaged(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        manifest = put(store, "checkpoint_1") / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
        with pytest.raises(CheckpointError) as caught:
            store.resolve("auto")
        assert "version 2; this release reads 'trlx_like.checkpoint', version 1" in str(caught.value)
        assert "damaged" not in str(caught.value) and "\n" not in str(caught.value)

    def test_a_folder_that_is_no_checkpoint_of_the_run_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoint_1").mkdir()
        (tmp_path / "checkpoint_1" / "mine").touch()
        with pytest.raises(CheckpointError, match="checkpoint_1 is there already and is no checkpoint of this run"):
            put(CheckpointStore(tmp_path), "checkpoint_1")
        assert names(tmp_path / "checkpoint_1") == ["mine"]
        own = CheckpointStore(tmp_path, keep=1, owns=lambda name: name == "checkpoint_3")
        for step in (2, 3):
            put(CheckpointStore(tmp_path), f"checkpoint_{step}")
        put(own, "checkpoint_4")
        assert names(tmp_path) == ["checkpoint_1", "checkpoint_2", "checkpoint_4"]


def written_by(store: CheckpointStore, write: Callable[[Path], object]) -> None:
    with store.publish("checkpoint_2") as folder:
        write(folder)


def save_with_safetensors(folder: Path) -> None:
    save_file({"w": torch.zeros(9000)}, folder / "w.safetensors")


def as_processes(work: Callable[[int, CheckpointStore], object], *folders: Path) -> list[Exception | None]:
    """Runs `work(rank, store)` in one thread a folder, with a real barrier; returns what each raised."""
    barrier = threading.Barrier(len(folders))
    raised: list[Exception | None] = [None] * len(folders)

    def process(rank: int, folder: Path) -> None:
        def meet() -> None:
            barrier.wait(timeout=20)

        store = CheckpointStore(folder, main=rank == 0, barrier=meet)
        try:
            work(rank, store)
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=process, args=item) for item in enumerate(folders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


class TestSeveralProcesses:
    def test_all_write_into_one_checkpoint(self, tmp_path: Path) -> None:
        def work(rank: int, store: CheckpointStore) -> None:
            for step in range(5):
                with store.publish(f"checkpoint_{step}") as folder:
                    (folder / f"rank_{rank}").write_text(str(step))
                assert store.newest() == tmp_path / f"checkpoint_{step}"

        assert as_processes(work, *[tmp_path] * 3) == [None] * 3
        assert names(tmp_path / "checkpoint_4") == ["manifest.json", "rank_0", "rank_1", "rank_2"]

    @pytest.mark.parametrize("bad", [0, 1])
    def test_one_that_fails_stops_the_checkpoint_and_nobody_hangs(self, tmp_path: Path, bad: int) -> None:
        put(CheckpointStore(tmp_path), "checkpoint_1")

        def work(rank: int, store: CheckpointStore) -> None:
            with store.publish("checkpoint_2") as folder:
                (folder / f"rank_{rank}").touch()
                if rank == bad:
                    raise ValueError("mine")

        raised = as_processes(work, *[tmp_path] * 3)
        assert str(raised[bad]) == "mine"
        if bad:
            assert "another process failed" in str(raised[0])
        assert raised[2] is None
        assert names(tmp_path) == ["checkpoint_1"]

    def test_a_main_process_that_cannot_begin_lets_the_others_go(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        raised = as_processes(lambda rank, store: put(store, "checkpoint_1"), *[tmp_path / "file"] * 2)
        assert "cannot be written" in str(raised[0])
        assert "has nothing from the main process" in str(raised[1])

    def test_a_disk_that_is_not_shared_is_found(self, tmp_path: Path) -> None:
        folders = [tmp_path / "machine_0", tmp_path / "machine_1"]
        for folder in folders:
            folder.mkdir()
        raised = as_processes(lambda rank, store: put(store, "checkpoint_1"), *folders)
        assert "train.checkpoint_dir is not on a disk that all machines share" in str(raised[1])
        assert names(folders[1]) == []


@pytest.mark.parametrize("links", [True, False])
def test_a_checkpoint_may_share_large_files_with_another(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are hashed once. What is small, or on a disk without links, is a copy."""
    monkeypatch.setattr(manifest, "LEAST_SHARED", 5)
    hashed: list[str] = []
    hash_file = manifest._hashed

    def noted(path: Path) -> dict[str, Any]:
        hashed.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(manifest, "_hashed", noted)
    store = CheckpointStore(tmp_path)
    with store.publish("best_checkpoint") as folder:
        (folder / "hf_model").mkdir()
        for name in ("weights", "tiny", "else"):
            (folder / "hf_model" / name).write_text("abcde" if name == "weights" else "abcd")
    hashed.clear()
    if not links:
        monkeypatch.setattr(os, "link", lambda source, target: os.stat(tmp_path / "no links"))
    with store.publish("checkpoint_1") as folder:
        share_files(tmp_path / "best_checkpoint", folder, lambda name: not name.endswith("else"))
        (folder / "own").write_text("own")
    store.verify(tmp_path / "checkpoint_1")
    assert names(tmp_path / "checkpoint_1") == ["hf_model", "manifest.json", "own"]
    assert names(tmp_path / "checkpoint_1" / "hf_model") == ["tiny", "weights"]
    assert sorted(hashed) == (["own", "tiny"] if links else ["own", "tiny", "weights"])
    first, second = (tmp_path / name / "hf_model" for name in ("best_checkpoint", "checkpoint_1"))
    assert [os.path.samefile(first / name, second / name) for name in ("weights", "tiny")] == [links, False]
    put(store, "best_checkpoint")  # another takes its place
    store.verify(tmp_path / "checkpoint_1")


def test_only_a_checkpoint_can_be_shared_with(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=r"folder has no manifest.json"):
        share_files(tmp_path / "folder", tmp_path / "other", lambda name: True)
