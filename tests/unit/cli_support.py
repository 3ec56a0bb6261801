"""Running the command line in the test's own process, and the YAML files that it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result
from typer.main import get_command

from tests.tiny import save_tiny
from trlx_like.cli import app

COMMAND: Any = get_command(app)  # typer's own runner reads the signatures of all commands in each call

REWARDS = """\
import signal

def score(outputs, **_):
    return [float(output.count("a")) for output in outputs]

calls = 0

def score_and_interrupt(outputs, **_):
    global calls
    calls += 1
    if calls == 2:  # the first is the evaluation before training
        signal.raise_signal(signal.SIGINT)
    return score(outputs)
"""

TRAIN: dict[str, Any] = {"total_steps": 2, "epochs": 9, "seq_length": 16, "batch_size": 4}
TOKENS = {"max_new_tokens": 4}


def run(*words: object) -> Result:
    return CliRunner().invoke(COMMAND, [str(word) for word in words])


def said(code: int, *words: object) -> str:
    """What a command prints that should exit with `code`: on stderr for a mistake, else on stdout."""
    result = run(*words)
    assert result.exit_code == code, result.output
    return result.stderr if code else result.stdout


def write_yaml(file: Path, **sections: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(sections))
    return file


def ppo_file(folder: Path, **data: Any) -> Path:
    (folder / "prompts.txt").write_text("a b\nc d\nab c\nd\n")
    (folder / "rewards.py").write_text(REWARDS)
    if not (folder / "model").exists():
        save_tiny(folder / "model")
    return write_yaml(
        folder / "ppo.yml",
        model={"model_path": str(folder / "model")},
        train={**TRAIN, "trainer": "PPOTrainer", "eval_interval": 2, "checkpoint_dir": str(folder / "run")},
        method={"name": "PPOConfig", **dict.fromkeys(("num_rollouts", "chunk_size"), 4), "gen_kwargs": TOKENS},
        data={"prompts": str(folder / "prompts.txt"), "reward_fn": f"{folder / 'rewards.py'}:score", **data},
        backend={"device": "cpu", "num_threads": 1},
    )
