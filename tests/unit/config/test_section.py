"""What every section does: fields are documented, checked when assigned, and copied from the user's dicts."""

from __future__ import annotations

import ast
import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.config.support import TRAIN, sentence_of
from trlx_like.config import Section, TRLConfig
from trlx_like.presets import default_ppo_config


def test_every_field_has_a_docstring() -> None:
    folder = Path(str(sys.modules[Section.__module__].__file__)).parent
    fields = []
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                    if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                        fields.append((node.name, ast.unparse(field.target), after))
    assert len(fields) > 80
    undocumented = [
        (section, name)
        for section, name, after in fields
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert undocumented == []


def test_assigning_to_a_field_checks_it() -> None:
    config = default_ppo_config()
    assert sentence_of(lambda: setattr(config.train, "seed", "x")) == (
        "train.seed: must be a whole number from 0 to 4294967295, got 'x'."
    )
    assert sentence_of(lambda: setattr(config.train, "sede", 1)) == (
        "train.sede: unknown key. Did you mean train.seed?"
    )
    assert config.train.seed == 1000
    config.train.minibatch_size = 5
    assert sentence_of(config.check) == "train.minibatch_size: 5 does not divide train.batch_size (32)."
    config.train.batch_size = 10
    config.check()


def test_true_is_no_number() -> None:
    for section, name in (("optimizer", "lr"), ("optimizer", "weight_decay"), ("scheduler", "num_warmup_steps")):
        changes: dict[str, Any] = {section: {"kwargs": {name: True}}}
        said = sentence_of(partial(default_ppo_config().evolve, **changes))
        assert said == f"{section}.kwargs.{name}: must be a number, got true."
    assert default_ppo_config().evolve(optimizer={"kwargs": {"amsgrad": True}}).optimizer.kwargs["amsgrad"]


def test_numbers_of_numpy_are_numbers() -> None:
    config = default_ppo_config().evolve(
        train={"batch_size": np.int64(4)},
        optimizer={"kwargs": {"lr": np.float32(0.5)}},
        method={"gamma": np.array(0.9)},
    )
    config.train.seed = np.int32(7)  # type: ignore[assignment]
    read = [config.train.batch_size, config.optimizer.kwargs["lr"], config.method.gamma, config.train.seed]  # type: ignore[attr-defined]
    assert read == [4, 0.5, 0.9, 7] and [type(value) for value in read] == [int, float, float, int]


def test_the_users_dicts_are_copied() -> None:
    values = {"method": {"name": "PPOConfig"}, "model": {"model_path": "a"}, "train": dict(TRAIN)}
    values["optimizer"] = {"name": "sgd", "kwargs": {"lr": 1.0, "groups": [{"x": 1}]}}
    before = copy.deepcopy(values)
    config = TRLConfig.from_dict(values)
    config.optimizer.kwargs["groups"][0]["x"] = 2
    config.to_dict()["optimizer"]["kwargs"]["groups"][0]["x"] = 3
    assert values == before and config.optimizer.kwargs["groups"][0]["x"] == 2
