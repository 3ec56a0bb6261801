"""The virtual environment the other scripts run in: `.venv` beside `pyproject.toml`, made when needed.

Standard library only, since it runs before anything is installed. A record inside `.venv` says what was
installed and from which files; while it matches, nothing is done. An environment that somebody else made is
added to, never removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
# Extras that the tests, the checks and the site need; the demo needs none.
TEST_EXTRAS = ("dev", "docs", "wandb", "tensorboard", "trackio", "datasets", "diffusion", "peft", "sweep", "examples")

# Where Python must not write what it compiles (PYTHONDONTWRITEBYTECODE), each start of a program would compile torch
# and transformers again, for 12 seconds. So what is always imported is compiled once, by this.
COMPILING = "import sys; sys.dont_write_bytecode = False; import trlx_like.trainers.ppo, trlx_like.cli"


@dataclass(frozen=True)
class Record:
    """What was last installed, kept in `.venv` as JSON."""

    python: str
    """Minor version the environment was made with, such as "3.11"."""
    fingerprint: str = ""
    """Hash of everything the installation depends on, see `Environment.fingerprint`."""
    extras: list[str] = field(default_factory=list)
    complete: bool = False
    """False from before the first change until after the last, so that an interruption is seen."""
    adopted: bool = False
    """Whether somebody else made the environment: then it is added to, but never rebuilt."""


class Environment:
    """`.venv` under `root`. `execute` runs a command in a folder and returns its exit code and its output."""

    def __init__(self, root: Path = ROOT, execute: Callable[[Sequence[str], Path], tuple[int, str]] | None = None):
        self.root = root
        self.folder = root / ".venv"
        self.programs = self.folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.programs / ("python.exe" if os.name == "nt" else "python")
        self.record_file = self.folder / "trlx_like.json"
        self.execute = execute or execute_quietly

    def ensure(self, extras: Iterable[str] = ()) -> Path:
        """The environment's Python, once the package is installed with at least these extras."""
        refuse_old_python(sys.version_info[:2])
        record = self.read_record()
        if self.is_ready(record, extras):
            say(f"Using the environment {self.folder}.")
            return self.python
        if record is None and self.folder.is_dir() and any(self.folder.iterdir()):
            record = self.adopt()
        elif record is None or self.must_be_rebuilt(record):
            record = self.make(record)
        self.install(record, sorted({*extras, *record.extras}))
        return self.python

    def is_ready(self, record: Record | None, extras: Iterable[str]) -> bool:
        """Whether a complete installation of the present files covers these extras."""
        return (
            record is not None
            and record.complete
            and record.fingerprint == self.fingerprint()
            and set(extras) <= set(record.extras)
            and self.python.exists()
        )

    def fingerprint(self) -> str:
        """Hash of what an installation depends on: two files, the Python, and where the folder lies.

        The place counts because the package is installed as a link to it: a copy of the folder, environment
        included, would otherwise run the code of the original.
        """
        digest = hashlib.sha256(f"{python_version()} {sys.platform} {self.root.resolve()}".encode())
        for name in ("pyproject.toml", "constraints.txt"):
            digest.update((self.root / name).read_bytes())
        return digest.hexdigest()

    def must_be_rebuilt(self, record: Record) -> bool:
        """Whether what is there cannot be added to: another Python, a lost one, or half an installation."""
        usable = self.python.exists() and record.python == python_version()
        if record.adopted and not usable:
            raise SystemExit(f"{self.folder} is not of Python {python_version()}: remove it, then run this again.")
        return not record.adopted and not (usable and record.complete)

    def adopt(self) -> Record:
        """Take over an environment without a record, if it is one of this Python."""
        configuration = self.folder / "pyvenv.cfg"
        text = configuration.read_text(encoding="utf-8") if configuration.exists() else ""
        version = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", text, re.MULTILINE)
        if version is None or version[1] != python_version() or not self.python.exists():
            raise SystemExit(
                f"{self.folder} exists, but is not a virtual environment of Python {python_version()}:"
                " remove it, then run this again."
            )
        return Record(python=python_version(), adopted=True)

    def make(self, record: Record | None) -> Record:
        """A new, empty environment. Extras of the one it replaces stay wanted."""
        if Path(sys.prefix).resolve() == self.folder.resolve():
            raise SystemExit(f"{self.folder} has to be made anew: run this with the Python outside it.")
        say(f"Making the environment {self.folder} with Python {python_version()}.")
        record = Record(python=python_version(), extras=record.extras if record else [])
        self.write_record(record)
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != self.record_file:
                path.unlink()
        code, output = self.execute([sys.executable, "-m", "venv", str(self.folder)], self.root)
        if code:
            raise SystemExit(f"{output}\nThe environment could not be made: `python -m venv` failed as shown above.")
        return record

    def install(self, record: Record, extras: list[str]) -> None:
        """Install the package, editable, with these extras and the tested versions."""
        target = ".[" + ",".join(extras) + "]" if extras else "."
        say(f"Installing {target} into {self.folder}; the first time takes some minutes.")
        self.write_record(replace(record, complete=False))
        options = [
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "--no-compile",  # a module is compiled when it is first imported, and most never are
            "-c",
            "constraints.txt",
            "-e",
            target,
        ]
        code, output = self.execute([str(self.python), "-m", "pip", "install", *options], self.root)
        if code:
            # pip downloads all before it changes anything, so what was complete mostly still is.
            self.write_record(record)
            raise SystemExit(
                f"{output}\nThe installation failed, see pip's output above: check the network and the disk"
                f" space and run this again; if that does not help, remove {self.folder} first."
            )
        if sys.dont_write_bytecode:
            self.execute([str(self.python), "-c", COMPILING], self.root)
        self.write_record(replace(record, fingerprint=self.fingerprint(), extras=extras, complete=True))
        say("The environment is ready.")

    def read_record(self) -> Record | None:
        try:
            return Record(**json.loads(self.record_file.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write_record(self, record: Record) -> None:
        self.folder.mkdir(exist_ok=True)
        unfinished = self.record_file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
        unfinished.replace(self.record_file)


def refuse_old_python(version: tuple[int, int]) -> None:
    """End with one sentence under a Python that the package does not run on."""
    if version < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        raise SystemExit(f"trlx_like needs Python {needed} or newer; this is {version[0]}.{version[1]}.")


def python_version() -> str:
    """Minor version of the running Python, such as "3.11"."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def execute_quietly(command: Sequence[str], folder: Path, **variables: str) -> tuple[int, str]:
    """Return the exit code and the output (both streams) of a command; nothing is shown."""
    # A user's own pip setting `user = true` is refused by pip inside a virtual environment.
    environment = {**os.environ, "PIP_USER": "0", **variables}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    return done.returncode, done.stdout


def run(command: Sequence[str | Path], **variables: str) -> int:
    """Exit code of a command in the root, its output shown, with these variables added to the environment.

    Ctrl-C reaches the command too, which may have something to save: it is waited for.
    """
    with subprocess.Popen([str(part) for part in command], cwd=ROOT, env={**os.environ, **variables}) as process:
        while True:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                continue
            return 128 - code if code < 0 else code


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    Environment().ensure(TEST_EXTRAS)
