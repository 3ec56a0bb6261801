"""From `model.model_path` and `tokenizer.tokenizer_path` to a model and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import NewGELUActivation
from transformers.utils import logging as transformers_logging

from trlx_like.config import ModelConfig, TokenizerConfig
from trlx_like.errors import ConfigError
from trlx_like.imports import import_name, is_python_name
from trlx_like.models.adapters import add_adapter, base_of, has_adapter, merged, read_adapter, train_adapter, unwrapped
from trlx_like.models.layout import check_has_lm_head


def check_model(config: ModelConfig) -> None:
    """ConfigError for a model that cannot be trained, before it is loaded."""
    if config.peft_config is not None:
        read_adapter(config.peft_config)


def load_trained_model(config: ModelConfig) -> PreTrainedModel:
    """The model of the configuration, ready to be trained: with an adapter, only that is.

    There is one if `model.peft_config` asks for it, or if `model.model_path` came with one, which is then trained on.
    """
    path = config.model_path
    if is_python_name(path):
        path = import_name(path, "model.model_path")()
    lm = load_model(path, config)
    if config.peft_config is not None:
        add_adapter(lm, config.peft_config, path if isinstance(path, str) else None)
    elif has_adapter(lm):
        train_adapter(lm)
    return lm


def load_model(path: Any, config: ModelConfig) -> PreTrainedModel:
    """A `model.model_arch_type` language model in float32, unless `model.model_extra_configs` says otherwise.

    path: a folder or hub name of a model or of an adapter, a `PretrainedConfig` (random weights), a model (used as it
    is), or `module:function` that returns one of these.
    """
    check_model(config)
    if is_python_name(path):
        path = import_name(path, "model.model_path")()
    path = unwrapped(path)
    if isinstance(path, PreTrainedModel):
        _check_kind(path.config, config, type(path).__name__)
        check_has_lm_head(path)
        return fuse_gelu(path)
    extra = {"dtype": torch.float32, **config.model_extra_configs}
    lm: PreTrainedModel
    kind: Any = AutoModelForSeq2SeqLM if config.model_arch_type == "seq2seq" else AutoModelForCausalLM
    try:
        if isinstance(path, PretrainedConfig):
            _check_kind(path, config, _shown(path))
            lm = kind.from_config(path, **extra)
        else:
            _check_kind(AutoConfig.from_pretrained(base_of(str(path)) or str(path), **extra), config, _shown(path))
            with no_progress_bars():
                lm, found = kind.from_pretrained(str(path), output_loading_info=True, **extra)
            _check_complete(found["missing_keys"], _shown(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.model_path ({_shown(path)}) cannot be loaded: {error}") from error
    return fuse_gelu(lm)


def _check_complete(missing: Collection[str], name: str) -> None:
    """ConfigError for weights that are not in the files: of a classifier, say, the language model's head."""
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"model.model_path ({name}) has no {min(missing)}{more}: it is another kind of model, and what it lacks "
            "would be random."
        )


def fuse_gelu(lm: PreTrainedModel) -> PreTrainedModel:
    """The model with torch's own kernel in place of eight Python operations where its activation is "gelu_new".

    GPT-2, GPT-J, Phi and others have it. It is the same function up to rounding, and what is saved does not change.
    """
    for module in list(lm.modules()):
        for name, part in module.named_children():
            if type(part) is NewGELUActivation:
                setattr(module, name, torch.nn.GELU(approximate="tanh"))
    return lm


def save_model(lm: PreTrainedModel, directory: Path, merge: bool = False) -> None:
    """A folder that transformers load. Of a model with an adapter it holds the adapter, in peft's format.

    merge: the whole model with the adapter merged into it, as also where the adapter's folder could not say what it is
    for: a model from random weights, or one that was given in memory.
    """
    check_folder(lm, directory, merge)
    with no_progress_bars():
        (lm if _alone(lm, merge) or not has_adapter(lm) else merged(lm)).save_pretrained(directory)


def check_folder(lm: PreTrainedModel, directory: Path, merge: bool = False) -> None:
    """ConfigError for a folder that holds the other kind, adapter or whole model: both would be loaded."""
    alone = _alone(lm, merge)
    if (directory / ("config.json" if alone else "adapter_config.json")).exists():
        kinds = ("an adapter", "a whole model")
        raise ConfigError(
            f"{directory} holds {kinds[alone]}, which would be mixed with {kinds[not alone]}; name another folder."
        )


def _alone(lm: PreTrainedModel, merge: bool) -> bool:
    return has_adapter(lm) and not merge and bool(lm.peft_config["default"].base_model_name_or_path)


def arch_type(path: str) -> Literal["causal", "seq2seq"]:
    """The `model.model_arch_type` of what a folder or hub name holds. ConfigError if that is no model."""
    try:
        return _kind(AutoConfig.from_pretrained(base_of(path) or path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.model_path ({_shown(path)}) cannot be loaded: {error}") from error


def _kind(config: PretrainedConfig) -> Literal["causal", "seq2seq"]:
    return "seq2seq" if config.is_encoder_decoder else "causal"


def _check_kind(found: PretrainedConfig, config: ModelConfig, name: str) -> None:
    """ConfigError for a model of the other kind. Some families would load, with half of their weights."""
    kind = _kind(found)
    if kind != config.model_arch_type:
        what = "an encoder-decoder" if kind == "seq2seq" else "no encoder-decoder"
        raise ConfigError(f"model.model_arch_type ({config.model_arch_type!r}): {name} is {what}; set it to {kind!r}.")


def load_tokenizer(
    config: TokenizerConfig, model_path: Any, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of the configuration, or the given one. Without a pad token it pads with its EOS.

    That is safe here: which tokens are real is known from lengths, never from their ids. The sides of padding and
    truncation are those of the configuration, but a given tokenizer keeps its own.
    """
    if tokenizer is None:
        tokenizer = _read_tokenizer(config, model_path)
        tokenizer.padding_side = config.padding_side
        tokenizer.truncation_side = config.truncation_side
    if tokenizer.eos_token_id is None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise ConfigError(f"tokenizer.tokenizer_path ({name}): the tokenizer has no EOS token; set its eos_token.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(config.chat_template)
    return tokenizer


def _read_template(template: str) -> str:
    """The text of a template, given as such or as a file."""
    if "{" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"tokenizer.chat_template ({template!r}) is neither a template nor a file: {error}"
        ) from error


def _read_tokenizer(config: TokenizerConfig, model_path: Any) -> PreTrainedTokenizerBase:
    path = config.tokenizer_path if config.tokenizer_path is not None else model_path
    if is_python_name(path):
        path = import_name(path, "tokenizer.tokenizer_path")()
    if isinstance(path, PreTrainedTokenizerBase):
        return path
    if isinstance(path, (PreTrainedModel, PretrainedConfig)):
        raise ConfigError(
            "tokenizer.tokenizer_path is missing: model.model_path is not a folder or hub name, so the tokenizer "
            "must be named, or passed as train(tokenizer=...)."
        )
    try:
        tokenizer: PreTrainedTokenizerBase
        tokenizer = AutoTokenizer.from_pretrained(str(path), **config.tokenizer_extra_configs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer.tokenizer_path ({str(path)!r}) cannot be loaded: {error}") from error
    return tokenizer


def _shown(path: Any) -> str:
    return type(path).__name__ if isinstance(path, PretrainedConfig) else repr(str(path))


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Without transformers' bars for reading and writing weights. Downloads still show theirs."""

    def hidden(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return bar(*args, **{**kwargs, "disable": True})

    before = transformers_logging.set_tqdm_hook(hidden)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Activations are made again in the backward pass, which saves memory and costs time."""
    # Its name changes with transformers 6, and the old one warns from 5.23 on.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def disable_dropout(model: torch.nn.Module) -> None:
    """Sets every dropout to 0, so that what was sampled and what is trained are the same distribution.

    Many families keep rates in attributes: `attention_dropout`, `attn_pdrop`, `layerdrop` for whole blocks.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
