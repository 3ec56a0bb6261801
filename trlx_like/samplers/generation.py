"""Complete generation settings: nothing is taken from a model's own generation defaults.

A model's `generation_config` may ask for top-k 50 or a repetition penalty. A loss that does not know of it would
compute log-probabilities under another distribution than the one that was sampled from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    NoBadWordsLogitsProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    SequenceBiasLogitsProcessor,
    WatermarkingConfig,
)

from trlx_like.config.generation import FORBIDDING, NEUTRAL, TYPES, option_problems, option_type, swept
from trlx_like.config.problems import InvalidConfig
from trlx_like.errors import ConfigError, raised_as

SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def generation_config(options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Make a complete GenerationConfig: plain sampling, changed only by `options`.

    Args:
        options: Options of generation, by name. With `do_sample: False` those of sampling are left out.
        tokenizer: Defines the ids of padding, EOS and BOS.

    Raises:
        ConfigError: For an option that is unknown, refused or of a wrong value.
    """
    if problems := list(option_problems(options, "gen_kwargs")):
        raise InvalidConfig(problems)
    # The validated values: generate() refuses an int where it wants a float.
    given = {name: option_type(name).validate_python(value) for name, value in options.items() if name in TYPES}
    neutral: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    if given.get("do_sample") is False:
        neutral = {}
        given = {name: value for name, value in given.items() if name not in SAMPLING_ONLY}
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    with raised_as(ConfigError, ValueError, "method.gen_kwargs"):
        return GenerationConfig(**{**neutral, **special, **given})


def check_token_ids(
    options: Mapping[str, Any], name: str, model: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Try the options that name tokens or have a form of their own, before `generate()` does while it samples.

    An EOS that the model lacks is accepted: programs of TRL set one so that responses never end by themselves.

    Args:
        options: Options of generation, by name.
        name: The option of the method that they come from, for errors.
        model: The configuration of the model.
        tokenizer: Defines the EOS if the options do not.

    Raises:
        ConfigError: For an option that names a token that the model lacks, or that has a wrong form, for
            `forced_bos_token_id` with a decoder, in which no response begins a sequence, and for
            `exponential_decay_length_penalty` if the model lacks the EOS.
    """
    forced = options.get("forced_bos_token_id")
    if forced is not None and not model.is_encoder_decoder:
        raise ConfigError(
            f"method.{name}.forced_bos_token_id ({forced!r}) is for encoder-decoders; end the prompts with the token."
        )
    vocabulary = model.get_text_config().vocab_size
    penalty = options.get("exponential_decay_length_penalty")
    eos = options.get("eos_token_id", tokenizer.eos_token_id)
    ends = [eos] if isinstance(eos, int) else eos
    if penalty is not None and not (ends and all(0 <= end < vocabulary for end in ends)):
        raise ConfigError(
            f"method.{name}.exponential_decay_length_penalty ({penalty!r}) needs an EOS that the model has, and EOS is "
            f"{eos}: set method.{name}.eos_token_id to an id from 0 to {vocabulary - 1}, or leave the penalty out."
        )
    for option in sorted(_TRIED.keys() & options.keys() - swept(options).keys()):
        if (value := options[option]) is not None:
            try:
                _TRIED[option](value)(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, vocabulary))
            except (ValueError, TypeError, IndexError) as error:
                raise ConfigError(f"method.{name}.{option} ({value!r}): {error}.") from error


# Option -> what makes of its value a function of tokens [1, 1] and logits [1, V].
_TRIED: dict[str, Callable[[Any], Callable[[Any, Any], Any]]] = {
    "bad_words_ids": NoBadWordsLogitsProcessor,
    "sequence_bias": SequenceBiasLogitsProcessor,
    "forced_bos_token_id": ForcedBOSTokenLogitsProcessor,
    "forced_eos_token_id": lambda value: ForcedEOSTokenLogitsProcessor(2, value),
    "exponential_decay_length_penalty": lambda value: ExponentialDecayLengthPenalty(value, 0, 0),
    "watermarking_config": lambda value: lambda *_: WatermarkingConfig(**value).validate(),
    "pad_token_id": lambda value: lambda _, scores: scores[0, value],
}


def is_plain(config: GenerationConfig) -> bool:
    """Return whether every token is drawn from softmax(logits / temperature)."""
    return not changed(config)


def is_exact(config: GenerationConfig) -> bool:
    """Return whether every token is drawn from softmax(logits / temperature) over a set, all tokens or those left."""
    return not changed(config, FORBIDDING)


def changed(config: GenerationConfig, known: Collection[str] = ()) -> str | None:
    """Return the name of an option that changes what is sampled, and is not one of some known ones; None without."""
    names = (name for name in NEUTRAL if name not in known)
    return next((name for name in names if getattr(config, name, None) not in NEUTRAL[name]), None)


def asks_for_tokens(config: GenerationConfig) -> bool:
    """Return whether options ask which single tokens a prompt has, in whatever order."""
    sizes = config.no_repeat_ngram_size, config.encoder_no_repeat_ngram_size
    return 1 in sizes or config.encoder_repetition_penalty not in NEUTRAL["encoder_repetition_penalty"]


def greedy(config: GenerationConfig) -> GenerationConfig:
    """Return the same settings for taking the likeliest token instead of drawing one."""
    return GenerationConfig(**{**config.to_dict(), **dict.fromkeys(SAMPLING_ONLY), "do_sample": False})


def eos_ids(config: GenerationConfig) -> list[int]:
    """Return the ids that end a response."""
    eos = config.eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, (list, tuple)) else [eos]
