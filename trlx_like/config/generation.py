"""The options of text generation that `method.gen_kwargs` may have, and those that rollouts may be sampled with.

A loss compares log-probabilities under the distribution that was sampled from. Temperature is modelled on both sides,
and so are options that only forbid tokens: the tokens that could be drawn are kept with each sampled one. Every other
option that changes the distribution is for evaluation only. Options in neither table are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from trlx_like.config.elsewhere import answers
from trlx_like.config.problems import Problem, at, expected, listed, shown
from trlx_like.registry import nearest

# Files of trlX and programs of TRL write top_k as 0.0.
_Whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Above0 = Annotated[float, Field(gt=0)]

# Option -> its type. These are allowed everywhere: they do not change the distribution, or the loss models them.
ANYWHERE: dict[str, Any] = {
    "max_new_tokens": Count,
    "temperature": Above0,
    "eos_token_id": int | list[int] | None,
    "pad_token_id": int | None,
    "use_cache": bool | None,
    "cache_implementation": Literal["dynamic", "static"] | None,
    "disable_compile": bool | None,
}
# Option -> its type, and the values with which it has no effect, the recommended one first. Other values are for
# evaluation only.
EVALUATION: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "do_sample": (bool, (True,)),
    "top_k": (Annotated[int, Field(ge=0), _Whole] | None, (0, None)),
    "top_p": (Share | None, (1.0, None)),
    "min_p": (Annotated[float, Field(ge=0, le=1)] | None, (None, 0.0)),
    "top_h": (Share | None, (None,)),
    "typical_p": (Share | None, (1.0, None)),
    "epsilon_cutoff": (Annotated[float, Field(ge=0, lt=1)] | None, (0.0, None)),
    "eta_cutoff": (Annotated[float, Field(ge=0, lt=1)] | None, (0.0, None)),
    "repetition_penalty": (Above0 | None, (1.0, None)),
    "encoder_repetition_penalty": (Above0 | None, (1.0, None)),
    "no_repeat_ngram_size": (Annotated[int, Field(ge=0)] | None, (0, None)),
    "encoder_no_repeat_ngram_size": (Annotated[int, Field(ge=0)] | None, (0, None)),
    "num_beams": (Count | None, (1, None)),
    "early_stopping": (bool | Literal["never"] | None, (False, None)),
    "length_penalty": (float | None, (1.0, None)),
    "min_new_tokens": (Annotated[int, Field(ge=0)] | None, (None, 0)),
    "exponential_decay_length_penalty": (list[Any] | tuple[Any, ...] | None, (None,)),
    "bad_words_ids": (list[list[int]] | None, (None,)),
    "sequence_bias": (list[list[Any]] | None, (None,)),
    "suppress_tokens": (list[int] | None, (None,)),
    "begin_suppress_tokens": (list[int] | None, (None,)),
    "forced_bos_token_id": (int | None, (None,)),
    "forced_eos_token_id": (int | list[int] | None, (None,)),
    "renormalize_logits": (bool | None, (False, None)),
    "remove_invalid_values": (bool | None, (False, None)),
    "watermarking_config": (dict[str, Any] | None, (None,)),
}
# Options of `EVALUATION` that only forbid tokens, and leave the ratios of the other probabilities as they are.
FORBIDDING = frozenset(
    {"top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "min_new_tokens"}
    | {"no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"}
    | {"suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"}
)
# Option -> what to do instead, if it cannot be used for rollouts.
_INSTEAD = {
    "num_beams": "To find likelier text than sampling does, use top_k, top_p, min_p or a lower temperature, which the "
    "loss can account for, or RFTTrainer, which imitates the best of any responses.",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {name: neutral for name, (_, neutral) in EVALUATION.items()}
TYPES: dict[str, Any] = {**ANYWHERE, **{name: kind for name, (kind, _) in EVALUATION.items()}}
LIST_VALUED = frozenset(name for name, kind in TYPES.items() if any(get_origin(one) is list for one in get_args(kind)))
"""Options whose single value is a list; a list for one of these is not a sweep."""

# Values of refused options that have no effect, in addition to null, false and 0.
_HARMLESS = {"num_return_sequences": 1, "num_beam_groups": 1}


def swept(gen_kwargs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the options that have a list of values to try in turn: `{"temperature": [0.7, 1.0]}`."""
    return {name: value for name, value in gen_kwargs.items() if isinstance(value, list) and name not in LIST_VALUED}


def longest_response(gen_kwargs: Mapping[str, Any]) -> int:
    """Return `max_new_tokens`, the largest value if it is swept, in tokens."""
    value = gen_kwargs["max_new_tokens"]
    return max(value) if isinstance(value, list) else int(value)


def generation_problems(gen_kwargs: Mapping[str, Any], name: str, also: Collection[str] = ()) -> Iterator[Problem]:
    """Yield the problems of the generation options `method.<name>`, for rollouts or for evaluation.

    Args:
        gen_kwargs: The options, by name.
        name: `gen_kwargs` or `gen_experience_kwargs`.
        also: Names of options that the method's own engine adds.
    """
    if "max_new_tokens" not in gen_kwargs:
        yield at(f"method.{name}.max_new_tokens", f"missing. It must be {expected(Count)}.")
    yield from option_problems(gen_kwargs, name, also)


def option_problems(gen_kwargs: Mapping[str, Any], name: str, also: Collection[str] = ()) -> Iterator[Problem]:
    """Yield the problems of single options. The arguments are those of `generation_problems`."""
    sweeps = swept(gen_kwargs)
    for option, value in gen_kwargs.items():
        path = ("method", name, option)
        if option not in TYPES and option not in also:
            if words := answers("generation").get(option):
                if value not in (None, False, _HARMLESS.get(option)):
                    yield Problem(path, f"{shown(value)} is refused: {words}.")
                continue
            close = nearest(option, {*TYPES, *also})
            guess = f" Did you mean {close}?" if close else ""
            yield Problem(path, f"is not an option of text generation.{guess}")
        elif option in sweeps and not value:
            yield Problem(path, "an empty list has no value to try.")
        elif option in TYPES:
            for one in value if option in sweeps else [value]:
                try:
                    option_type(option).validate_python(one)
                except ValidationError:
                    yield Problem(path, f"must be {expected(TYPES[option])}, got {shown(one)}.")


def experience_problems(
    gen_kwargs: Mapping[str, Any], gen_experience_kwargs: Mapping[str, Any] | None, exact: bool = True
) -> Iterator[Problem]:
    """Yield why rollouts cannot be generated with these options.

    Args:
        gen_kwargs: Options for evaluation.
        gen_experience_kwargs: Options for rollouts; None: those for evaluation.
        exact: Whether the loss has to know the distribution that was sampled from.
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
        elif exact and option in reshaping(options):
            use = listed([shown(off) for off in NEUTRAL[option]])
            instead = f" {_INSTEAD[option]}" if option in _INSTEAD else ""
            what = f"{shown(value)} samples text in a way the loss cannot account for; use {use}.{instead}{advice}"
            yield Problem(path, what)


def forbidding(options: Mapping[str, Any]) -> list[str]:
    """Return the names of options, such as `top_k`, by which some tokens cannot be drawn."""
    return [name for name, value in options.items() if name in FORBIDDING and not _is_off(name, value)]


def reshaping(options: Mapping[str, Any]) -> list[str]:
    """Return the names of options, such as `num_beams`, by which text is sampled in a way no loss can account for."""
    known = [name for name in options if name in NEUTRAL and name not in FORBIDDING]
    return [name for name in known if not _is_off(name, options[name])]


def _is_off(option: str, value: Any) -> bool:
    return any(value is off or value == off for off in NEUTRAL[option])


@cache
def option_type(option: str) -> TypeAdapter[Any]:
    """Return the pydantic adapter that validates and describes one value of an option."""
    return TypeAdapter(TYPES[option], config=ConfigDict(strict=True, allow_inf_nan=False))
