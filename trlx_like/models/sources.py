"""Checks of a model's folder before it is loaded, and one-line reasons for what cannot be loaded.

Left out on purpose: files of the hub, which transformers checks when it downloads them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from trlx_like.errors import ConfigError
from trlx_like.reading import check_regular

logger = logging.getLogger(__name__)

UNLOADABLE = (
    *(ArithmeticError, AttributeError, EOFError, ImportError, LookupError, OSError, RuntimeError, TypeError),
    *(ValueError, SafetensorError, StrictDataclassError, UnpicklingError),
)
"""What transformers, diffusers and torch raise for files that are damaged or do not belong together."""

UNTRUSTED = {"trust_remote_code": False}
"""Options of `from_pretrained` without which transformers asks on the terminal whether a model's code may run."""


def reason(error: Exception) -> str:
    """Return in one line why a model or a tokenizer cannot be loaded."""
    if isinstance(error, UnpicklingError | EOFError):
        return "its .bin file is damaged, or holds more than weights"
    sentence = " ".join(str(error).split("\n\n")[0].split())
    kind = "" if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: "
    return f"{kind}{sentence or type(error).__name__}"


def shown(path: Any) -> str:
    """Return the words for a model's path in an error."""
    in_memory = isinstance(path, PretrainedConfig | PreTrainedModel)
    return type(path).__name__ if in_memory else repr(str(path))


@contextmanager
def loadable(
    path: Any, option: str, extra: str = "", as_what: str = "", caught: tuple[type[Exception], ...] = UNLOADABLE
) -> Iterator[None]:
    """Raise ConfigError for what transformers raises in a `with` block that loads a model or a tokenizer.

    Args:
        path: Its place.
        option: The option that names it.
        extra: The option with more arguments of `from_pretrained`, if there is one.
        as_what: What it should be, as in " as a reward model".
        caught: What transformers may raise.
    """
    try:
        yield
    except caught as error:
        why = f"cannot be loaded{as_what}: {reason(error)}"
        if "trust_remote_code" in str(error):
            advice = f" If you trust its author, add to the command: --set {extra}.trust_remote_code=true"
            why = f"comes with code of its own, which is not run.{advice * bool(extra)}"
        raise ConfigError(f"{option} ({shown(path)}) {why}") from error


def check_place(path: str, option: str) -> None:
    """Check that a path which can only be a folder is one, and that no file in a model's folder is damaged.

    Args:
        path: A folder or a hub name.
        option: The name of the option in errors.

    Raises:
        ConfigError: If there is no such folder, a file in it is a pipe or a device, or a file of weights is cut off or
            is none.
    """
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_file():
            raise ConfigError(f"{option} ({path!r}) is a file; give the folder that it is in.")
        if path.startswith((".", "~", os.sep)) or len(folder.parts) > 2:
            raise ConfigError(f"{option} ({path!r}): there is no such folder in {Path.cwd()}.")
        return
    for file in sorted(folder.rglob("*")):
        try:
            check_regular(file)
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):  # reads the header and compares it with the size of the file
                    pass
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or reason(error)
            raise ConfigError(f"{option} ({path!r}): {file.relative_to(folder)} cannot be read: {why}.") from error


def check_fit(
    config: PretrainedConfig | None, seq_length: int, tokenizer: PreTrainedTokenizerBase, *, sampled: bool = False
) -> None:
    """Check that a model has the positions and the tokens that it will be given.

    Tokens beyond the model's that only a special token stands for are accepted, because text does not become them: some
    families share a tokenizer between models with images and without.

    Args:
        config: The configuration of the model; None if it is not known.
        seq_length: `train.seq_length`.
        tokenizer: The tokenizer.
        sampled: Whether the model is trained on what it samples, so that a row must not depend on its neighbours. If
            they can matter, this is an error, and else a warning.

    Raises:
        ConfigError: If sequences can be longer than the positions, or the tokenizer has tokens that the model lacks.
    """
    if config is None:
        return
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and seq_length > positions:
        raise ConfigError(f"train.seq_length ({seq_length}) is longer than the {positions} positions of the model.")
    if seq_length > (apart := _independent_length(text) or seq_length):
        problem = (
            f"train.seq_length ({seq_length}) should be at most {apart} for this model ({text.model_type}): if one row "
            f"of a batch has more than {apart} tokens, its rotary embeddings (longrope) change in all rows, and with "
            "them log-probabilities."
        )
        if sampled:
            raise ConfigError(problem)
        logger.warning(problem)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    used = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id} - {None}
    beyond = [
        (number, token)
        for token, number in tokenizer.get_vocab().items()
        if number >= text.vocab_size and (number in used or number not in special)
    ]
    if beyond:
        raise ConfigError(
            f"tokenizer.tokenizer_path: the tokenizer has {len(beyond)} tokens that the model lacks, such as "
            f"{max(beyond)[1]!r} (id {max(beyond)[0]}): the model has {text.vocab_size}. Use the tokenizer that the "
            "model was trained with."
        )


def _independent_length(text: PretrainedConfig) -> int | None:
    """Return the length beyond which rotary embeddings depend on the longest row of a batch; None without any.

    This is for the type "longrope". Those of the type "dynamic" do so beyond `max_position_embeddings`, which
    `check_fit` refuses.
    """
    rope = getattr(text, "rope_parameters", None) or {}  # or one for each type of layer
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict) and part.get("rope_type") == "longrope"]
    return min((part["original_max_position_embeddings"] for part in parts), default=None)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars and reports of reading and writing weights within a block.

    Bars of downloads stay.
    """

    def hidden(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return bar(*args, **{**kwargs, "disable": True})

    before, level = transformers_logging.set_tqdm_hook(hidden), transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)
        transformers_logging.set_verbosity(level)
