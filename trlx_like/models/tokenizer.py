"""Loads the tokenizer that `tokenizer.tokenizer_path` names, or the one of the model."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from trlx_like.config import TokenizerConfig
from trlx_like.errors import ConfigError, raised_as
from trlx_like.imports import called_by_name, is_python_name
from trlx_like.models.sources import UNTRUSTED, check_place, loadable, no_progress_bars
from trlx_like.reading import read_bytes

logger = logging.getLogger(__name__)

SMALLEST_VOCABULARY = 0.9
"""Share of a model's tokens that its own tokenizer has at least: vocabularies are padded by a few percent."""
TEMPLATES = {file.stem: file for file in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))}
"""The chat templates that `tokenizer.chat_template` knows by name, with marks around what the assistant says."""
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
        ConfigError: If it cannot be loaded, has no EOS token, or has another vocabulary than the model's own tokenizer.
    """
    named = tokenizer is not None or config.tokenizer_path not in (None, model_path)
    if tokenizer is None:
        tokenizer = _read_tokenizer(config, model_path)
        tokenizer.padding_side = config.padding_side
        tokenizer.truncation_side = config.truncation_side
    if not hasattr(tokenizer, "eos_token_id") and hasattr(tokenizer, "tokenizer"):
        kind = type(tokenizer).__name__
        raise ConfigError(
            f"tokenizer ({kind}) is a processor, and models of text alone are trained; give its .tokenizer."
        )
    if tokenizer.eos_token_id is None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise ConfigError(f"tokenizer.tokenizer_path ({name}): the tokenizer has no EOS token; set its eos_token.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(config.chat_template)
    if named and isinstance(model_path, str) and not is_python_name(model_path):
        _compare(tokenizer, model_path)
    return tokenizer


def _compare(tokenizer: PreTrainedTokenizerBase, model_path: str) -> None:
    """Compare a tokenizer that was named with the model, as far as the model is on this machine.

    Tokens that only one of two vocabularies has are no contradiction: it may have been extended or cut. Without a
    tokenizer of the model there are signs only: its end of text, and its number of tokens.
    """
    place = f"tokenizer.tokenizer_path ({tokenizer.name_or_path or type(tokenizer).__name__})"
    given, own = tokenizer.get_vocab(), _vocabulary(model_path)
    if not own:
        if signs := _signs(tokenizer, model_path):
            logger.warning("%s may be the tokenizer of another model: %s.", place, ", and ".join(signs))
        return
    other = sorted(token for token in given if own.get(token, given[token]) != given[token])
    agreed = len(given.items() & own.items())
    if 2 * agreed < min(len(given), len(own)):
        raise ConfigError(
            f"{place}: only {agreed} of {len(given)} tokens have the id that they have in the tokenizer of "
            f"model.model_path ({model_path!r}): the model would read other words. Leave the option out to use the "
            "model's own tokenizer."
        )
    if other:
        logger.warning(
            f"{place}: {len(other)} tokens have other ids than in the tokenizer of model.model_path ({model_path!r}), "
            f"such as {other[0]!r}: {given[other[0]]} in place of {own[other[0]]}."
        )


def _vocabulary(model_path: str) -> dict[str, int]:
    """Return the vocabulary of the tokenizer that a model comes with; empty if there is none on this machine."""
    try:
        with no_progress_bars():
            own = AutoTokenizer.from_pretrained(model_path, **UNTRUSTED, local_files_only=True)
    except Exception:  # the library below it raises its own kinds, which have no base class
        return {}
    return own.get_vocab() if _knows_tokens(own) else {}


def _knows_tokens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a tokenizer was read: transformers makes an empty one for a folder without its files."""
    return bool(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens))


def _signs(tokenizer: PreTrainedTokenizerBase, model_path: str) -> list[str]:
    """Return signs that a tokenizer belongs to another model."""
    try:
        model = AutoConfig.from_pretrained(model_path, **UNTRUSTED, local_files_only=True).get_text_config()
        ends = model.eos_token_id if isinstance(model.eos_token_id, list) else [model.eos_token_id]
        size = int(model.vocab_size)
    except Exception:  # not on this machine; what cannot be loaded is refused when the model is
        return []
    ends = [end for end in ends if end is not None and end < size]  # a default of its class may be beyond
    signs = []
    if ends and tokenizer.eos_token_id not in ends:
        signs.append(f"it ends texts with token {tokenizer.eos_token_id}, the model with {ends[0]}")
    if len(tokenizer) < SMALLEST_VOCABULARY * size:
        signs.append(f"it has {len(tokenizer)} tokens, the model {size}")
    return signs


def _read_template(template: str) -> str:
    """Return the text of a chat template, given as text, by its name or as a file."""
    if "{" in template:
        return template
    file, names = TEMPLATES.get(template, Path(os.path.expanduser(template))), ", ".join(TEMPLATES)
    what = f"tokenizer.chat_template ({template!r}) is neither a template, nor one of {names}, nor a file"
    with raised_as(ConfigError, (OSError, UnicodeDecodeError), what):
        return read_bytes(file, LARGEST_TEMPLATE).decode()


def _read_tokenizer(config: TokenizerConfig, model_path: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the configuration."""
    own = config.tokenizer_path is not None
    path, option = (config.tokenizer_path, "tokenizer.tokenizer_path") if own else (model_path, "model.model_path")
    path = called_by_name(path, option)
    if isinstance(path, PreTrainedTokenizerBase):
        return path
    if isinstance(path, (PreTrainedModel, PretrainedConfig)):
        raise ConfigError(
            "tokenizer.tokenizer_path is missing: model.model_path is not a folder or hub name, so the tokenizer "
            "must be named, or passed as train(tokenizer=...)."
        )
    check_place(str(path), option)
    # The library below it raises its own kinds, which have no base class.
    loads = loadable(path, option, "tokenizer.tokenizer_extra_configs", " as a tokenizer", (Exception,))
    with loads, no_progress_bars():
        tokenizer: PreTrainedTokenizerBase
        tokenizer = AutoTokenizer.from_pretrained(str(path), **{**UNTRUSTED, **config.tokenizer_extra_configs})
    if not _knows_tokens(tokenizer):
        raise ConfigError(
            f"{option} ({str(path)!r}): the tokenizer knows no tokens; the folder lacks its files, such as "
            "tokenizer.json."
        )
    return tokenizer
