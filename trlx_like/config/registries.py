"""The methods and trainers that `method.name` and `train.trainer` choose from."""

from __future__ import annotations

from typing import Any

from trlx_like.algorithms import ALGORITHMS
from trlx_like.config.section import Section
from trlx_like.errors import RegistryError
from trlx_like.registry import Registry


def _refuse_dataclass(method: type) -> None:
    """Refuse @dataclass, which replaces the checking constructor; above `register_method` it is only seen on use."""
    if "__dataclass_fields__" in vars(method):
        raise RegistryError(
            f"{method.__name__} is a MethodConfig, which declares its fields by itself: drop @dataclass."
        )


def _accept_method(method: Any, name: str | None) -> None:
    """Refuse what is no subclass of `MethodConfig`, and note the name, which is the default of its option `name`."""
    if not (isinstance(method, type) and issubclass(method, Section) and method.section == "method"):
        raise RegistryError(f"register_method needs a subclass of MethodConfig, got {method!r}.")
    _refuse_dataclass(method)
    method.registered_name = name or method.__name__


def _accept_trainer(trainer: Any, name: str | None) -> None:
    if not isinstance(trainer, type):
        raise RegistryError(f"register_trainer needs a class, got {trainer!r}.")


METHODS: Registry[type[Any]] = Registry(
    "method",
    {row.method: f"trlx_like.config.methods.{row.name}:{row.method}" for row in ALGORITHMS},
    accept=_accept_method,
)
register_method = METHODS.register

# Any: this layer cannot import trainers.
TRAINERS: Registry[type[Any]] = Registry(
    "trainer",
    {row.trainer: f"trlx_like.trainers.{row.name}:{row.trainer}" for row in ALGORITHMS},
    aliases={alias: row.trainer for row in ALGORITHMS for alias in row.aliases},
    gone={
        "NeMo*": "NeMo is not supported; use PPOTrainer or SFTTrainer (see MIGRATING.md).",
        "AccelerateDPOTrainer": "Use DPOTrainer, with preferences=... (see MIGRATING.md).",
    },
    accept=_accept_trainer,
)
register_trainer = TRAINERS.register


def method_class(name: str) -> type[Any]:
    """Return the class of the section `method` for a method's name. Raise RegistryError for an unknown name."""
    method = METHODS.get(name)
    _refuse_dataclass(method)
    return method
