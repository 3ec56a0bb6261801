"""Watches the system calls of a child by ptrace: kills it before one of them, or lets one fail with an error number.

A child calls `offer` once, and `mark` where the part to watch begins and ends. Its parent calls `watch`. Linux on
x86-64 only; `available` says whether this machine allows it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TRACEME, _CONT, _GETREGS, _SETREGS, _SYSCALL, _SETOPTIONS = 0, 7, 12, 13, 24, 0x4200
_SYSGOOD, _EXITKILL = 1, 0x100000
_RAX, _RDX, _RSI, _RDI, _ORIG_RAX, _REGISTERS = 10, 12, 13, 14, 15, 27

WRITE = {1: "write", 18: "pwrite64", 20: "writev", 77: "ftruncate", 285: "fallocate"}
"""System calls that put bytes into an open file, by number."""
CHANGE = WRITE | {
    74: "fsync",
    2: "open",
    257: "openat",
    82: "rename",
    264: "renameat",
    316: "renameat2",
    83: "mkdir",
    258: "mkdirat",
    87: "unlink",
    263: "unlinkat",
    84: "rmdir",
}
"""These, and those that make, rename or delete files and folders."""
NEED_SPACE = {number for number, name in CHANGE.items() if name not in ("unlink", "unlinkat", "rmdir", "ftruncate")}
_CREATES = os.O_CREAT | os.O_TRUNC


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    return libc


def _ptrace(request: int, pid: int = 0, data: object = None) -> None:
    if _libc().ptrace(request, pid, None, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request}: {os.strerror(number)}")


@cache
def available() -> bool:
    """Whether a child of this process can be watched."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    pid = os.fork()
    if pid == 0:
        try:
            offer()
            with mark():
                os.getppid()
        except OSError:
            os._exit(1)
        os._exit(0)
    seen: list[str] = []
    try:
        return watch(pid, lambda call: seen.append(call.name)) == 0 and bool(seen)
    except OSError:
        os.waitpid(pid, 0)
        return False


def offer() -> None:
    """In the child: let the parent watch this process."""
    _ptrace(_TRACEME)


@contextmanager
def mark() -> Iterator[None]:
    """In the child: have the system calls of a `with` block watched."""
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Call:
    """A system call that a child is about to make."""

    pid: int
    number: int
    registers: ctypes.Array[ctypes.c_ulong]

    @property
    def name(self) -> str:
        return CHANGE.get(self.number, str(self.number))

    @property
    def path(self) -> Path | None:
        """The file or folder that it changes; None if it changes none."""
        first, second = (int(self.registers[place]) for place in (_RDI, _RSI))
        if self.number in WRITE or self.number == 74:
            path = Path(os.readlink(f"/proc/{self.pid}/fd/{first}"))
            return path if path.is_absolute() else None
        if self.number not in CHANGE:
            return None
        at = self.name.endswith(("at", "at2"))
        flags = int(self.registers[_RDX]) if at else second
        if self.number in (2, 257) and not flags & _CREATES:
            return None
        text = self._text(second if at else first)
        return Path(os.readlink(f"/proc/{self.pid}/cwd")) / text

    def _text(self, address: int) -> str:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(4096).split(b"\0")[0].decode()


Decision = Callable[[Call], int | None]


def watch(pid: int, decide: Decision) -> int:
    """Follow a child to its end, and return its wait status.

    decide: called before each marked system call. It returns None to let it happen, the number of an error to let it
    fail with that, or 0 after it has killed the child.
    """
    inside = entering = False
    fails: int | None = None
    ready = False
    while True:
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            return status
        stopped = os.WSTOPSIG(status)
        passed = 0
        if not ready:
            _ptrace(_SETOPTIONS, pid, _SYSGOOD | _EXITKILL)
            ready = True
        if stopped == signal.SIGSTOP:
            inside, entering = not inside, False
        elif stopped == signal.SIGTRAP | 0x80:
            entering = not entering
            if entering:
                fails = _decided(pid, decide)
            elif fails:
                registers = _registers(pid)
                registers[_RAX] = ctypes.c_ulong(-fails).value
                _ptrace(_SETREGS, pid, ctypes.byref(registers))
                fails = None
        elif stopped != signal.SIGTRAP:
            passed = stopped
        try:
            _ptrace(_SYSCALL if inside else _CONT, pid, passed)
        except ProcessLookupError:
            continue  # killed meanwhile


def _registers(pid: int) -> ctypes.Array[ctypes.c_ulong]:
    registers = (ctypes.c_ulong * _REGISTERS)()
    _ptrace(_GETREGS, pid, ctypes.byref(registers))
    return registers


def _decided(pid: int, decide: Decision) -> int | None:
    """What is decided on the call that a child is about to make. One that is to fail is replaced by none."""
    registers = _registers(pid)
    error = decide(Call(pid, int(registers[_ORIG_RAX]), registers))
    if error:
        registers[_ORIG_RAX] = ctypes.c_ulong(-1).value
        _ptrace(_SETREGS, pid, ctypes.byref(registers))
    return error


def kill_before(count: int) -> Decision:
    """A decision that kills the child before the `count`-th marked system call that changes a file, from 1."""
    seen: list[str] = []
    add = collect(seen)

    def decide(call: Call) -> int | None:
        add(call)
        if len(seen) < count:
            return None
        os.kill(call.pid, signal.SIGKILL)
        return 0

    return decide


def collect(calls: list[str]) -> Decision:
    """A decision that lets all happen, and collects the system calls that change a file or folder."""

    def decide(call: Call) -> None:
        path = call.path
        if path is not None and (path.parts[1] not in ("dev", "proc") or path.parts[:3] == ("/", "dev", "shm")):
            calls.append(f"{call.name} {path}")

    return decide


def full_from(count: int, folder: str, error: int = errno.ENOSPC, until: int = 1 << 30) -> Decision:
    """A decision that lets calls fail that need space below a folder of this name, from the `count`-th on.

    until: the last of these calls that fails.
    """
    seen = 0

    def decide(call: Call) -> int | None:
        nonlocal seen
        if call.number not in NEED_SPACE:
            return None
        path = call.path
        if path is None or folder not in path.parts:
            return None
        seen += 1
        return error if count <= seen <= until else None

    return decide
