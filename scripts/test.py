"""`python scripts/test.py`: the whole test suite, from a fresh machine.

Without arguments everything runs in two processes. Other arguments go to pytest and narrow the run,
`python scripts/test.py tests/unit -k kl`: then one process is used (`-n 2` for two). `--quick` is for between two
edits: about a minute, of what `tests/quick.py` keeps. `--coverage` measures how much of the package the unit tests run,
which makes them half as long again, and fails below the bound in `pyproject.toml`. `--apart` runs the tests of
DeepSpeed and of bitsandbytes (QLoRA, 8-bit optimizers) in an environment of their own, `.venv-apart`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from browser import MISSING, find_chromium
from environment import ROOT, TEST_EXTRAS, Environment, run, say
from package import install

# Toy models are several times faster on one thread a process. Nothing may reach for the network. What Python compiles
# is kept, or each of many processes would compile torch and transformers again where nothing did so before.
VARIABLES = {
    "PYTHONDONTWRITEBYTECODE": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
    "GRADIO_ANALYTICS_ENABLED": "False",
}

UNIT = "tests/unit"
# What needs DeepSpeed or bitsandbytes, and these with what they need beside the packages of the tests.
APART = [
    *("tests/distributed/test_zero.py", "tests/distributed/test_zero_engine.py"),
    *("tests/distributed/test_nonfinite_ranks.py", "tests/contract/test_quantized.py"),
    *("tests/unit/models/test_formats.py", "tests/unit/models/test_wrapper.py", "tests/unit/test_optim.py"),
]
PACKAGES_APART = ("bitsandbytes", "deepspeed", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo")
MEMORY = 4 * 2**30  # bytes; what failed tests leave behind and the running ones hold is far less
# The other folders start processes, train, or run whole examples and pages.
QUICK = ["tests/unit", "tests/compat", "tests/scripts"]


def main(arguments: list[str]) -> int:
    """Exit code of pytest, or of coverage when all tests pass but cover too little."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow too")
    parser.add_argument("--quick", action="store_true", help="run what is cheap of the unit tests")
    parser.add_argument("--coverage", action="store_true", help="measure what the unit tests, or others, run")
    parser.add_argument(
        "--apart", action="store_true", help="run the tests of DeepSpeed and bitsandbytes, and no others"
    )
    parser.add_argument("--measure", action="store_true", help="run everything and write tests/durations.json")
    options, chosen = parser.parse_known_args(arguments)
    python = Environment().ensure(TEST_EXTRAS)
    settings = ["-m", "slow or not slow"] if options.slow else []
    if not chosen and not options.apart and (os.cpu_count() or 1) >= 2:
        # What the tests of a file share is made once; files of few, long tests do not come last.
        settings += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    variables = {**VARIABLES, **in_memory()}
    if options.apart:
        own = apart(python)
        return run([own, "-m", "pytest", "-p", "no:cacheprovider", *settings, *(chosen or APART)], **variables)
    if options.quick or options.measure:
        folders = QUICK if options.quick and not chosen else []
        selection = "--quick" if options.quick else "--measure"
        return run([python, "-m", "pytest", "-p", "tests.quick", selection, *settings, *folders, *chosen], **variables)
    pytest = ["-m", "pytest", *settings, *(chosen or [UNIT] * options.coverage)]
    if options.coverage:
        run([python, "-m", "coverage", "erase"])
        code = run([python, "-m", "coverage", "run", *pytest], **variables)
        run([python, "-m", "coverage", "combine", "--quiet"])
        return code or run([python, "-m", "coverage", "report", *["--fail-under=0"] * bool(chosen)])
    code = run([python, *pytest], **variables)
    if find_chromium() is None:
        say(MISSING)
    return code


def apart(python: Path) -> Path:
    """Make a Python that has DeepSpeed, bitsandbytes, and everything that `.venv` has.

    In `.venv` DeepSpeed would be imported whenever a model is saved, for five seconds in each of many processes.
    """
    folder = ROOT / ".venv-apart"
    if not (folder / "complete").exists():
        say(f"Installing DeepSpeed and bitsandbytes into {folder}.")
        shutil.rmtree(folder, ignore_errors=True)
        install(python, ["-c", "constraints.txt", *PACKAGES_APART], folder)
        (folder / "complete").touch()
    return folder / python.relative_to(ROOT / ".venv")


def in_memory() -> dict[str, str]:
    """Variables that let the tests' folders lie in memory, where there is room: they wait for a disk most of the time.

    Every checkpoint is synchronised to the disk, a few milliseconds a file, and tests write thousands.
    """
    place = Path("/dev/shm")
    roomy = os.access(place, os.W_OK) and shutil.disk_usage(place).free > MEMORY
    return {"PYTEST_DEBUG_TEMPROOT": str(place)} if roomy else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
