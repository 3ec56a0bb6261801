"""Make the environments of the peers, in the folder `.peers` of the repository.

    python -m benchmarks.peers make [NAME ...]

Each takes about 1 GB. `torch` is the version of constraints.txt in all, so that only the libraries on it differ.
"""

from __future__ import annotations

import argparse
import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers"
TORCH = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))

ENVIRONMENTS = {
    # The last TRL with that PPOTrainer, libraries of its month, and what it imports without asking for it.
    "trl_0_11": [
        "trl==0.11.4",
        "transformers==4.45.2",
        "accelerate==1.0.1",
        "datasets==3.0.2",
        "numpy<2",
        "pandas<3",
        "pyarrow<19",
        "rich",
        "setuptools",
    ],
    # The last TRL with a DDPOTrainer, and libraries of its month.
    "trl_0_23": [
        "trl==0.23.1",
        "transformers==4.56.2",
        "diffusers==0.35.1",
        "accelerate==1.10.1",
        "datasets==4.1.1",
        "peft==0.17.1",
    ],
    # The last TRL with a PPOTrainer, beside the versions that this project is tested with.
    "trl_1_12": ["trl==1.12.0", "-c", str(ROOT / "constraints.txt"), "transformers", "accelerate", "datasets"],
    # Beside it the versions that this project is tested with.
    "trl_1_16": ["trl==1.16.0", "-c", str(ROOT / "constraints.txt"), "transformers", "accelerate", "datasets"],
}


def interpreter(name: str) -> Path:
    """Return the Python of an environment, and say how to make one that is not there."""
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"The environment {name} is missing. Make it: python -m benchmarks.peers make {name}")
    return python


def make(name: str) -> None:
    """Make an environment, in place of the one that is there."""
    venv.create(FOLDER / name, clear=True, with_pip=True)
    python = str(FOLDER / name / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", TORCH, *ENVIRONMENTS[name]], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["make"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)} (default: all)")
    given = parser.parse_args()
    if unknown := set(given.names) - ENVIRONMENTS.keys():
        parser.error(f"there is no environment {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    for name in given.names or ENVIRONMENTS:
        make(name)


if __name__ == "__main__":
    main()
