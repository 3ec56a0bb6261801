"""Turns a checkpoint of trlX into a folder that plain transformers loads, with the heads in a file of their own."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from trlx_like.errors import ConfigError
from trlx_like.models.loading import check_complete
from trlx_like.models.saved_heads import HEADS_FILE, read_heads, read_weights
from trlx_like.models.sources import no_progress_bars

_LM = "base_model."
_HEADS = {"v_head.": "WithValueHead", "ilql_heads.": "WithILQLHeads"}
_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")


def migrate_checkpoint(folder: str | Path, to: str | Path) -> list[str]:
    """Write a checkpoint of trlX as a model of transformers.

    Args:
        folder: A checkpoint, or the `hf_model` in it: weights with the names `base_model.*`, `v_head.*` and
            `ilql_heads.*`, and `config.json`; or an adapter of peft with heads beside it.
        to: The new folder; it must not exist, or be empty.

    Returns:
        A line for each thing that was changed or lost.

    Raises:
        ConfigError: If it is no checkpoint of trlX, weights of the model are missing, or `to` holds something.
    """
    source, target = Path(folder), Path(to)
    if not source.exists():
        raise ConfigError(f"{folder}: there is no such file or folder.")
    if source.is_file():
        source = source.parent
    if not _holds_model(source) and _holds_model(source / "hf_model"):
        source = source / "hf_model"
    if not _holds_model(source):
        raise ConfigError(f"{folder}: there is no config.json or adapter_config.json, and no hf_model with one.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--to {to}: there is something already; give a new folder.")
    weights = read_weights(source)
    adapter = read_weights(source, _ADAPTER)
    if not adapter and not any(name.startswith(_LM) for name in weights):
        raise ConfigError(
            f"{folder}: no weight is named {_LM}*. If transformers loads it, name it as model.model_path."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    notes = _write_adapter(source, adapter, target) if adapter else _write_model(source, weights, target)
    notes += _write_heads(source, weights, target)
    others = sorted(
        {name.partition(".")[0] for name in weights if not name.startswith((_LM, *_HEADS))} - {"frozen_head"}
    )
    if others and not adapter:
        notes.append(f"dropped {', '.join(others)} (not a part of trlX's models)")
    if any(name.startswith("frozen_head.") for name in weights):
        notes.append("dropped frozen_head.* (a run makes its reference from the weights that it starts with)")
    notes.append("dropped optimizer, schedule and random numbers (pickled; a run of trlX cannot be continued)")
    return notes


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _write_model(source: Path, weights: dict[str, Tensor], target: Path) -> list[str]:
    """Write the language model and its tokenizer."""
    config: Any = AutoConfig.from_pretrained(source)
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    own = {name.removeprefix(_LM): value for name, value in weights.items() if name.startswith(_LM)}
    with no_progress_bars(), TemporaryDirectory(dir=target.parent) as folder:
        config.save_pretrained(folder)
        # Tied weights share memory, which the format of the file does not allow.
        save_file(
            {name: value.clone() for name, value in own.items()}, Path(folder, "model.safetensors"), {"format": "pt"}
        )
        lm, found = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
        check_complete(found, str(source))
        lm.save_pretrained(target)
    notes = [f"changed {_LM}* -> the names of transformers, in safetensors ({len(own)} weights, {lm.dtype})"]
    return notes + _write_tokenizer(source, target)


def _write_tokenizer(source: Path, target: Path) -> list[str]:
    if not list(source.glob("tokenizer*")):
        return ["to do: there is no tokenizer in the folder; set tokenizer.tokenizer_path"]
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return []


def _write_adapter(source: Path, adapter: dict[str, Tensor], target: Path) -> list[str]:
    """Write an adapter of peft, which has peft's names already, and its tokenizer."""
    target.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in adapter.items()}, target / _ADAPTER[0])
    (target / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    return [
        "kept the adapter, in safetensors; the model that it is for is loaded by its name",
        *_write_tokenizer(source, target),
    ]


def _write_heads(source: Path, weights: dict[str, Tensor], target: Path) -> list[str]:
    """Write the heads to a file of their own."""
    for prefix, loads in _HEADS.items():
        if not any(name.startswith(prefix) for name in weights):
            continue
        heads, _ = read_heads(source, prefix)
        if strange := [name for name in heads if not re.match(r"heads\.(value|ilql)\.", name)]:
            return [f"dropped {prefix}* ({min(strange)}: a value branch with blocks of its own has another form here)"]
        save_file({name: value.contiguous() for name, value in heads.items()}, target / HEADS_FILE)
        return [
            f"changed {prefix}* -> {HEADS_FILE}; trlx_like.AutoModelFor...{loads}.from_pretrained loads it with the "
            "model. A new run on the folder makes new heads"
        ]
    return []
