"""Nested state as two files, without pickle: the structure in `<path>.json`, tensors in `<path>.safetensors`.

Loaded values are equal bit by bit, NaN payloads included, and have the same types. What cannot be stored like this
(sets, open files, objects) is refused, with its place in the state. Left out on purpose: devices (tensors are loaded to
the CPU), `requires_grad`, and memory layout.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trlx_like.checkpoint.ranges import SavedRanges, save_ranges
from trlx_like.errors import CheckpointError, raised_as
from trlx_like.functional.parts import Part, Saved
from trlx_like.reading import unwritable
from trlx_like.redact import leaves

FORMAT = "trlx_like.tree"
VERSION = 1
_TAG = "!"  # the key that marks a JSON object as an encoded value of another type
_MAX_DEPTH = 100
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_MAPPING_NAMES = {kind: name for name, kind in _MAPPINGS.items()}

# Stored as they are. Other dtypes are stored as bytes, since older releases of safetensors do not know them.
_NATIVE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
_NUMPY_KINDS = "biufcUSMm"  # all but objects (O) and records (V)

# What the libraries raise for nodes that are never written: numpy parses the name of a dtype as Python.
_DAMAGE = (
    *(OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError),
    *(ArithmeticError, SyntaxError, struct.error),
)

Place = tuple[str, ...]


def save_tree(tree: Any, path: Path, rank: int = 0, *, main: bool = True) -> None:
    """Write a nested state to `<path>.safetensors` and `<path>.json`, and divided tensors as `ranges.py` says.

    Args:
        tree: Dicts (also OrderedDict and Counter) with str or int keys, lists, tuples, None, bool, int, float, str,
            dense tensors of any dtype, `Part`s of tensors, numpy arrays and scalars. Tensors that share their memory
            are written once, and are loaded as one tensor.
        path: The path without suffix.
        rank: The number of this process, for its ranges of divided tensors.
        main: Whether this process writes what is not divided.

    Raises:
        CheckpointError: If the state contains anything else, with its dotted place, or the disk refuses.
    """
    writer = _Writer()
    document = {"format": FORMAT, "version": VERSION, "tree": writer.encode(tree, ())}
    structure, tensors = _files(path)
    with raised_as(CheckpointError, (OSError, SafetensorError), f"{path} cannot be written"):
        if writer.parts:
            save_ranges(writer.parts, path, rank)
        if main:
            save_file(writer.tensors, tensors)
            structure.write_text(json.dumps(document, allow_nan=False), encoding="ascii")


def tree_bytes(tree: Any) -> int:
    """Return the number of bytes that the tensors and arrays of a nested state hold."""
    values = [value for _, value in leaves(tree)]
    divided = sum(part.values.element_size() * math.prod(part.shape) for part in values if isinstance(part, Part))
    return divided + sum(int(value.nbytes) for value in values if isinstance(value, (Tensor, np.ndarray)))


def load_tree(path: Path, *, parts: bool = False) -> Any:
    """Read the nested state that `save_tree` wrote on any number of processes.

    Args:
        path: The path without suffix.
        parts: Return a `Saved` in place of a divided tensor, so that each process reads what it needs.

    Returns:
        The state, with tensors on the CPU.

    Raises:
        CheckpointError: If files are missing or damaged.
    """
    structure, tensors = _files(path)
    for file in (structure, tensors):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing.")
    try:
        document = json.loads(structure.read_bytes())
        if document["format"] != FORMAT or document["version"] != VERSION:
            found = f"{document['format']!r}, version {document['version']!r}"
            raise CheckpointError(f"{structure} is {found}; this release reads {FORMAT!r}, version {VERSION}.")
        # Clones: what is loaded are views of the file, which may be deleted while they are in use.
        held = {name: value.clone() for name, value in load_file(tensors).items()}
        return _Reader(held, SavedRanges(path), parts).decode(document["tree"])
    except CheckpointError:
        raise
    except _DAMAGE as error:
        raise CheckpointError(f"{structure} or {tensors.name} is damaged: {error!r}") from error


def _files(path: Path) -> tuple[Path, Path]:
    """Return the paths of structure and tensors."""
    return path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.safetensors")


class _Writer:
    """Converts a state to what JSON can hold, and collects its tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parts: dict[str, Part] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, place: Place) -> Any:
        """Convert one value to JSON."""
        if len(place) > _MAX_DEPTH:
            raise _refusal(place[:5], f"is nested deeper than {_MAX_DEPTH}, or contains itself")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in (int, float, str):
            return _encode_scalar(value)
        if kind in (list, tuple):
            items = [self.encode(item, (*place, str(row))) for row, item in enumerate(value)]
            return items if kind is list else {_TAG: "tuple", "items": items}
        if kind in _MAPPING_NAMES:
            return self._encode_mapping(value, place)
        if kind in (Tensor, nn.Parameter):
            return self._encode_tensor(value, place)
        if kind is Part:
            return self._encode_part(value, place)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._encode_array(value, place)
        raise _refusal(place, f"is a {kind.__module__}.{kind.__qualname__}")

    def _encode_mapping(self, value: dict[Any, Any], place: Place) -> Any:
        """Convert a dictionary, as a plain JSON object if that keeps everything."""
        for key in value:
            if type(key) not in (str, int):
                raise _refusal(place, f"has the key {key!r} of type {type(key).__qualname__}, not str or int")
        items = {key: self.encode(item, (*place, str(key))) for key, item in value.items()}
        # A plain JSON object is enough if all keys are text that JSON preserves.
        if type(value) is dict and all(type(key) is str and key != _TAG and not unwritable(key) for key in items):
            return items
        pairs = [[_encode_scalar(key), item] for key, item in items.items()]
        return {_TAG: _MAPPING_NAMES[type(value)], "items": pairs}

    def _encode_tensor(self, value: Tensor, place: Place) -> Any:
        """Collect a tensor, once if it occurs several times, and return a reference to it."""
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            kind = f"{value.layout}, {value.dtype}, {value.device}"
            raise _refusal(place, f"is a tensor that is not dense ({kind})")
        same: tuple[Any, ...] = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        same = (*same, value.is_conj(), value.is_neg())
        name = self._names.get(same) if value.numel() else None
        if name is None:
            name = self._names[same] = self._hold(value)
        node: dict[str, Any] = {_TAG: "tensor", "name": name}
        if value.dtype not in _NATIVE:
            node |= {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        return node

    def _encode_part(self, value: Part, place: Place) -> Any:
        """Collect this process's part of a tensor, and return a reference to the whole one."""
        if value.values.dtype not in _NATIVE:
            raise _refusal(place, f"is a divided tensor of {value.values.dtype}")
        name = str(len(self.parts))
        self.parts[name] = value
        dtype = str(value.values.dtype).removeprefix("torch.")
        return {_TAG: "part", "name": name, "shape": list(value.shape), "dtype": dtype}

    def _hold(self, value: Tensor) -> str:
        """Collect a dense copy on the CPU with memory of its own, as safetensors demands, and return its name."""
        data = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if data.untyped_storage().data_ptr() in self._storages:
            data = data.clone()
        if data.dtype not in _NATIVE:
            # With at most one element any stride counts as contiguous, but only a copy can be viewed as bytes.
            data = data.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        self._storages.add(data.untyped_storage().data_ptr())
        name = str(len(self.tensors))
        self.tensors[name] = data
        return name

    def _encode_array(self, value: Any, place: Place) -> Any:
        """Collect a numpy array or scalar as bytes, and return a reference to it."""
        array = np.asarray(value)
        if array.dtype.kind not in _NUMPY_KINDS or array.dtype.metadata:
            raise _refusal(place, f"is a numpy {type(value).__qualname__} of dtype {array.dtype}")
        data = torch.from_numpy(np.frombuffer(array.tobytes(), dtype=np.uint8).copy())
        node = {_TAG: "numpy", "name": self._hold(data), "dtype": array.dtype.str, "shape": list(array.shape)}
        return node if isinstance(value, np.ndarray) else {**node, "scalar": True}


def _refusal(place: Place, what: str) -> CheckpointError:
    """Make the error for a value that cannot be stored."""
    return CheckpointError(
        f"{'.'.join(place) or 'the state'} {what}: a checkpoint holds None, bool, int, float, str, dense "
        "tensors, numpy arrays, and lists, tuples and dicts of these."
    )


def _encode_scalar(value: float | str) -> Any:
    """Convert a number or text to JSON, in a tagged form if JSON would not preserve it."""
    if isinstance(value, str):  # two lone surrogates, for one, would be read as one character
        return value if not unwritable(value) else {_TAG: "str", "utf8": value.encode("utf-8", "surrogatepass").hex()}
    if isinstance(value, int):
        # Many JSON readers round integers beyond 64 bits, and Python's refuses more than 4300 digits.
        return value if -(2**63) <= value < 2**63 else {_TAG: "int", "hex": hex(value)}
    return value if math.isfinite(value) else {_TAG: "float", "bits": struct.pack(">d", value).hex()}


class _Reader:
    """The inverse of `_Writer`. Nodes that it never writes raise LookupError, TypeError or ValueError."""

    def __init__(self, tensors: dict[str, Tensor], ranges: SavedRanges, parts: bool) -> None:
        self.tensors, self.ranges, self.parts = tensors, ranges, parts
        self._by_tag: dict[str, Callable[[dict[str, Any]], Any]] = {
            "int": lambda node: int(node["hex"], 16),
            "float": lambda node: struct.unpack(">d", bytes.fromhex(node["bits"]))[0],
            "str": lambda node: bytes.fromhex(node["utf8"]).decode("utf-8", "surrogatepass"),
            "tuple": lambda node: tuple(self.decode(item) for item in node["items"]),
            "tensor": self._decode_tensor,
            "part": self._decode_part,
            "numpy": self._decode_array,
            **dict.fromkeys(_MAPPINGS, self._decode_mapping),
        }

    def decode(self, node: Any) -> Any:
        """Convert one JSON node back to its value."""
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if _TAG not in node:
            return {key: self.decode(item) for key, item in node.items()}
        return self._by_tag[node[_TAG]](node)

    def _decode_mapping(self, node: dict[str, Any]) -> Any:
        """Convert a tagged mapping."""
        mapping = _MAPPINGS[node[_TAG]]()
        for key, item in node["items"]:
            mapping[self.decode(key)] = self.decode(item)
        return mapping

    def _decode_tensor(self, node: dict[str, Any]) -> Tensor:
        """Look up a tensor and restore its dtype."""
        tensor = self.tensors[node["name"]]
        if "dtype" not in node:
            return tensor
        dtype = getattr(torch, node["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this release of torch has no dtype {node['dtype']!r}")
        return tensor.view(dtype).reshape(node["shape"])

    def _decode_part(self, node: dict[str, Any]) -> Any:
        """Read a divided tensor, or return how it is read."""
        name, shape, dtype = node["name"], tuple(map(int, node["shape"])), getattr(torch, node["dtype"])
        if dtype not in _NATIVE:
            raise ValueError(f"dtype {node['dtype']!r} is never written")
        saved = Saved(shape, partial(self.ranges.read, name, shape, dtype=dtype))
        return saved if self.parts else saved.read(0, math.prod(shape)).view(shape)

    def _decode_array(self, node: dict[str, Any]) -> Any:
        """Look up a numpy array or scalar and restore its dtype."""
        dtype = np.dtype(node["dtype"])
        if dtype.kind not in _NUMPY_KINDS:
            raise ValueError(f"numpy dtype {node['dtype']!r} is never written")
        array = self.tensors[node["name"]].numpy().view(dtype).reshape(node["shape"])
        return array[()] if node.get("scalar") else array
