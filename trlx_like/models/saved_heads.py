"""Finds the weights of heads that were saved beside a language model, in a folder or a repository of the hub.

Here they are in a file of their own. TRL and trlX write them among the weights of the model, as `v_head.<name>` and
`ilql_heads.<name>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.modeling_utils import load_state_dict
from transformers.utils.hub import cached_file

from trlx_like.errors import ConfigError
from trlx_like.models.sources import UNLOADABLE, reason

HEADS_FILE = "heads.safetensors"
"""The file with the heads in the folder of an exported model, separate so that plain transformers can load the model.
"""
WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Options of `from_pretrained` that say where a model's files are."""

_MODEL_FILES = ("model.safetensors", "pytorch_model.bin")

_OWN = {
    r"v_head\.(?=summary\.|layers\.)": "heads.value.",
    r"v_head\.(?=\d\.)": "heads.value.layers.",
    r"ilql_heads\.v_head\.": "heads.ilql.value.layers.",
    r"ilql_heads\.q_heads\.(\d)\.": r"heads.ilql.qs.\1.layers.",
    r"ilql_heads\.target_q_heads\.(\d)\.": r"heads.ilql.targets.\1.layers.",
}
"""Beginnings of the names of heads in TRL (`summary`) and trlX, and those in `HEADS_FILE`."""


def read_heads(path: str | Path, prefix: str, where: Mapping[str, Any] | None = None) -> tuple[dict[str, Tensor], str]:
    """Read the weights of the heads that were saved with a model.

    Args:
        path: A folder or hub name.
        prefix: Beginning of the names of heads among the weights of a model, such as "v_head.".
        where: Options of `from_pretrained`; those in `WHERE` are followed.

    Returns:
        The weights with the names that they have in `HEADS_FILE`, and the name of the file. Without heads, no weights.

    Raises:
        ConfigError: If the file cannot be read.
    """
    known = {name: value for name, value in (where or {}).items() if name in WHERE and value is not None}

    def find(name: str) -> str | None:
        quiet = ("missing_entries", "connection_errors", "gated_repo")
        return cached_file(str(path), name, **known, **{f"_raise_exceptions_for_{kind}": False for kind in quiet})

    found = find(HEADS_FILE)
    if found is not None:
        return _read(found, ""), found
    for name in _MODEL_FILES:
        files = _shards(find, name, prefix)
        if weights := {_own_name(head): value for file in files for head, value in _read(file, prefix).items()}:
            return weights, files[0]
    return {}, ""


def read_weights(folder: str | Path, files: Sequence[str] = _MODEL_FILES) -> dict[str, Tensor]:
    """Read all weights of a folder, with the names that they have in its files. There are none without such files.

    Args:
        folder: The folder.
        files: Names of the files that may hold them; the first one that is there is read, or its shards.

    Raises:
        ConfigError: If a file cannot be read.
    """

    def find(name: str) -> str | None:
        return str(file) if (file := Path(folder) / name).is_file() else None

    for name in files:
        if shards := _shards(find, name, ""):
            return {weight: value for file in shards for weight, value in _read(file, "").items()}
    return {}


def _own_name(name: str) -> str:
    for theirs, own in _OWN.items():
        if re.match(theirs, name):
            return re.sub(theirs, own, name, count=1)
    return name


def _shards(find: Callable[[str], str | None], name: str, prefix: str) -> list[str]:
    """Return the file of a model's weights, or those of its shards that hold heads."""
    index = find(f"{name}.index.json")
    names = {name}
    if index is not None:
        places: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        names = {file for weight, file in places.items() if weight.startswith(prefix)}
    return [file for name in sorted(names) if (file := find(name)) is not None]


def _read(file: str, prefix: str) -> dict[str, Tensor]:
    """Read the weights whose names begin with `prefix`."""
    try:
        return {name: value for name, value in load_state_dict(file).items() if name.startswith(prefix)}
    except UNLOADABLE as error:
        raise ConfigError(f"The heads in {file} cannot be read: {reason(error)}.") from error
