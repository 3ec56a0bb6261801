"""Running code of a model in a process of its own: limits of time and memory, no network, an empty folder.

This keeps mistakes of the model from harming a run. It is no sandbox against malice: the code runs as the user, and may
read and delete the user's files. Run such training in a container or a virtual machine.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

_RUNNER = """\
import sys

seconds, memory, word = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
del sys.argv[1:]
code, test = sys.stdin.read().split("\\0")
try:
    import resource
    for name, value in (("CPU", seconds), ("AS", memory), ("FSIZE", 2**24), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
except (ImportError, OSError, ValueError):
    pass
import socket

def refuse(*given, **named):
    raise OSError("there is no network here")

socket.socket = socket.create_connection = socket.getaddrinfo = refuse
names = {"__name__": "__main__"}
def run(names=names, code=code, test=test, word=word, out=sys.stdout):
    exec(compile(code, "answer.py", "exec"), names)
    exec(compile(test, "test.py", "exec"), names)
    out.write(word)
    out.flush()
del code, test, word
run()
"""


def passes(code: str, test: str, seconds: float, memory: int) -> bool:
    """Run code and then a test, and return whether both ended without an exception within the limits.

    Args:
        code: Python code.
        test: Python code that uses it, such as assertions.
        seconds: Time limit.
        memory: Limit of the address space, in MiB.
    """
    word = secrets.token_hex(16)  # so that code that exits early, with whatever status, has not passed
    limits = [str(max(1, round(seconds))), str(memory * 2**20), word]
    text = f"{code}\0{test}" if "\0" not in code + test else "raise ValueError\0"
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(text.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # what the code has started, too
            process.communicate()
    return said.endswith(word.encode())
