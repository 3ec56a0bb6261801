"""Registries: the trainers, methods, optimizers, ... that a configuration chooses by name. Plugins add to them.

A `Registry` holds each item either as an object or as a lazy `"module:attribute"`, which is imported by the first
`get`. `load_plugin` imports a user's file or module, whose decorators register what it adds.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar, cast, overload

from trlx_like.errors import RegistryError, TrlxError
from trlx_like.imports import import_file, import_module

T = TypeVar("T")
Item = TypeVar("Item")

PLUGIN_GROUP = "trlx_like.plugins"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that `name` is most likely a typo of, or None if none is close."""
    spelled = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.6)
    return spelled[close[0]] if close else None


@dataclass
class _Entry:
    name: str  # as registered
    source: str  # "module:qualname"
    value: Any = None  # None until a lazy entry is asked for


class Registry(Generic[T]):
    """Hold the items of one kind by case-insensitive names; a name can be registered only once.

    Args:
        kind: what the items are, for error messages.
        lazy: maps names to the "module:attribute" that is imported on `get`.
        aliases: maps further names to names.
        option: the option of a configuration that chooses from it, with which messages about a name begin.
        gone: maps a name that is no longer available, or a prefix ending in "*", to a sentence that says what to do.
        accept: is called with each item that is registered and the name that is given for it, or None; it raises
            RegistryError to refuse the item.
    """

    def __init__(
        self,
        kind: str,
        lazy: dict[str, str] | None = None,
        *,
        option: str = "",
        aliases: dict[str, str] | None = None,
        gone: dict[str, str] | None = None,
        accept: Callable[[Any, str | None], None] = lambda item, name: None,
    ) -> None:
        self.kind, self._accept, self._at = kind, accept, f"{option}: " if option else ""
        self._entries = {name.lower(): _Entry(name, source) for name, source in (lazy or {}).items()}
        self._aliases = dict(aliases or {})
        self._gone = dict(gone or {})

    @overload
    def register(self, name: str | None = None, *, aliases: Iterable[str] = ()) -> Callable[[Item], Item]: ...
    @overload
    def register(self, name: Item, *, aliases: Iterable[str] = ()) -> Item: ...
    def register(self, name: Any = None, *, aliases: Iterable[str] = ()) -> Any:
        """Register the decorated item: `@register`, `@register("name")` or `@register("name", aliases=["other"])`.

        Registering the same class or function again, as after a reload of its module, replaces the old object.

        Args:
            name: the name; if left out, that of the class or function.
            aliases: further names.

        Raises:
            RegistryError: if the name or an alias is taken by another item, or the item is not of the kind.
        """
        if name is not None and not isinstance(name, str):
            return self._add(None, name, aliases)
        return lambda item: self._add(name, item, aliases)

    def get(self, name: str) -> T:
        """Return the item registered under `name`. Raises a RegistryError that suggests the nearest name."""
        entry = self._entries[self.canonical(name).lower()]
        if entry.value is None:
            entry.value = resolve_name(entry.source)
        return cast(T, entry.value)

    def canonical(self, name: str) -> str:
        """Return the registered spelling of a name or alias without an import. Raises as `get` does."""
        if not isinstance(name, str):
            raise RegistryError(f"{self._at}the name of a {self.kind} is text, got {name!r}.")
        key = self._resolved(name)
        if key in self._entries:
            return self._entries[key].name
        for pattern, sentence in self._gone.items():
            if fnmatch(name.lower(), pattern.lower()):
                raise RegistryError(f"{self._at}{self.kind} {name!r} is not available: {sentence}")
        close = nearest(name, [*self.names(), *self._aliases])
        guess = f" Did you mean {close}?" if close else ""
        known = ", ".join(self.names()) or "none"
        raise RegistryError(f"{self._at}unknown {self.kind} {name!r}.{guess} Known: {known}.")

    def names(self) -> list[str]:
        """Return all names as they were registered, sorted, without aliases."""
        return sorted((entry.name for entry in self._entries.values()), key=str.lower)

    def aliases(self) -> list[str]:
        """Return the other names that `get` understands, sorted."""
        return sorted(self._aliases, key=str.lower)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._resolved(name) in self._entries

    def _resolved(self, name: str) -> str:
        aliases = {alias.lower(): target.lower() for alias, target in self._aliases.items()}
        return aliases.get(name.lower(), name.lower())

    def _add(self, given: str | None, item: Any, aliases: Iterable[str]) -> Any:
        self._accept(item, given)
        name = given or item.__name__
        source = f"{getattr(item, '__module__', '')}:{getattr(item, '__qualname__', repr(item))}"
        aliases = list(aliases)
        for wanted in (name, *aliases):
            taken = self._entries.get(self._resolved(wanted))
            if taken is not None and taken.source != source:
                raise RegistryError(
                    f"the {self.kind} name {wanted!r} is taken by {taken.source}; give {source} another name."
                )
        self._entries[name.lower()] = _Entry(name, source, item)
        self._aliases.update({alias: name for alias in aliases if alias.lower() != name.lower()})
        return item


def load_plugin(name: str) -> None:
    """Import a plugin once.

    Args:
        name: the path of a .py file, an entry point of the group `trlx_like.plugins`, or a dotted module.

    Raises:
        RegistryError: if it is not found or raises an exception during the import; names the plugin and the cause.
    """
    if not isinstance(name, str) or not name:
        raise RegistryError(f"a plugin is a module, a .py file or an entry point name, got {name!r}.")
    try:
        if name.endswith(".py"):
            if not Path(os.path.expanduser(name)).is_file():
                raise RegistryError(f"no such file: {Path(os.path.expanduser(name)).resolve()}.")
            import_file(Path(name))
            return
        for entry_point in importlib.metadata.entry_points(group=PLUGIN_GROUP, name=name):
            entry_point.load()
            return
        _load_module(name)
    except TrlxError as error:
        raise RegistryError(f"plugin {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise RegistryError(f"plugin {name!r} raised {type(error).__name__} on import: {error}") from error


def _load_module(name: str) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise RegistryError(
            f"no module or installed entry point {error.name!r}; for a file give its path, ending in .py."
        ) from error
