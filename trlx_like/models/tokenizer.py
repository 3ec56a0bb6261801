"""Loads the tokenizer that `tokenizer.tokenizer_path` names, or the one of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from trlx_like.config import TokenizerConfig
from trlx_like.errors import ConfigError
from trlx_like.imports import import_name, is_python_name
from trlx_like.models.sources import UNTRUSTED, cannot_load, check_place, no_progress_bars
from trlx_like.reading import read_bytes

LARGEST_TEMPLATE = 1_000_000
"""Most bytes of a file with a chat template."""


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
        return read_bytes(Path(template).expanduser(), LARGEST_TEMPLATE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"tokenizer.chat_template ({template!r}) is neither a template nor a file: {error}"
        ) from error


def _read_tokenizer(config: TokenizerConfig, model_path: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the configuration."""
    own = config.tokenizer_path is not None
    path, option = (config.tokenizer_path, "tokenizer.tokenizer_path") if own else (model_path, "model.model_path")
    if is_python_name(path):
        path = import_name(path, option)()
    if isinstance(path, PreTrainedTokenizerBase):
        return path
    if isinstance(path, (PreTrainedModel, PretrainedConfig)):
        raise ConfigError(
            "tokenizer.tokenizer_path is missing: model.model_path is not a folder or hub name, so the tokenizer "
            "must be named, or passed as train(tokenizer=...)."
        )
    check_place(str(path), option)
    place = f"{option} ({str(path)!r})"
    try:
        with no_progress_bars():
            tokenizer: PreTrainedTokenizerBase
            tokenizer = AutoTokenizer.from_pretrained(str(path), **{**UNTRUSTED, **config.tokenizer_extra_configs})
    except Exception as error:  # the library below it raises its own kinds, which have no base class
        raise cannot_load(
            option, repr(str(path)), error, "tokenizer.tokenizer_extra_configs", " as a tokenizer"
        ) from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # transformers makes an empty tokenizer for a folder without its files.
        raise ConfigError(
            f"{place}: the tokenizer knows no tokens; the folder lacks its files, such as tokenizer.json."
        )
    return tokenizer
