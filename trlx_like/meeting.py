"""A folder where the processes of a run on one machine leave notes, however they were started.

`trlx-like train --num-processes` makes the folder. Under torchrun and `accelerate launch` it is found by what all
processes of a run have in common: their parent and when it started, their port, and the number of restarts.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "TRLX_LIKE_MEETING"
"""Environment variable with the folder."""


def meeting_place() -> Path | None:
    """Return the folder, which exists; None in a process that is the only one of its run."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    parent = os.getppid()
    # A container that is started again gives the numbers of its processes again, and may have kept the folder.
    parts = [parent, *_stat(parent)[19:20], os.environ.get("MASTER_PORT")]
    parts.append(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    place = Path(tempfile.gettempdir()) / f"trlx_like-{'-'.join(map(str, parts))}"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def first_to_say(message: str) -> bool:
    """Tell whether no other process of the run has said this yet, so that an error is printed once.

    Args:
        message: The message. The start "On process 1: " does not make it another one.
    """
    place = meeting_place()
    if place is None:
        return True
    digest = hashlib.sha256(re.sub(r"^On process \d+: ", "", message).encode("utf-8", "replace")).hexdigest()[:16]
    try:
        (place / f"said-{digest}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the folder is gone: better twice than never
        pass
    return True


def is_alive(pid: Any) -> bool:
    """Tell whether this machine runs, or may run, a process. One that ended and waits for its parent does not run."""
    if os.name == "nt":  # where the call below would end it
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, TypeError):
        return False
    except OSError:  # of another user
        return True
    return _stat(pid)[:1] != ["Z"]


def _stat(pid: int) -> list[str]:
    """Return the fields of Linux about a process from its state on; the 20th is when it started. Empty elsewhere."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
