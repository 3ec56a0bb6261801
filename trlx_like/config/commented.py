"""Configurations as YAML with a comment on every option, as `trlx-like show-config` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trlx_like.config.schema import meanings
from trlx_like.config.section import Section
from trlx_like.config.trl import TRLConfig
from trlx_like.config.yaml_source import YamlSource, as_yaml
from trlx_like.errors import ConfigError
from trlx_like.imports import is_python_name
from trlx_like.redact import leaves, redacted


def commented(config: TRLConfig) -> str:
    """Return a configuration as YAML, each option below a comment with its meaning, without secrets."""
    return "\n".join(_lines(config)).strip()


def _lines(config: TRLConfig) -> Iterator[str]:
    docs: dict[str, str] = {}
    for line in as_yaml(config.recorded()).split("\n"):
        section, option = re.match(r"(\w+):", line), re.match(r"  (\w+):", line)
        if section:
            value = getattr(config, section[1])
            docs = meanings(type(value)) if isinstance(value, Section) else {}
            yield from ["", f"# {meanings(TRLConfig).get(section[1], '')}"]
        elif option and option[1] in docs:
            yield f"  # {docs[option[1]]}"
        yield line


def read_only(file: str | Path, overrides: Sequence[str] = ()) -> str:
    """Return a YAML file as `commented` does, without importing or running anything that it names.

    Comments at the top name the code that it refers to. If the file needs a plugin to be complete, its own text is
    returned.
    """
    source = YamlSource(file)
    for override in overrides:
        source.override(override)
    head = [f"# Names code: {option}: {name}" for option, name in _code(source.values)]
    try:
        text = commented(TRLConfig.load_yaml(file, overrides, plugins=False))
    except ConfigError as error:
        head += [f"# Not complete: {line}" for line in str(error).splitlines()]
        text = as_yaml(redacted(source.values))
    return "\n".join([*head, text])


def _code(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options that name plugins or functions, with the names; rows of data in the file are skipped."""
    for path, value in leaves(values):
        row = path[0] == "data" and len(path) > 2 and path[1] not in ("reward_fn", "judge")
        if path[0] == "plugins" or (is_python_name(value) and not row):
            yield ".".join(map(str, path)), value
