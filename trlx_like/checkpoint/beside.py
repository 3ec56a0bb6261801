"""Writes a checkpoint beside training: tensors are copied when it is made, and a thread writes them.

Threads of different processes do not communicate, as a collective operation of theirs could meet one of training. They
look at files: a process that has written its part leaves its hashes, and one that has failed removes its mark.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trlx_like.checkpoint.manifest import MARK, SEALED, seal_own

LOOK = 0.05
"""Seconds between two looks for the parts of other processes."""


class Beside:
    """Write one checkpoint at a time in a thread.

    Args:
        rank: The number of this process.
        ranks: The number of processes.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.files: dict[Path, bytes] = {}  # what is copied and not written yet
        self.running: Future[None] | None = None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copy the tensors that safetensors would write in a `with` block, also those of transformers and peft.

        Other files are written at once.
        """
        import safetensors.torch

        library: Any = safetensors.torch
        write, thread = library.serialize_file, threading.get_ident()

        def copy(tensors: Any, filename: str | os.PathLike[str], metadata: Any = None) -> None:
            # The adapter of a diffusion model is small, and its several entries of metadata are sorted in the file.
            if threading.get_ident() == thread and len(metadata or ()) < 2:
                self.files[Path(filename)] = library.serialize(tensors, metadata=metadata)
            else:
                write(tensors, filename, metadata=metadata)

        library.serialize_file = copy
        try:
            yield
        except BaseException:
            self.files.clear()
            raise
        finally:
            library.serialize_file = write

    def mark(self, folder: Path) -> None:
        """Mark in the folder of a checkpoint that this process will write its part."""
        (folder / f"{MARK}{self.rank}").touch()

    def start(self, action: Callable[[], None]) -> None:
        """Call a function in a thread."""
        pool = ThreadPoolExecutor(1, "checkpoint")
        self.running = pool.submit(action)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for the function that was started last, and raise its error."""
        running, self.running = self.running, None
        if running is not None:
            running.result()

    def write(self, folder: Path) -> None:
        """Write and hash this process's part of a checkpoint.

        Args:
            folder: The folder of the checkpoint, in which this process has its mark.

        Raises:
            OSError: If the disk refuses.
        """
        try:
            while self.files:
                path, content = self.files.popitem()
                path.write_bytes(content)
            seal_own(folder, self.rank)
        except BaseException:
            self.files.clear()
            (folder / f"{MARK}{self.rank}").unlink()
            raise

    def all_written(self, folder: Path) -> bool:
        """Wait until every process has written its part of a checkpoint or has failed; return whether none failed."""
        failed = False
        for rank in range(self.ranks):
            while not (folder / f"{SEALED}{rank}.json").exists():
                if not (folder / f"{MARK}{rank}").exists():
                    failed = True
                    break
                time.sleep(LOOK)
        return not failed
