"""The table of algorithms is all that has to change, beside an algorithm's own files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.exports import STUB, stub
from tests.tiny import save_tiny
from trlx_like.algorithms import ALGORITHMS, Algorithm

ROOT = Path(__file__).resolve().parents[2]

METHOD = '''
from pydantic import Field
from trlx_like.config.method import TextMethodConfig

class EchoConfig(TextMethodConfig):
    """Options of Echo."""

    volume: float = Field(default=2.0, gt=0)
    """Factor of the loss."""
'''
TRAINER = '''
from trlx_like.config.methods.echo import EchoConfig
from trlx_like.config.methods.sft import SFTConfig
from trlx_like.trainers.sft import SFTTrainer

class EchoTrainer(SFTTrainer):
    """Supervised fine-tuning, louder."""

    method_class = EchoConfig

    def build(self, tokenizer=None):
        self.volume, self.method = self.method.volume, SFTConfig(gen_kwargs=self.method.gen_kwargs)
        super().build(tokenizer)
'''
ROW = """
    Algorithm(
        "Echo", "Return the preset for Echo.", _text("gpt2", 1e-4, total_steps=3, batch_size=2),
        aliases=("AccelerateEchoTrainer",),
    ),
"""
PROGRAM = """
import sys
import trlx_like
from trlx_like.presets import PRESETS

model, folder = sys.argv[1:]
assert trlx_like.default_echo_config.__doc__ == "Return the preset for Echo."
assert {"EchoConfig", "EchoTrainer", "default_echo_config"} <= set(dir(trlx_like))
config = PRESETS["echo"]().evolve(
    model={"model_path": model}, tokenizer={"tokenizer_path": None},
    train={"trainer": "AccelerateEchoTrainer", "seq_length": 16, "checkpoint_dir": folder},
    method={"volume": 3.0, "gen_kwargs": {"max_new_tokens": 2}},
)
trainer = trlx_like.train(config, samples=["a b", "c d", "a", "b c"])
assert type(trainer) is trlx_like.EchoTrainer and type(config.method) is trlx_like.EchoConfig
assert (trainer.volume, trainer.progress.step) == (3.0, 3)
"""


def test_the_names_for_type_checkers_are_up_to_date() -> None:
    assert STUB.read_text(encoding="utf-8") == "\n".join(stub()), "run .venv/bin/python scripts/exports.py"


@pytest.mark.parametrize("row", ALGORITHMS, ids=lambda row: row.name)
def test_an_algorithm_has_a_page(row: Algorithm) -> None:
    assert (ROOT / "docs" / "algorithms" / f"{row.name}.md").is_file()


def test_an_algorithm_of_our_own_is_its_files_and_one_row(tmp_path: Path) -> None:
    package = tmp_path / "trlx_like"
    shutil.copytree(ROOT / "trlx_like", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "config" / "methods" / "echo.py").write_text(METHOD)
    (package / "trainers" / "echo.py").write_text(TRAINER)
    table = package / "algorithms.py"
    start = "ALGORITHMS: tuple[Algorithm, ...] = ("
    assert start in table.read_text()
    table.write_text(table.read_text().replace(start, start + ROW))
    # Without coverage: the copy in `tmp_path` would count as files of the package that no test covers.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    environment["PYTHONPATH"] = str(tmp_path)

    def python(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    python("-c", PROGRAM, save_tiny(tmp_path / "model"), str(tmp_path / "run"))
    assert "EchoTrainer" in python("-m", "trlx_like", "list", "trainers").splitlines()
    assert "  # Factor of the loss.\n  volume: 2.0\n" in python("-m", "trlx_like", "show-config", "echo")
    python(str(ROOT / "scripts" / "exports.py"))
    assert "import EchoTrainer as EchoTrainer" in (package / "__init__.pyi").read_text()
    python("-c", "from trlx_like.config import EchoConfig; EchoConfig(volume=1)")


def test_aliases_of_trainers_are_attributes_too() -> None:
    import trlx_like

    found = {alias: row.trainer for row in ALGORITHMS for alias in row.aliases}
    assert len(found) == 4
    for alias, name in found.items():
        assert getattr(trlx_like, alias) is getattr(trlx_like, name)
