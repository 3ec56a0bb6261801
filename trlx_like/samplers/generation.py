"""Generation settings that mean what they say: nothing is taken from a model's own generation defaults.

A model's `generation_config` may ask for top-k 50 or a repetition penalty. A loss that does not know of it would take
log-probabilities of another distribution than the one that was sampled from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from trlx_like.config.generation import NEUTRAL
from trlx_like.errors import ConfigError
from trlx_like.registry import nearest

# What would change the number or the kind of the results: the value that would not, and what to do.
_REFUSED: dict[str, tuple[Any, str]] = {
    "num_return_sequences": (1, "one completion a prompt is made; repeat the prompts for more"),
    "return_dict_in_generate": (False, "token ids are what is wanted; leave it out"),
    "stop_strings": (None, "use stop_sequences, which also end the text that is scored"),
}

_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def check_options(options: Mapping[str, Any], where: str = "method.gen_kwargs", also: Collection[str] = ()) -> None:
    """ConfigError for what `generate()` does not know, and for what would not give one completion a prompt.

    also: options of the engine's own.
    """
    known = {*GenerationConfig().to_dict(), *also}
    for name, value in options.items():
        if name not in known:
            close = nearest(name, known)
            guess = f" Did you mean {close}?" if close else ""
            raise ConfigError(f"{where}.{name} is not an option of transformers' generate().{guess}")
        if name in _REFUSED and value not in (None, _REFUSED[name][0]):
            raise ConfigError(f"{where}.{name} ({value}): {_REFUSED[name][1]}.")


def generation_config(options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """A complete GenerationConfig: plain sampling, changed only by `options`.

    With `do_sample: False` the options of sampling mean nothing and are left out. ConfigError as `check_options`, and
    for what `generate()` refuses.
    """
    check_options(options)
    neutral: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    if options.get("do_sample") is False:
        neutral = {}
        options = {name: value for name, value in options.items() if name not in _SAMPLING_ONLY}
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    try:
        return GenerationConfig(**{**neutral, **special, **options})
    except ValueError as error:
        raise ConfigError(f"method.gen_kwargs: {error}") from error


def is_plain(config: GenerationConfig) -> bool:
    """Whether every token is drawn from softmax(logits / temperature): what `method` allows for text to train on."""
    return all(getattr(config, name, None) in values for name, values in NEUTRAL.items())


def greedy(config: GenerationConfig) -> GenerationConfig:
    """The same settings for taking the likeliest token."""
    return GenerationConfig(**{**config.to_dict(), **dict.fromkeys(_SAMPLING_ONLY), "do_sample": False})


def eos_ids(config: GenerationConfig) -> list[int]:
    """The ids that end a response."""
    eos = config.eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, (list, tuple)) else [eos]
