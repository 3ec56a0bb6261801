"""The sections about the model: `model`, `tokenizer`, `optimizer`, `scheduler`, `sampler` and `backend`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from trlx_like.config.problems import Says
from trlx_like.config.section import Section


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _model_source(value: Any) -> Any:
    """Known by what it offers, so that checking a file imports no transformers."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, str | type) or not (hasattr(value, "config") or hasattr(value, "to_dict")):
        raise ValueError
    return value


def _adapter(value: Any) -> Any:
    """A peft configuration becomes a mapping of the options that were changed, as a file would have it."""
    if value is None or (isinstance(value, Mapping) and isinstance(value.get("peft_type"), str)):
        return value
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or not hasattr(value, "peft_type"):
        raise ValueError
    changed = {}
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if field.init and given != made and field.name != "peft_version":
            changed[field.name] = sorted(given) if isinstance(given, set) else getattr(given, "value", given)
    return {**changed, "peft_type": getattr(value.peft_type, "value", value.peft_type)}


def _tokenizer_source(value: Any) -> Any:
    if isinstance(value, str) and value.strip() or value is None or hasattr(value, "encode"):
        return value
    raise ValueError


PathText = Annotated[str, BeforeValidator(_as_text)]
"""Text that may be given as a `Path`."""


class ModelConfig(Section):
    """The section `model`."""

    section: ClassVar[str] = "model"

    model_path: Annotated[
        Any,
        BeforeValidator(_as_text),
        AfterValidator(_model_source),
        Says("a folder, a hub name, a PretrainedConfig or a loaded model"),
        WithJsonSchema({"type": "string"}),
    ]
    """Folder or hub name of the model, a PretrainedConfig (random weights), or a loaded model."""
    model_arch_type: Literal["causal", "seq2seq", "diffusion"] = "causal"
    """Decoder only, encoder and decoder, or a pipeline of diffusers that makes images."""
    num_layers_unfrozen: int = Field(default=-1, ge=-1)
    """Top layers that are trained (of the decoder, if there is an encoder); -1: the whole model, 0: heads only."""
    ref_model_path: PathText | None = None
    """Folder or hub name of the reference model of the KL penalty; null: the model before training."""
    peft_config: Annotated[
        Any,
        AfterValidator(_adapter),
        Says("a peft configuration, a mapping of its options with peft_type, or null"),
        WithJsonSchema({"type": ["object", "null"], "required": ["peft_type"]}),
    ] = None
    """Adapter (LoRA) to train in place of the model: a peft configuration, or a mapping of its options; null: none."""
    model_extra_configs: dict[str, Any] = {}
    """Further keyword arguments of `from_pretrained` or `from_config`."""

    def inert(self) -> list[str]:
        both = self.peft_config is not None and self.changed("num_layers_unfrozen")
        return ["num_layers_unfrozen"] if both else []


class TokenizerConfig(Section):
    """The section `tokenizer`."""

    section: ClassVar[str] = "tokenizer"

    tokenizer_path: Annotated[
        Any,
        BeforeValidator(_as_text),
        AfterValidator(_tokenizer_source),
        Says("a folder, a hub name, a loaded tokenizer or null"),
        WithJsonSchema({"type": ["string", "null"]}),
    ] = None
    """Folder or hub name of the tokenizer, or a loaded one; null: that of the model."""
    padding_side: Literal["left", "right"] = "left"
    """Padding side of the exported tokenizer; in training prompts are padded left and responses right."""
    truncation_side: Literal["left", "right"] = "right"
    """Side from which a prompt that is too long loses tokens."""
    tokenizer_extra_configs: dict[str, Any] = {}
    """Further keyword arguments of `from_pretrained`."""
    chat_template: PathText | None = None
    """Jinja template that writes messages, or a file with it; null: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """What the template is told with every conversation, such as tools or enable_thinking; a row's own come first."""


def _optimizer_kwargs(values: dict[str, Any]) -> dict[str, Any]:
    """trlX's Adam; other optimisers do not take its betas."""
    adam = {"betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 1.0e-6}
    return {"lr": 3.0e-5, **(adam if values.get("name", "").lower().startswith("adam") else {})}


class OptimizerConfig(Section):
    """The section `optimizer`."""

    section: ClassVar[str] = "optimizer"

    name: str = "adamw"
    """Registered name of the optimiser."""
    kwargs: dict[str, Any] = Field(default_factory=_optimizer_kwargs)
    """Its keyword arguments."""


class SchedulerConfig(Section):
    """The section `scheduler`."""

    section: ClassVar[str] = "scheduler"

    name: str = "constant"
    """Registered name of the learning-rate schedule."""
    kwargs: dict[str, Any] = {}
    """Its keyword arguments."""


class SamplerConfig(Section):
    """The section `sampler`: how text is generated during training."""

    section: ClassVar[str] = "sampler"

    engine: str = "transformers"
    """Registered name of the engine that generates: the model itself, or a copy of it."""
    kwargs: dict[str, Any] = {}
    """Options of the engine; of copy: dtype, the format of its weights."""
    batch_size: int | None = Field(default=None, ge=1)
    """Rows generated at once; null: all that are asked for."""


class BackendConfig(Section):
    """The section `backend`: numbers, devices and threads."""

    section: ClassVar[str] = "backend"

    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Number format of the forward pass; "no": that of the weights. In fp16 gradients are scaled, on a CPU too."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, for less memory."""
    device: Literal["auto", "cpu"] = "auto"
    """Where to train; auto: a CUDA device if there is one. Apple's GPUs are not used: they have no float64."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads a process; null: as torch chooses."""
