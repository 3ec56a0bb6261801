"""Read YAML into plain values that remember their file and line, and write values as YAML.

Read as YAML 1.2: `1e-5` is a number, only `true` and `false` are booleans, dates are text. Tags and a key
given twice are refused. Left out on purpose: anything but mappings, lists, text, numbers, booleans and null.

It is built on PyYAML, which transformers depends on. ruamel.yaml would be one more dependency, stops at the first
repeated key, converts dates and keeps unknown tags, so most of the code below would still be needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trlx_like.config.problems import Problem, shown
from trlx_like.errors import ConfigError
from trlx_like.reading import packaged_text, read_bytes, unwritable, why_unreadable
from trlx_like.redact import HIDDEN, leaves

LARGEST = 250_000
"""Most bytes of a configuration file. PyYAML needs seconds for that many."""
MOST_VALUES = 20_000
"""Most values of a configuration, aliases written out. A few lines of nested aliases can stand for billions."""
DEEPEST = 50
"""Most levels of mappings and lists in each other."""

_TAG = "tag:yaml.org,2002:"
_RESOLVERS = (
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("int", re.compile(r"(?:[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)$"), "-+0123456789"),
    ("float", re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"), "-+.0123456789"),
    ("float", re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"), "-+."),
    ("merge", re.compile(r"<<$"), "<"),
)

_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)),
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan").lower()),
}
"""The value of a scalar by its tag. They raise ValueError or KeyError if the text does not fit it."""

RUN_CODE = ("trust_remote_code", "allow_all_kernels", "custom_pipeline")
"""Options of transformers and diffusers that let a model bring code of its own."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}
    nodes = level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Count nodes and levels while they are read, so that a file that has too many ends soon."""
        self.nodes, self.level = self.nodes + 1, self.level + 1
        if self.nodes > MOST_VALUES:
            raise yaml.YAMLError(f"it has more than {MOST_VALUES:,} values")
        if self.level > DEEPEST:
            raise yaml.YAMLError(f"it has more than {DEEPEST} levels of mappings and lists")
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


class _Dumper(yaml.SafeDumper):
    # Has YAML 1.1's resolvers as well, so that "no" is quoted and other readers see text too.
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represented(dumper: _Dumper, text: str) -> yaml.Node:
    """Quote text with unusual characters: only double quotes preserve line ends such as U+0085."""
    return dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represented)
for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, list(_first))


class YamlSource:
    """Read the values of a YAML file, and apply the overrides of a command line.

    `problems` holds mistakes in the text itself, such as a repeated key. The rest of the file can still be checked.
    """

    def __init__(self, file: str | Path) -> None:
        """Raises `ConfigError` if there is no such file, or it is not a YAML mapping."""
        self.problems: list[Problem] = []
        self._places: dict[tuple[Any, ...], tuple[str, int]] = {}
        self._name = str(file)
        self._left = MOST_VALUES
        node = _compose(_text(Path(file), self._name), self._name)
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{self._name}: must be a mapping of sections (model, train, method, ...).")
        self._places[()] = (self._name, 0)
        self.values: dict[str, Any] = self._value(node, (), self._name)

    def override(self, text: str) -> None:
        """Override a value, given as `dotted.key=YAML value`. Raises `ConfigError` if the text has another form."""
        key, equals, value = text.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            raise ConfigError(f"--set {text}: must be key=value, for example train.seed=1.")
        parent = self.values
        for depth, name in enumerate(path[:-1], start=1):
            if parent.get(name) is None:
                parent[name] = {}
                self._places[path[:depth]] = ("--set", 0)
            parent = parent[name]
            if not isinstance(parent, dict):
                raise ConfigError(f"--set {text}: {'.'.join(path[:depth])} is not a mapping.")
        self.problems = [problem for problem in self.problems if problem.path[: len(path)] != path]
        self._places = {place: at for place, at in self._places.items() if place[: len(path)] != path}
        self._places[path] = ("--set", 0)
        node = _compose(value, f"--set {text}")
        parent[path[-1]] = None if node is None else self._value(node, path, "--set")

    def not_saved(self) -> Iterator[Problem]:
        """Yield the values that stand for objects and secrets, which `as_yaml` does not write."""
        for path, value in leaves(self.values):
            if isinstance(value, str) and value.startswith("<object ") and value.endswith(">"):
                yield Problem(path, f"{value} was given from Python and is not in this file; set {path[-1]} again.")
            elif isinstance(value, str) and HIDDEN in value and not (path[0] == "data" and len(path) > 2):
                yield Problem(path, "is a secret that is not in this file: set it again with --set, or take it out.")

    def code_of_models(self) -> Iterator[Problem]:
        """Yield the options that let a model run code of its own, unless they come from the command line."""
        for path, value in leaves(self.values):
            if path and path[-1] in RUN_CODE and value not in (None, False) and self._place(path)[0] != "--set":
                yield Problem(
                    path,
                    "runs code that comes with the model, so it is not taken from a file. If you trust the model's "
                    f"author, add to the command: --set {'.'.join(map(str, path))}={str(value).lower()}",
                )

    def located(self, problems: Iterable[Problem]) -> str:
        """Return one line for each problem, in the order of the file: `file.yml:12: train.seed: ...`."""
        lines = []
        for problem in problems:
            name, line = self._place(problem.path)
            lines.append((line, f"{name}:{line}: {problem}" if line else f"{name}: {problem}"))
        return "\n".join(text for _, text in sorted(lines, key=lambda item: item[0]))

    def _place(self, path: tuple[Any, ...]) -> tuple[str, int]:
        """Return the file and line of a key, or of what it is in."""
        return next(self._places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._places)

    def _value(self, node: yaml.Node, path: tuple[Any, ...], name: str, above: tuple[int, ...] = ()) -> Any:
        """Return the plain value of a node; `above` has the ids of the nodes around it."""
        if id(node) in above:
            self._problem(path, node, name, "contains itself.")
            return None
        self._left -= 1
        if self._left < 0:
            raise ConfigError(f"{self._name}: it has more than {MOST_VALUES:,} values, aliases written out.")
        above = (*above, id(node))
        tag = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and tag == "map":
            return self._mapping(node, path, name, above)
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            return [self._value(item, (*path, i), name, above) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            if why := "the character NUL is not text" if "\0" in node.value else unwritable(node.value):
                self._problem(path, node, name, f"{why}.")
                return None
            try:
                return _SCALARS[tag](node.value)
            except KeyError:
                pass
            except ValueError:
                self._problem(path, node, name, f"{shown(node.value)} is not of the type {tag} that it is tagged with.")
                return None
        self._problem(path, node, name, f"the YAML tag {_short(node.tag)} is not allowed; write a plain value.")
        return None

    def _mapping(self, node: yaml.MappingNode, path: tuple[Any, ...], name: str, above: tuple[int, ...]) -> Any:
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                several = isinstance(value_node, yaml.SequenceNode)
                for part in reversed(value_node.value) if several else [value_node]:
                    values = self._value(part, path, name, above)
                    if isinstance(values, dict):
                        merged.update(values)
                    else:
                        self._problem(path, part, name, f"<< merges mappings, not {shown(values)}.")
                continue
            key = self._value(key_node, path, name, above)
            if isinstance(key, dict | list):
                self._problem(path, key_node, name, "a key must be text.")
                continue
            if key in own:
                self._problem((*path, key), key_node, name, f"given twice, first on line {lines[key]}.")
            lines.setdefault(key, line)
            self._places[(*path, key)] = (name, 0 if name == "--set" else line)
            own[key] = self._value(value_node, (*path, key), name, above)
        return {**merged, **own}

    def _problem(self, path: tuple[Any, ...], node: yaml.Node, name: str, sentence: str) -> None:
        self._places[path] = (name, 0 if name == "--set" else node.start_mark.line + 1)
        self.problems.append(Problem(path, sentence))


@cache
def packaged(file: str) -> Any:
    """Read a table of this package, which is a YAML file: its path in the package."""
    return yaml.safe_load(packaged_text(file))


def as_yaml(values: Mapping[str, Any]) -> str:
    """Return values as YAML that reads back equal; an object becomes a note, which `not_saved` finds."""
    return str(yaml.dump(plain(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def plain(value: Any) -> Any:
    """Return values with mappings, lists, text, numbers, booleans and null alone; other objects become notes."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, Path):
        return str(value)
    where = getattr(value, "name_or_path", "")
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"<object {name} of {where}>" if isinstance(where, str) and where else f"<object {name}>"


def _text(file: Path, name: str) -> str:
    try:
        return read_bytes(file, LARGEST).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {why_unreadable(error)}.") from None


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and not name.startswith("--set") else ""
        raise ConfigError(f"{name}{line}: is not valid YAML: {error.problem or error.context}.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{name}: is not valid YAML: {str(error).splitlines()[0].rstrip('.')}.") from None


def _short(tag: str) -> str:
    return "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag
