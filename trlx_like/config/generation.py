"""Which options of `generate` may make experience, and which are a sweep.

A loss compares log-probabilities under the distribution that was sampled from. Temperature is modelled on
both sides; every other option that bends the distribution is refused by name, with the value that switches it
off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trlx_like.config.problems import Problem, listed, shown

# Option -> the values under which it does nothing. The first is the one to use.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "top_k": (0, None),
    "top_p": (1.0, None),
    "min_p": (None, 0.0),
    "top_h": (None,),
    "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "repetition_penalty": (1.0, None),
    "encoder_repetition_penalty": (1.0, None),
    "no_repeat_ngram_size": (0, None),
    "encoder_no_repeat_ngram_size": (0, None),
    "num_beams": (1, None),
    "num_beam_groups": (1, None),
    "num_return_sequences": (1, None),
    "diversity_penalty": (0.0, None),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "min_length": (0, None),
    "min_new_tokens": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "bad_words_ids": (None,),
    "force_words_ids": (None,),
    "constraints": (None,),
    "sequence_bias": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "logits_processor": (None,),
    "prefix_allowed_tokens_fn": (None,),
}

# A list is one value of these, not a sweep.
LIST_VALUED = frozenset(
    {"eos_token_id", "stop_strings", "stopping_criteria", "logits_processor", "constraints", "sequence_bias"}
    | {"bad_words_ids", "force_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id"}
    | {"exponential_decay_length_penalty"}
)


def swept(gen_kwargs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The options with a list of values to try in turn: `{"temperature": [0.7, 1.0]}`."""
    return {name: value for name, value in gen_kwargs.items() if isinstance(value, list) and name not in LIST_VALUED}


def longest_response(gen_kwargs: Mapping[str, Any]) -> int:
    """`max_new_tokens`, the largest of them if it is swept, in tokens."""
    value = gen_kwargs["max_new_tokens"]
    return max(value) if isinstance(value, list) else int(value)


def generation_problems(gen_kwargs: Mapping[str, Any], name: str) -> Iterator[Problem]:
    """What is wrong with `method.<name>` whatever it is used for."""
    if "max_length" in gen_kwargs:
        yield Problem(("method", name, "max_length"), "counts the prompt as well; use max_new_tokens.")
    if "max_new_tokens" not in gen_kwargs:
        yield Problem(("method", name, "max_new_tokens"), "missing. It must be a whole number of at least 1.")
    for option, value in swept(gen_kwargs).items():
        if not value:
            yield Problem(("method", name, option), "an empty list has no value to try.")
    for option, kind, least, words in (
        ("max_new_tokens", int, 1, "a whole number of at least 1"),
        ("temperature", (int, float), 1e-9, "a number above 0"),
    ):
        given = gen_kwargs.get(option, [])
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, bool) or not isinstance(value, kind) or value < least:
                yield Problem(("method", name, option), f"must be {words}, got {shown(value)}.")


def experience_problems(
    gen_kwargs: Mapping[str, Any], gen_experience_kwargs: Mapping[str, Any] | None, exact: bool = True
) -> Iterator[Problem]:
    """Why these options cannot make text to train on.

    exact: the loss has to know the distribution that was sampled from.
    """
    separate = gen_experience_kwargs is not None
    name = "gen_experience_kwargs" if separate else "gen_kwargs"
    options = gen_kwargs if gen_experience_kwargs is None else gen_experience_kwargs
    advice = "" if separate else " To keep it for evaluation, set method.gen_experience_kwargs for the training."
    sweeps = swept(options)
    for option, value in options.items():
        path = ("method", name, option)
        if option in sweeps:
            yield Problem(path, f"{shown(value)} is a sweep; text to train on needs one value.{advice}")
        elif exact and option in NEUTRAL and not any(value is off or value == off for off in NEUTRAL[option]):
            use = listed([shown(off) for off in NEUTRAL[option]])
            yield Problem(path, f"{shown(value)} samples text in a way the loss cannot account for; use {use}.{advice}")
