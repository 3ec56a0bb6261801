"""The methods and trainers that `method.name` and `train.trainer` choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from trlx_like.algorithms import ALGORITHMS
from trlx_like.config.section import Section
from trlx_like.errors import RegistryError
from trlx_like.registry import Registry

Method = TypeVar("Method", bound=type[Section])
Trainer = TypeVar("Trainer", bound=type[Any])

METHODS: Registry[type[Any]] = Registry(
    "method", {row.method: f"trlx_like.config.methods.{row.name}:{row.method}" for row in ALGORITHMS}
)

# Any: this layer cannot import trainers.
TRAINERS: Registry[type[Any]] = Registry(
    "trainer",
    {row.trainer: f"trlx_like.trainers.{row.name}:{row.trainer}" for row in ALGORITHMS},
    aliases={alias: row.trainer for row in ALGORITHMS for alias in row.aliases},
    gone={"NeMo*": "NeMo is not supported; use PPOTrainer or SFTTrainer (see MIGRATING.md)."},
)


@overload
def register_method(name: str | None = None, *, aliases: Iterable[str] = ()) -> Callable[[Method], Method]: ...
@overload
def register_method(name: Method, *, aliases: Iterable[str] = ()) -> Method: ...
def register_method(name: Any = None, *, aliases: Iterable[str] = ()) -> Any:
    """Make the decorated subclass of `MethodConfig` available as `method.name`.

    Args:
        name: The name; by default that of the class.
        aliases: Further names.

    Raises:
        RegistryError: If it is not a subclass of `MethodConfig`, or a name is taken.
    """
    if name is not None and not isinstance(name, str):
        return register_method()(name)

    def add(method: Method) -> Method:
        if not (isinstance(method, type) and issubclass(method, Section) and method.section == "method"):
            raise RegistryError(f"register_method needs a subclass of MethodConfig, got {method!r}.")
        _refuse_dataclass(method)
        METHODS.register(name, aliases=aliases)(method)
        method.registered_name = name or method.__name__
        return method

    return add


@overload
def register_trainer(name: str | None = None, *, aliases: Iterable[str] = ()) -> Callable[[Trainer], Trainer]: ...
@overload
def register_trainer(name: Trainer, *, aliases: Iterable[str] = ()) -> Trainer: ...
def register_trainer(name: Any = None, *, aliases: Iterable[str] = ()) -> Any:
    """Make the decorated trainer class available as `train.trainer`.

    Args:
        name: The name; by default that of the class.
        aliases: Further names.

    Raises:
        RegistryError: If it is not a class, or a name is taken.
    """
    if name is not None and not isinstance(name, str):
        return register_trainer()(name)

    def add(trainer: Trainer) -> Trainer:
        if not isinstance(trainer, type):
            raise RegistryError(f"register_trainer needs a class, got {trainer!r}.")
        TRAINERS.register(name, aliases=aliases)(trainer)
        return trainer

    return add


def method_class(name: str) -> type[Any]:
    """Return the class of the section `method` for a method's name. Raise RegistryError for an unknown name."""
    method = METHODS.get(name)
    _refuse_dataclass(method)
    return method


def _refuse_dataclass(method: type) -> None:
    """Refuse @dataclass, which replaces the checking constructor; above `register_method` it is only seen on use."""
    if "__dataclass_fields__" in vars(method):
        raise RegistryError(
            f"{method.__name__} is a MethodConfig, which declares its fields by itself: drop @dataclass."
        )
