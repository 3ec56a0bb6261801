"""Loads models and tokenizers that `model.model_path` and `tokenizer.tokenizer_path` name, and saves models."""

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
from trlx_like.models.adapters import add_adapter, base_of, read_adapter, train_adapter, unwrapped
from trlx_like.models.finite import require_finite
from trlx_like.models.layout import check_has_lm_head
from trlx_like.models.merging import has_adapter, merged

UNTRUSTED = {"trust_remote_code": False}
"""Options of `from_pretrained` without which transformers asks on the terminal whether a model's code may run."""


def cannot_load(option: str, name: str, error: Exception, extra: str = "") -> ConfigError:
    """Return the error about a model or tokenizer that transformers cannot load.

    Args:
        option: The option that names it.
        name: Its name, as it is shown.
        error: What transformers raised.
        extra: The option with more arguments of `from_pretrained`, if there is one.
    """
    if "trust_remote_code" not in str(error):
        return ConfigError(f"{option} ({name}) cannot be loaded: {error}")
    advice = f" If you trust its author, add to the command: --set {extra}.trust_remote_code=true" if extra else ""
    return ConfigError(f"{option} ({name}) comes with code of its own, which is not run.{advice}")


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError for an adapter configuration that cannot be trained, before a model is loaded."""
    if config.peft_config is not None:
        read_adapter(config.peft_config)


def load_trained_model(config: ModelConfig) -> PreTrainedModel:
    """Load the model that is to be trained, with a trainable adapter if there is one.

    There is one if `model.peft_config` asks for a new one, or if `model.model_path` comes with one, which is then
    trained further. Then all other weights are frozen.

    Args:
        config: The section `model`.

    Returns:
        The model.

    Raises:
        ConfigError: If it cannot be loaded, or is of another kind than `model.model_arch_type`.
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
    """Load a language model in float32, unless `model.model_extra_configs` says otherwise.

    Args:
        path: A folder or hub name of a model or of an adapter, a `PretrainedConfig` (random weights), a model (used as
            it is), or `module:function` that returns one of these.
        config: The section `model`.

    Returns:
        The model.

    Raises:
        ConfigError: If it cannot be loaded, lacks weights, has NaN or infinite ones, or is of another kind than
            `model.model_arch_type`.
    """
    check_model(config)
    if is_python_name(path):
        path = import_name(path, "model.model_path")()
    path = unwrapped(path)
    if isinstance(path, PreTrainedModel):
        _check_kind(path.config, config, type(path).__name__)
        check_has_lm_head(path)
        require_finite(path, f"model.model_path ({type(path).__name__})")
        return fuse_gelu(path)
    extra = {"dtype": torch.float32, **UNTRUSTED, **config.model_extra_configs}
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
        raise cannot_load("model.model_path", _shown(path), error, "model.model_extra_configs") from error
    require_finite(lm, f"model.model_path ({_shown(path)})")
    return fuse_gelu(lm)


def _check_complete(missing: Collection[str], name: str) -> None:
    """Raise ConfigError for weights that the files lack, such as the language model head if they hold a classifier."""
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"model.model_path ({name}) has no {min(missing)}{more}: it is another kind of model, and what it lacks "
            "would be random."
        )


def fuse_gelu(lm: PreTrainedModel) -> PreTrainedModel:
    """Replace activations "gelu_new" (GPT-2, GPT-J, Phi), which are eight operations in Python, by a kernel of torch.

    The function is the same up to rounding, and saved files do not change.

    Args:
        lm: The model, changed in place.

    Returns:
        The same model.
    """
    for module in list(lm.modules()):
        for name, part in module.named_children():
            if type(part) is NewGELUActivation:
                setattr(module, name, torch.nn.GELU(approximate="tanh"))
    return lm


def save_model(lm: PreTrainedModel, directory: Path, merge: bool = False) -> None:
    """Save a model for transformers to load; of a model with an adapter, the adapter alone in peft's format.

    Args:
        lm: The model.
        directory: The folder.
        merge: Save the whole model with its adapter merged. This also happens if the adapter's folder could not name
            its
            model: because that has random weights or was given in memory.

    Raises:
        ConfigError: See `check_folder`.
    """
    check_folder(lm, directory, merge)
    with no_progress_bars():
        (lm if _alone(lm, merge) or not has_adapter(lm) else merged(lm)).save_pretrained(directory)


def check_folder(lm: PreTrainedModel, directory: Path, merge: bool = False) -> None:
    """Raise ConfigError if a folder holds the other kind, adapter or whole model, as both would be loaded together.

    Args:
        lm: The model that will be saved.
        directory: The folder.
        merge: As in `save_model`.
    """
    alone = _alone(lm, merge)
    if (directory / ("config.json" if alone else "adapter_config.json")).exists():
        kinds = ("an adapter", "a whole model")
        raise ConfigError(
            f"{directory} holds {kinds[alone]}, which would be mixed with {kinds[not alone]}; name another folder."
        )


def _alone(lm: PreTrainedModel, merge: bool) -> bool:
    """Return True if the adapter is saved without its model."""
    return has_adapter(lm) and not merge and bool(lm.peft_config["default"].base_model_name_or_path)


def arch_type(path: str) -> Literal["causal", "seq2seq"]:
    """Tell which `model.model_arch_type` a saved model has.

    Args:
        path: A folder or hub name of a model or of an adapter.

    Returns:
        "causal" or "seq2seq".

    Raises:
        ConfigError: If it holds no model.
    """
    try:
        return _kind(AutoConfig.from_pretrained(base_of(path) or path, **UNTRUSTED))
    except (OSError, ValueError) as error:
        raise cannot_load("model.model_path", _shown(path), error) from error


def _kind(config: PretrainedConfig) -> Literal["causal", "seq2seq"]:
    """Tell the `model.model_arch_type` of a model's configuration."""
    return "seq2seq" if config.is_encoder_decoder else "causal"


def _check_kind(found: PretrainedConfig, config: ModelConfig, name: str) -> None:
    """Raise ConfigError for a model of the other kind. Some families would load, with half of their weights random."""
    kind = _kind(found)
    if kind != config.model_arch_type:
        what = "an encoder-decoder" if kind == "seq2seq" else "no encoder-decoder"
        raise ConfigError(f"model.model_arch_type ({config.model_arch_type!r}): {name} is {what}; set it to {kind!r}.")


def load_tokenizer(
    config: TokenizerConfig, model_path: Any, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the configuration, or prepare the given one.

    Without a pad token, EOS pads. That is safe here, because masks are never inferred from ids. The sides of padding
    and truncation are those of the configuration; a given tokenizer keeps its own.

    Args:
        config: The section `tokenizer`.
        model_path: `model.model_path`, used if `tokenizer.tokenizer_path` is not set.
        tokenizer: A tokenizer to use instead of loading one. It is changed in place.

    Returns:
        The tokenizer, with a pad token.

    Raises:
        ConfigError: If it cannot be loaded or has no EOS token.
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
    """Return the text of a chat template, given as text or as a file."""
    if "{" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"tokenizer.chat_template ({template!r}) is neither a template nor a file: {error}"
        ) from error


def _read_tokenizer(config: TokenizerConfig, model_path: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the configuration."""
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
        tokenizer = AutoTokenizer.from_pretrained(str(path), **{**UNTRUSTED, **config.tokenizer_extra_configs})
    except (OSError, ValueError) as error:
        raise cannot_load(
            "tokenizer.tokenizer_path", repr(str(path)), error, "tokenizer.tokenizer_extra_configs"
        ) from error
    return tokenizer


def _shown(path: Any) -> str:
    """Return the words for a model's path in an error."""
    return type(path).__name__ if isinstance(path, PretrainedConfig) else repr(str(path))


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars for reading and writing weights within a block, but not those of downloads."""

    def hidden(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return bar(*args, **{**kwargs, "disable": True})

    before = transformers_logging.set_tqdm_hook(hidden)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make a model recompute activations in the backward pass, which saves memory and costs time."""
    # transformers 6 renames the method, and the old name warns from 5.23 on.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def disable_dropout(model: torch.nn.Module) -> None:
    """Set all dropout probabilities of a model to 0, so that sampling and training use the same distribution.

    Many families keep probabilities in attributes of modules, such as `attention_dropout`, `attn_pdrop` and
    `layerdrop`.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
