"""The sections about the model: `model`, `tokenizer`, `optimizer`, `scheduler`, `sampler` and `backend`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from trlx_like.config.problems import Accepts, Problem, at, only, shown
from trlx_like.config.resume import Applied, OfData, OfReference, OfWeights, OnResume
from trlx_like.config.section import Section


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _model_source(value: Any) -> Any:
    """Accept a name, a configuration or a model, recognised by attributes so that transformers is not imported."""
    if isinstance(value, str) and value.strip():
        return value
    if hasattr(value, "pretrained_model"):
        raise ValueError(f"is a {type(value).__name__}, and trainers make their heads; give its .pretrained_model.")
    if hasattr(value, "sd_pipeline"):
        raise ValueError(f"is a {type(value).__name__}; give its .sd_pipeline.")
    if isinstance(value, str | type) or not (hasattr(value, "config") or hasattr(value, "to_dict")):
        raise ValueError
    return value


def _adapter(value: Any) -> Any:
    """Turn a peft configuration into a mapping of the options that differ from their default."""
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


def _scheduler_source(value: Any) -> Any:
    if not isinstance(value, str) and (isinstance(value, type) or not hasattr(value, "get_last_lr")):
        raise ValueError
    if any(kind.__name__ == "ReduceLROnPlateau" for kind in type(value).__mro__):
        raise ValueError("ReduceLROnPlateau needs a metric at each step, which the loop does not pass.")
    return value


PathText = Annotated[str, BeforeValidator(_as_text)]
"""Text that may be given as a `Path`."""

ModelSource = Annotated[
    Any,
    BeforeValidator(_as_text),
    AfterValidator(_model_source),
    Accepts("a folder", "a hub name", "a PretrainedConfig", "a loaded model"),
    WithJsonSchema({"type": "string"}),
]
"""Where a model is, or the model itself."""


class ModelConfig(Section):
    """Configure the model and its adapter: the section `model`."""

    model_path: OfWeights[ModelSource]
    """Folder or hub name of the model, a PretrainedConfig (random weights), or a loaded model."""
    model_arch_type: OfWeights[Literal["causal", "seq2seq", "diffusion"]] = "causal"
    """Kind of model: causal (decoder only), seq2seq (encoder and decoder) or diffusion (a diffusers pipeline)."""
    num_layers_unfrozen: OfWeights[int] = Field(default=-1, ge=-1)
    """Number of top layers to train, counted in the decoder; -1: the whole model, 0: only the trainer's heads."""
    ref_model_path: OfReference[ModelSource | None] = None
    """Folder or hub name of the reference that the KL compares with, or a loaded model; null: the model's own start."""
    peft_config: OfWeights[
        Annotated[
            Any,
            AfterValidator(_adapter),
            Accepts("a peft configuration, a mapping of its options with peft_type, or null"),
            WithJsonSchema({"type": ["object", "null"], "required": ["peft_type"]}),
        ]
    ] = None
    """Adapter (such as LoRA) to train instead of the model's own weights, as options of peft; null: no adapter."""
    dtype: OfWeights[Literal["float32", "bfloat16", "float16", "auto"]] = "float32"
    """Number format of the weights; auto: that of the files. Weights that are trained themselves need float32."""
    quantization: OfWeights[Literal["nf4", "int8"] | None] = None
    """Format of the frozen linear layers beside an adapter, by bitsandbytes: nf4 (4 bits) or int8; null: dtype."""
    model_extra_configs: OfWeights[dict[str, Any]] = {}
    """More keyword arguments for `from_pretrained` or `from_config` of the model."""

    def conflicts(self) -> Iterator[Problem]:
        if self.ref_model_path is self.model_path and not isinstance(self.model_path, str):
            yield at("model.ref_model_path", "is the model that is trained; leave it out, or load it again.")
        for name in ("dtype", "torch_dtype"):
            if name in self.model_extra_configs:
                yield at(f"model.model_extra_configs.{name}", "has an option of its own: model.dtype.")
        if self.model_arch_type == "diffusion" and self.dtype == "auto":
            yield at("model.dtype", "'auto' is for language models; name the format.")
        if self.quantization is None:
            return
        if self.model_arch_type == "diffusion":
            yield at("model.quantization", f"{self.quantization!r} is for language models.")
        kind = self.peft_config.get("peft_type") if isinstance(self.peft_config, Mapping) else None
        if kind is not None and kind.upper() != "LORA":
            yield at("model.quantization", f"{self.quantization!r} goes with an adapter of peft_type LORA, not {kind}.")
        if "quantization_config" in self.model_extra_configs:
            yield at(
                "model.quantization", "is set, and so is model.model_extra_configs.quantization_config; leave one out."
            )

    def acting(self) -> dict[str, bool]:
        return {"num_layers_unfrozen": self.peft_config is None}


class TokenizerConfig(Section):
    """Configure the tokenizer and chat template: the section `tokenizer`."""

    tokenizer_path: OfData[
        Annotated[
            Any,
            BeforeValidator(_as_text),
            only(lambda value: value.strip() if isinstance(value, str) else value is None or hasattr(value, "encode")),
            Accepts("a folder, a hub name, a loaded tokenizer or null"),
            WithJsonSchema({"type": ["string", "null"]}),
        ]
    ] = None
    """Folder or hub name of the tokenizer, or a loaded tokenizer; null: the tokenizer of the model."""
    padding_side: Applied[Literal["left", "right"]] = "left"
    """Padding side that the exported tokenizer keeps. Training always pads prompts left and responses right."""
    truncation_side: OfData[Literal["left", "right"]] = "right"
    """Side on which a prompt that is too long is cut."""
    tokenizer_extra_configs: OfData[dict[str, Any]] = {}
    """More keyword arguments for `from_pretrained` of the tokenizer."""
    chat_template: OfData[PathText | None] = None
    """Jinja template of chat messages, a file with one, or a name such as chatml; null: the tokenizer's own."""
    chat_template_kwargs: OfData[dict[str, Any]] = {}
    """Variables for the chat template, such as tools or enable_thinking; those of a data row override them."""


def _optimizer_kwargs(values: dict[str, Any]) -> dict[str, Any]:
    """Return trlX's options of Adam, or the learning rate alone for an optimizer that does not take betas."""
    name = values.get("name", "")
    if not isinstance(name, str):
        return {}  # it has its own
    adam = {"betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 1.0e-6}
    return {"lr": 3.0e-5, **(adam if name.lower().startswith("adam") else {})}


def _switches(section: str, kwargs: Mapping[str, Any], names: Iterable[str]) -> Iterator[Problem]:
    """Yield the keyword arguments that have true or false in place of a number."""
    for name in names:
        if isinstance(kwargs.get(name), bool):
            yield Problem((section, "kwargs", name), f"must be a number, got {shown(kwargs[name])}.")


class OptimizerConfig(Section):
    """Choose the optimizer and its arguments: the section `optimizer`."""

    name: OfWeights[
        Annotated[
            Any,
            # Recognised by an attribute, so that torch is not imported.
            only(
                lambda value: isinstance(value, str) or (hasattr(value, "param_groups") and not isinstance(value, type))
            ),
            Accepts("a registered name", "an optimizer of torch"),
            WithJsonSchema({"type": "string"}),
        ]
    ] = "adamw"
    """Registered name of the optimizer; `trlx-like list optimizers` shows all. From Python also an optimizer of the
    loaded model's parameters."""
    kwargs: Annotated[
        dict[str, Any],
        OnResume("the optimizer's state depends on it", applied_keys=("lr", "betas", "eps", "weight_decay")),
    ] = Field(default_factory=_optimizer_kwargs)
    """Keyword arguments of the optimizer, such as weight_decay and lr (auto: by the size of the model)."""
    no_decay: OfWeights[Literal["norms_and_biases"] | None] = None
    """Weights that the weight decay leaves out; null: it is of all weights, as in trlX."""

    def conflicts(self) -> Iterator[Problem]:
        for name in ("kwargs", "no_decay"):
            if not isinstance(self.name, str) and getattr(self, name):
                yield at(f"optimizer.{name}", "is for an optimizer by its name; an object has its own options.")
        if self.kwargs.get("lr") == "auto" and "adam" not in str(self.name).lower():
            sentence = f"'auto' is a learning rate of Adam, and optimizer.name is {self.name}; give a number."
            yield at("optimizer.kwargs.lr", sentence)
        yield from _switches("optimizer", self.kwargs, ("lr", "weight_decay", "eps", "momentum", "dampening", "alpha"))


class SchedulerConfig(Section):
    """Choose the learning-rate schedule and its arguments: the section `scheduler`."""

    name: Applied[
        Annotated[
            Any,
            AfterValidator(_scheduler_source),
            Accepts("a registered name", "a schedule of torch"),
            WithJsonSchema({"type": "string"}),
        ]
    ] = "constant"
    """Registered name of the learning-rate schedule; `trlx-like list schedulers` shows all. From Python also a schedule
    of the optimizer in `optimizer.name`."""
    kwargs: Applied[dict[str, Any]] = {}
    """Keyword arguments of the schedule."""
    warmup: Applied[int | float] = Field(default=0, ge=0)
    """Number of steps in which the learning rate rises from 0, or a fraction below 1 of all steps."""

    def conflicts(self) -> Iterator[Problem]:
        for name in ("kwargs", "warmup"):
            if not isinstance(self.name, str) and getattr(self, name):
                yield at(f"scheduler.{name}", "is for a schedule by its name; an object has its own options.")
        yield from _switches("scheduler", self.kwargs, self.kwargs)


class SamplerConfig(Section):
    """Configure how samples are generated during training: the section `sampler`."""

    engine: Applied[str] = "transformers"
    """Registered name of the engine that generates text: transformers (the trained model itself), copy, paged, vllm or
    vllm_colocated."""
    kwargs: Applied[dict[str, Any]] = {}
    """Options of the engine: dtype of copy (of its weights), page_size and more of paged, url and more of vllm.
    vllm_colocated takes gpu_memory_utilization and what `vllm.LLM` takes."""
    batch_size: Applied[int | None] = Field(default=None, ge=1)
    """Number of responses to generate at once, per process; null: all of a chunk."""


_DIVIDING = ("fsdp", "deepspeed")
_NEEDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("shard", "gradients"): _DIVIDING,
    ("shard", "optimizer"): ("deepspeed",),
    ("shard", "hybrid"): ("fsdp",),
    ("offload", "optimizer"): ("deepspeed",),
    ("offload", "all"): _DIVIDING,
    ("reduce_dtype", "bfloat16"): _DIVIDING,
    ("rollout", "layers"): ("fsdp",),
}
"""Values of `backend` that not all of our kinds follow, and the kinds that do."""


class BackendConfig(Section):
    """Configure number formats, devices and threads: the section `backend`."""

    kind: Applied[str] = "ddp"
    """Registered name of the backend: ddp, all weights on each process; fsdp or deepspeed, which divide them."""
    shard: Applied[Literal["full", "gradients", "optimizer", "hybrid"]] = "full"
    """What is divided: full, gradients and optimizer are ZeRO-3, 2 and 1 of deepspeed. With fsdp
    gradients: weights only between steps; hybrid: all, over the processes of a machine."""
    offload: Applied[Literal["none", "optimizer", "all"]] = "none"
    """What is kept in the CPU's memory; optimizer: with deepspeed, gradients and the optimizer's state; all: weights
    between their uses too."""
    rollout: Applied[Literal["whole", "layers"]] = "whole"
    """What is whole while a round is sampled and evaluated. whole: all weights; layers (fsdp): those of the block that
    runs, and all outside of blocks, which takes less memory and more communication."""
    deepspeed_config: Applied[dict[str, Any]] = {}
    """Further options of DeepSpeed as its JSON names them, such as `zero_optimization: {overlap_comm: true}`."""
    reduce_dtype: OfWeights[Literal["float32", "bfloat16"]] = "float32"
    """Number format in which fsdp and deepspeed sum gradients over processes."""
    mixed_precision: OfWeights[Literal["no", "bf16", "fp16"]] = "no"
    """Number format of the forward pass; "no": the format of the weights. With fp16 the loss is scaled."""
    gradient_checkpointing: Applied[bool] = False
    """Recompute activations in the backward pass, which takes less memory and more time."""
    device: Applied[Literal["auto", "cpu"]] = "auto"
    """Device to train on; auto: a CUDA device if there is one, else the CPU. Apple's GPUs (no float64) are not used."""
    num_threads: Applied[int | None] = Field(default=None, ge=1)
    """Number of CPU threads of each process; null: torch's default."""
    timeout: Applied[float | None] = Field(default=1800.0, gt=0)
    """Seconds without progress of one process after which all processes of a run are ended; null: never."""

    def undivided(self) -> BackendConfig:
        """Return a copy of kind ddp without the options that ddp does not follow."""
        dropped = {"kind", "deepspeed_config", *(name for name, _ in _NEEDS)}
        return BackendConfig(**{name: value for name, value in self.to_dict().items() if name not in dropped})

    def conflicts(self) -> Iterator[Problem]:
        """Yield options that `kind` would not follow; kinds of plugins may follow all."""
        if self.kind not in ("ddp", *_DIVIDING):
            return
        needs = {name: kinds for (name, value), kinds in _NEEDS.items() if getattr(self, name) == value}
        if self.deepspeed_config:
            needs["deepspeed_config"] = ("deepspeed",)
        for name, kinds in needs.items():
            if self.kind not in kinds:
                sentence = f"{shown(getattr(self, name))} needs backend.kind: {' or '.join(kinds)}; it is {self.kind}."
                yield at(f"backend.{name}", sentence)
