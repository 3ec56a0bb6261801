"""Makes the trainer of a run with random weights and without its data, to see what the run would take."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from trlx_like.check import never_called
from trlx_like.config import TRAINERS, TRLConfig
from trlx_like.errors import ConfigError
from trlx_like.imports import is_python_name
from trlx_like.models.sources import UNTRUSTED, loadable

LIKE_RUNS = ("transformers", "copy")
"""Engines that a rehearsal uses as they are. Others need a server, or memory with values, and are replaced."""
DATA = {
    "prompts": ["a", "a"],  # two, as a permutation of tensors without values is all ones
    "samples": [("a", "a")],
    "rewards": [1.0],
    "preferences": [{"prompt": "a", "chosen": "a", "rejected": "aa"}],
}


def make_rehearsal(config: TRLConfig, folder: str, gpus: int = 1) -> Any:
    """Make the trainer of a run with random weights and without its data; one process of several.

    Args:
        config: The complete configuration.
        folder: An empty folder, in place of that of the run.
        gpus: Number of processes.
    """
    train = config.train
    local = math.ceil(train.batch_size / gpus)
    minibatch = min(train.minibatch_size or local, local)
    own: dict[str, Any] = {"batch_size": local, "minibatch_size": minibatch}
    changes: dict[str, Any] = {"train": own, "model": {"quantization": None}}
    totals = {name: getattr(config.method, name, None) for name in ("num_rollouts", "num_prompts")}
    changes["method"] = {name: max(1, total // gpus) for name, total in totals.items() if total is not None}
    if (images := getattr(config.method, "num_samples", None)) is not None:
        group: int = config.method.num_generations  # type: ignore[attr-defined]
        changes["method"]["num_samples"] = group * max(1, images // group // gpus)
        steps: int = config.method.num_inference_steps  # type: ignore[attr-defined]
        changes["method"]["num_inference_steps"] = min(2, steps)  # one after the other they take no more memory
    if getattr(config.method, "formatting_func", None) is not None:
        changes["method"]["formatting_func"] = None
    changed = config.elsewhere(folder).evolve(**changes)
    if changed.sampler.engine.lower() not in LIKE_RUNS:
        changed.sampler.engine, changed.sampler.kwargs = "transformers", {}
    changed.backend = config.backend.undivided()
    changed.backend.device = "cpu"  # tensors without memory know one device
    for option in ("model_path", "ref_model_path"):
        setattr(changed.model, option, _shapes(getattr(config.model, option), config, f"model.{option}"))
    texts = {"tokenizer": _tokenizer()}
    if config.model.model_arch_type == "diffusion":  # a pipeline in memory is used in the format that it has
        changed.model.dtype, texts = type(config.model).model_fields["dtype"].default, {}
    kind: Any = TRAINERS.get(train.trainer)
    needs = " ".join(kind.needs)
    data = {name: rows for name, rows in DATA.items() if name in kind.uses}
    functions = {"reward_fn": never_called} if "reward_fn" in needs else {}
    trainer = kind(changed, **texts, **functions, **train.trainer_kwargs, **data)
    trainer.model.compaction = None  # prompts of a rehearsal are equal, those of a run may all differ
    return trainer


def _shapes(path: Any, config: TRLConfig, option: str) -> Any:
    """Return a model's configuration in place of its weights, or a pipeline with random ones; None stays None."""
    if path is not None and is_python_name(path):
        raise ConfigError(f"estimate: {option} ({path}) is a function; name a folder with a config.json.")
    if path is not None and config.model.model_arch_type == "diffusion":
        return _pipeline(path, option).to(getattr(torch, config.model.dtype))
    if path is None or not isinstance(path, str):
        return getattr(path, "config", path)
    with loadable(path, option, "model.model_extra_configs"):
        return AutoConfig.from_pretrained(path, **UNTRUSTED)


def _pipeline(given: Any, option: str) -> Any:
    """Make a pipeline of diffusers from the configurations of its parts, whose weights are random.

    Args:
        given: The pipeline, or its folder or hub name.
        option: The option that names it.
    """
    from diffusers import DiffusionPipeline, pipelines

    held: dict[str, Any] = getattr(given, "components", {})
    with loadable(given, option, "model.model_extra_configs"):
        index: Any = given.config if held else DiffusionPipeline.load_config(given)
        parts: dict[str, Any] = {name: value for name, value in index.items() if name[0] != "_"}
        for name, value in parts.items():
            if not isinstance(value, list | tuple):
                continue  # an argument of the pipeline
            library, of = value
            if of is None:
                parts[name] = None
                continue
            own: Any = held.get(name)
            kind: Any = type(own) if held else getattr(getattr(pipelines, library, None) or import_module(library), of)
            if issubclass(kind, PreTrainedModel):
                parts[name] = kind(own.config if held else kind.config_class.from_pretrained(given, subfolder=name))
            elif issubclass(kind, nn.Module):
                parts[name] = kind.from_config(own.config if held else kind.load_config(given, subfolder=name))
            else:  # a scheduler or a tokenizer
                parts[name] = own if held else kind.from_pretrained(given, subfolder=name)
    made: Any = type(given) if held else getattr(import_module("diffusers"), index["_class_name"])
    return made(**parts)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of three tokens: text is not looked at, only the length of sequences."""
    vocabulary = {"<eos>": 0, "a": 1, "<pad>": 2}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="a", pad_token="<pad>")
