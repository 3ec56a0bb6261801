"""Number formats of weights: `model.dtype`, and frozen weights of 4 or 8 bits (`model.quantization`, QLoRA).

bitsandbytes quantizes and computes; transformers and peft put its layers into a model. Left out on purpose: training of
quantized weights themselves, and quantization of weights that are not saved anywhere.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trlx_like.config import ModelConfig
from trlx_like.errors import ConfigError
from trlx_like.imports import is_python_name, needed

LAYERS = {"nf4": "Linear4bit", "int8": "Linear8bitLt"}
"""`model.quantization` -> the class of bitsandbytes that takes the place of linear layers."""
HALF = {"bfloat16": "bf16", "float16": "fp16"}


def load_options(config: ModelConfig, path: Any, quantized: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained` or `from_config` that the section `model` asks for.

    Args:
        config: The section `model`.
        path: What is loaded: a folder, a hub name or a `PretrainedConfig`.
        quantized: False leaves quantization out, to check a model without its weights.

    Raises:
        ConfigError: If a model without saved weights is to be quantized.
    """
    dtype: Any = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    if isinstance(path, PretrainedConfig):
        dtype = path.dtype or torch.float32 if dtype == "auto" else dtype
        if config.quantization is not None:
            raise ConfigError(
                f"model.quantization ({config.quantization!r}) needs saved weights, and {type(path).__name__} has "
                "random ones; name a folder or a model of the hub."
            )
    options = {"dtype": dtype, **config.model_extra_configs}
    if quantized and config.quantization is not None:
        options["quantization_config"] = _quantization(config.quantization)
    return options


def _quantization(name: str) -> BitsAndBytesConfig:
    """Return the settings of Dettmers et al. 2023, arXiv:2305.14314 (nf4) and 2022, arXiv:2208.07339 (int8)."""
    if name == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def check_formats(config: ModelConfig) -> None:
    """Check `model.dtype` and `model.quantization` of a model that is to be trained, before it is loaded.

    Args:
        config: The section `model`.

    Raises:
        ConfigError: If weights of 16 bits would be trained themselves, if quantized weights have no adapter beside
            them, or if bitsandbytes is missing.
    """
    path = config.model_path
    folder = isinstance(path, str) and not is_python_name(path) and Path(path).is_dir()
    adapter = config.peft_config is not None or (folder and (Path(path) / "adapter_config.json").exists())
    known = folder or isinstance(path, PretrainedConfig)  # otherwise there may be an adapter in the model already
    if config.dtype in HALF and known and not adapter and config.num_layers_unfrozen != 0:
        raise ConfigError(refused_half(config.dtype))
    if config.quantization is None:
        return
    if known and not adapter:
        raise ConfigError(_frozen_only(f"model.quantization ({config.quantization!r})"))
    with needed(f"model.quantization ({config.quantization!r}) needs bitsandbytes", "bitsandbytes"):
        import bitsandbytes  # noqa: F401


def refused_half(dtype: str) -> str:
    """Return the error about weights of 16 bits that would be trained themselves.

    Args:
        dtype: Their format, "bfloat16" or "float16".
    """
    return (
        f"model.dtype ({dtype!r}): weights that are trained need float32, or small updates are lost to rounding. Leave "
        f"it out and set backend.mixed_precision: {HALF[dtype]}, which computes in {dtype} with float32 weights; or "
        "train an adapter (model.peft_config) on weights that stay as they are."
    )


def _frozen_only(what: str) -> str:
    return (
        f"{what}: quantized weights cannot be trained themselves. Set model.peft_config, such as {{peft_type: LORA}}, "
        "to train an adapter beside them."
    )


def check_in_memory(lm: PreTrainedModel, config: ModelConfig) -> None:
    """Raise ConfigError if a model that was given in memory is not in the format that the configuration asks for."""
    if config.quantization is not None and not _layers(lm, LAYERS[config.quantization]):
        raise ConfigError(
            f"model.quantization ({config.quantization!r}): a model in memory is used as it is; name its folder."
        )
    if config.changed("dtype") and config.dtype != "auto" and lm.dtype != getattr(torch, config.dtype):
        raise ConfigError(
            f"model.dtype ({config.dtype!r}): a model in memory is used as it is, and this one is in {lm.dtype}. "
            "Convert it, or name its folder."
        )


def prepare_quantized(lm: PreTrainedModel, config: ModelConfig | None = None) -> None:
    """Set how the quantized layers of a model compute, if it has any.

    Args:
        lm: The model, changed in place.
        config: The section `model`; None: the model is not the one that it configures.

    Raises:
        ConfigError: If the model has no layer of the format that `model.quantization` asks for.
    """
    asked = None if config is None else config.quantization
    if asked is not None and not _layers(lm, LAYERS[asked]):
        raise ConfigError(
            f"model.quantization ({asked!r}): {type(lm).__name__} has no layer in this format after loading; its files "
            "may be quantized otherwise, or its layers are of another kind than linear."
        )
    for layer in _layers(lm, LAYERS["nf4"]):
        # bitsandbytes would pack the weights for AVX512 when the model generates, and backpropagate zeros from then on.
        layer.support_avx512bf16_for_cpu = False
        if asked is not None:
            layer.compute_dtype, layer.compute_type_is_set = lm.dtype, True
    if _layers(lm, LAYERS["int8"]):
        # It says at every call that it computes in float16, which is how this format is defined.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def require_adapter(lm: nn.Module, adapted: bool) -> None:
    """Raise ConfigError for a model with quantized weights that is trained without an adapter.

    Args:
        lm: The model.
        adapted: Whether it has an adapter.
    """
    if not adapted and any(is_quantized(module) for module in lm.modules()):
        raise ConfigError(_frozen_only("model.model_path"))


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with weights of 4 or 8 bits."""
    return type(module).__name__ in LAYERS.values() and hasattr(module, "source_cls")


def _layers(lm: nn.Module, name: str) -> list[Any]:
    """Return the quantized layers of a class of bitsandbytes."""
    return [module for module in lm.modules() if is_quantized(module) and type(module).__name__ == name]


@torch.no_grad()
def plain_layer(layer: Any, dtype: torch.dtype) -> nn.Module:
    """Make the layer that a quantized one computes like, of the class and with the names that it had before.

    Args:
        layer: A quantized layer.
        dtype: The format of the new weights.

    Returns:
        A frozen `Linear`, or `Conv1D` of GPT-2.
    """
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    weight: Tensor = dequantize_bnb_weight(layer.weight, getattr(layer, "state", None)).to(dtype)  # [out, in]
    transposed = layer.source_cls is Conv1D
    with torch.device("meta"):
        plain: Any = Conv1D(*weight.shape) if transposed else nn.Linear(*weight.T.shape)
    plain.weight = nn.Parameter(weight.T.contiguous() if transposed else weight)
    plain.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().to(dtype, copy=True))
    return cast(nn.Module, plain.requires_grad_(False))


def forget_quantization(lm: PreTrainedModel) -> None:
    """Remove the marks of quantization from a model whose quantized layers were replaced, so that it saves as usual."""
    for owner, names in (
        (lm, ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized")),
        (lm.config, ("quantization_config", "_pre_quantization_dtype")),
    ):
        for name in names:
            if name in vars(owner):
                delattr(owner, name)
