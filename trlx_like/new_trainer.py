"""The command `new-trainer`, which writes a trainer to start from, a configuration for it and a test of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from trlx_like.config import METHODS, TRAINERS
from trlx_like.errors import ConfigError
from trlx_like.rendering import rendered

FILES = {"{}.py": "trainer.py.txt", "{}.yml": "trainer.yml.txt", "test_{}.py": "test_trainer.py.txt"}
"""Name of each file, with the module's name in it -> its template."""


def new_trainer(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the trainer is called, such as ReMax or best_of.")],
) -> None:
    """Write a trainer of your own to start from.

    Writes it, a configuration and a test into the current folder. For ReMax these are re_max_trainer.py with the class
    ReMaxTrainer, re_max_trainer.yml, which trains a tiny model on a CPU in seconds, and test_re_max_trainer.py. All
    three work as written; change them from there.
    """
    stem = re.sub(r"_?trainer$", "", name, flags=re.IGNORECASE)
    if not (stem.isascii() and stem.isidentifier() and stem.strip("_")):
        raise ConfigError(f"new-trainer ({name!r}) must be a name of a class in Python, such as ReMax.")
    kind = "".join(word[:1].upper() + word[1:] for word in stem.split("_"))
    for registry, wanted in ((TRAINERS, f"{kind}Trainer"), (METHODS, f"{kind}Config")):
        if wanted in registry:
            taken = registry.canonical(wanted)
            raise ConfigError(f"new-trainer ({name!r}): there is a {taken} already; give another name.")
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower() + "_trainer"
    texts = {file.format(module): rendered(text, name=kind, module=module) for file, text in FILES.items()}
    for file in texts:
        if Path(file).exists():
            raise ConfigError(f"new-trainer ({name!r}): {file} exists already in {Path.cwd()}; give another name.")
    for file, text in texts.items():
        with Path(file).open("x", encoding="utf-8") as new:
            new.write(text)
    typer.echo(
        f"Written: {', '.join(texts)}.\nTrain with `trlx-like train {module}.yml`; check the trainer with "
        f"`python -m pytest test_{module}.py`. docs/extending.md explains its parts."
    )
