"""`Section`: a typed part of the configuration that refuses unknown keys, with errors in plain words.

A section is a pydantic model. A subclass declares fields with type, bound, default and a docstring, and may
override `conflicts` to say which combinations cannot run. Every error is a `ConfigError`, never pydantic's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from trlx_like.config.elsewhere import answers
from trlx_like.config.problems import InvalidConfig, Problem, UnknownKey, expected, shown
from trlx_like.redact import redacted
from trlx_like.registry import nearest


def copied(value: Any) -> Any:
    """Copy mappings and lists at every depth, and read numpy's numbers as Python's.

    Other objects (models, functions) are kept by reference.
    """
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value


class Section(BaseModel):
    """Base class of the sections of the configuration. Values are also checked when they are assigned."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        validate_assignment=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )
    section: ClassVar[str] = ""  # the name of this part in the configuration, for errors; `TRLConfig` sets it
    registered_name: ClassVar[str] = ""  # set by `register_method`

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**copied(values))
        except ValidationError as error:
            raise InvalidConfig(self._explained(error, values)) from None
        if problems := self.problems():
            raise InvalidConfig(problems)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, copied(value) if name in type(self).model_fields else value)
        except ValidationError as error:
            raise InvalidConfig(self._explained(error, {name: value})) from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> Self:
        """Make the section from a mapping (None is an empty one), which is copied. Raises `ConfigError`."""
        if isinstance(values, cls):
            return values
        if values is not None and not isinstance(values, Mapping):
            raise InvalidConfig([Problem(cls._path(), f"must be a mapping of settings, got {shown(values)}.")])
        if odd := [key for key in values or {} if not isinstance(key, str)]:
            raise InvalidConfig([Problem(cls._path(key), "a key must be text.") for key in odd])
        return cls(**(values or {}))

    def to_dict(self) -> dict[str, Any]:
        """Return a copy as plain mappings and lists; objects (a loaded model) are kept by reference."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: v.to_dict() if isinstance(v, Section) else copied(v) for name, v in values.items()}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redacted(value, name or "")

    def conflicts(self) -> Iterable[Problem]:
        """Yield problems of fields that are valid alone but not together. Override, and chain to `super()`."""
        return ()

    def acting(self) -> dict[str, bool]:
        """Return whether an option has an effect beside the other fields, for those that may have none."""
        return {}

    def unused_options(self) -> list[str]:
        """Return the fields that were changed from their default but have no effect beside the other fields."""
        return [name for name, acts in self.acting().items() if not acts and self.changed(name)]

    def inert(self) -> list[str]:
        """Return `unused_options()`; this is its former name."""
        return self.unused_options()

    def problems(self) -> list[Problem]:
        """Return the problems between fields that are each valid on their own."""
        words = [
            problem
            for name in type(self).model_fields
            if not isinstance(value := getattr(self, name), Section)
            for problem in _unusable(value, self._path(name), isinstance(value, dict))
        ]
        conflicts = [one for one in self.conflicts() if all(one.path != two.path[: len(one.path)] for two in words)]
        return [*words, *conflicts]

    def changed(self, name: str) -> bool:
        """Return whether a field differs from its default."""
        field = type(self).model_fields[name]
        return bool(getattr(self, name) != field.get_default(call_default_factory=True, validated_data={}))

    @classmethod
    def unknown(cls, name: str) -> Problem:
        """Return the problem of a key that this section does not have."""
        if words := answers("options").get(name):
            return UnknownKey(cls._path(name), f"unknown key. Here this is {words}.")
        other = next((kind for kind in Section.__subclasses__() if kind.section and name in kind.model_fields), None)
        if cls.section and other is not None:
            return UnknownKey(cls._path(name), f"unknown key. Did you mean {other.section}.{name}?")
        close = nearest(name, cls.model_fields)
        if close:
            return UnknownKey(cls._path(name), f"unknown key. Did you mean {'.'.join(cls._path(close))}?")
        return UnknownKey(cls._path(name), f"unknown key. {cls.__name__} has {', '.join(cls.model_fields)}.")

    @classmethod
    def _path(cls, *names: Any) -> tuple[Any, ...]:
        return (cls.section, *names) if cls.section else names

    @classmethod
    def _explained(cls, error: ValidationError, values: Mapping[str, Any]) -> list[Problem]:
        """Turn pydantic's errors into one problem for each field, though a union reports each of its branches."""
        problems: dict[str, Problem] = {}
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0]) if detail["loc"] else ""
            problems.setdefault(name, cls._explain(name, detail, values.get(name)))
        return list(problems.values())

    @classmethod
    def _explain(cls, name: str, detail: Mapping[str, Any], given: Any) -> Problem:
        path = cls._path(name) if name else cls._path()
        kind, message = detail["type"], str(detail.get("ctx", {}).get("error", ""))
        if kind in ("extra_forbidden", "no_such_attribute"):
            return cls.unknown(name)
        if name not in cls.model_fields or (kind in ("value_error", "assertion_error") and message):
            return Problem(path, message or str(detail["msg"]))
        field = cls.model_fields[name]
        allowed = expected(field.annotation, field.metadata)
        if kind == "missing":
            return Problem(path, f"missing. It must be {allowed}.")
        hint = " Write null for no value." if given in ("None", "none") and "null" in allowed else ""
        return Problem(path, f"must be {allowed}, got {shown(redacted(given, name))}.{hint}")


def _unusable(value: Any, path: tuple[Any, ...], in_mappings: bool = False) -> Iterator[Problem]:
    """Yield values at any depth that libraries accept and fail with later.

    These are NaN and infinity, whole numbers beyond 64 bits, and in mappings texts such as `no`, which YAML 1.1 read
    as false and a library would take for true.

    Args:
        value: The value of a field, or a part of it.
        path: Where it stands.
        in_mappings: Whether all around it are mappings. Elements of a list are data, such as a prompt.
    """
    if isinstance(value, str) and in_mappings and value.lower() in ("yes", "no", "on", "off"):
        yield Problem(path, f"{value!r} is text here; write true or false.")
    elif isinstance(value, float) and not math.isfinite(value) and "sequence_bias" not in path:
        yield Problem(path, f"must be a finite number, got {shown(value)}.")
    elif isinstance(value, int) and abs(value) > sys.maxsize:
        yield Problem(path, f"must be a whole number of at most 64 bits, got {shown(value)}.")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _unusable(item, (*path, key), in_mappings)
    elif isinstance(value, list):
        for row, item in enumerate(value):
            yield from _unusable(item, (*path, row))
