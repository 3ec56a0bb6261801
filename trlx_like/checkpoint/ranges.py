"""Tensors that are divided over processes: each writes its ranges of them, and any number of processes reads them.

Beside `<path>.json`, the structure of a state, process r writes `<path>.rank_<r>.safetensors` with the numbers that it
holds, and `<path>.rank_<r>.json` with the range of each in its flattened tensor. A reader opens the files that overlap
with what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trlx_like.errors import CheckpointError
from trlx_like.functional.parts import Part
from trlx_like.redact import leaves

FORMAT = "trlx_like.ranges"
VERSION = 1


def has_parts(tree: Any) -> bool:
    """Return whether a nested state has a tensor that is divided over processes."""
    return any(isinstance(leaf, Part) for _, leaf in leaves(tree))


def save_ranges(parts: Mapping[str, Part], path: Path, rank: int) -> None:
    """Write this process's ranges of divided tensors.

    Args:
        parts: The tensors by name, the same names on all processes.
        path: The path of the state, without suffix.
        rank: The number of this process.
    """
    own = {name: part for name, part in parts.items() if part.writes and part.values.numel()}
    place = path.with_name(f"{path.name}.rank_{rank}")
    tensors = {name: part.values.detach().cpu().contiguous().clone() for name, part in own.items()}
    save_file(tensors, place.with_name(f"{place.name}.safetensors"))
    ranges = {name: [part.begin, part.end] for name, part in own.items()}
    document = {"format": FORMAT, "version": VERSION, "ranges": ranges}
    place.with_name(f"{place.name}.json").write_text(json.dumps(document), encoding="ascii")


class SavedRanges:
    """Read tensors that `save_ranges` of all processes wrote.

    Args:
        path: The path of the state, without suffix.

    Raises:
        CheckpointError: If a file with ranges is not of this format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranges: dict[str, list[tuple[int, int, Path]]] = {}
        for file in sorted(path.parent.glob(f"{path.name}.rank_*.json")):
            document = json.loads(file.read_bytes())
            if document["format"] != FORMAT or document["version"] != VERSION:
                raise CheckpointError(f"{file} is {document['format']!r}, version {document['version']!r}.")
            for name, (begin, end) in document["ranges"].items():
                self.ranges.setdefault(name, []).append((begin, end, file.with_suffix(".safetensors")))

    def read(self, name: str, shape: Sequence[int], begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Read a range of a flattened tensor.

        Args:
            name: The name of the tensor.
            shape: The shape of the whole tensor, for the error.
            begin: The first number.
            end: The number after the last one.
            dtype: The format of the numbers.

        Returns:
            The numbers. [end - begin]

        Raises:
            CheckpointError: If some of them are in no file.
        """
        values, at = torch.empty(end - begin, dtype=dtype), begin
        for first, after, file in sorted(self.ranges.get(name, [])):
            if after <= at or first >= end:
                continue
            if first > at:
                break
            stop = min(after, end)
            with safe_open(str(file), framework="pt") as saved:
                values[at - begin : stop - begin] = saved.get_slice(name)[at - first : stop - first]
            at = stop
        if at < end:
            raise CheckpointError(
                f"{self.path}.rank_*: no file has the numbers {at} to {end} of tensor {name} of shape {list(shape)}; "
                "a file of a process is missing."
            )
        return values
