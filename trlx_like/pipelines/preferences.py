"""Encoding preferences, the pairs of answers that reward models and DPO learn from, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, ClassVar, Literal, TypeGuard

from transformers import PreTrainedTokenizerBase

from trlx_like.config import TRLConfig
from trlx_like.data.flat import Flat, FlatRows
from trlx_like.errors import DataError
from trlx_like.pipelines.chat import common_options, encode_answer, template_options
from trlx_like.pipelines.forms import as_preference
from trlx_like.pipelines.prepared import prepared
from trlx_like.pipelines.returns import finite
from trlx_like.pipelines.rows import is_messages, row_list
from trlx_like.pipelines.tokens import TextEncoder, common_prefix
from trlx_like.pipelines.truncation import Lost, Truncation


@dataclass
class Preference(Flat):
    """Hold a prompt and two answers to it as token ids. None of them is empty."""

    FIELDS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("chosen", "rejected"), "token"),
        **dict.fromkeys(("chosen_mask", "rejected_mask"), "flag"),
        **{"margin": "real", "prompt": "count", "header": "count", "lost": "count"},
    }
    """Flat, each answer follows a copy of the prompt, as a reward model reads it, and the prompt is its length."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    chosen_mask: list[bool] | None = None
    """Marks the assistant's tokens in the chosen answer, if answers also have turns of others; None: all tokens."""
    rejected_mask: list[bool] | None = None
    """The same for the rejected answer. Either both answers have a mask or none has."""
    margin: float = 0.0
    """How much better the chosen answer is, if the data says so."""
    header: int = field(default=0, compare=False)
    """How many of the prompt's last tokens are the header of an answer; they are not cut."""
    lost: Lost = field(default=Lost(), compare=False)
    """Numbers of tokens that were cut, over both answers."""

    def numbers(self) -> dict[str, Sequence[Any]]:
        whole = {"chosen": self.prompt + self.chosen, "rejected": self.prompt + self.rejected}
        return {**super().numbers(), **whole, "prompt": [len(self.prompt)]}

    @classmethod
    def of(cls, **numbers: list[Any]) -> Preference:
        (start,), chosen, rejected = (numbers[name] for name in ("prompt", "chosen", "rejected"))
        apart = {"prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:]}
        return super().of(**{**numbers, **apart})


def configured_preferences(
    config: TRLConfig, rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase, name: str
) -> FlatRows[Preference]:
    """Encode preferences as the configuration of a run says. The other arguments are those of `encode_preferences`."""
    method: Any = config.method
    return encode_preferences(
        rows,
        tokenizer,
        max_length=config.train.seq_length,
        max_prompt_length=method.max_prompt_length,
        truncation=method.truncation_mode,
        too_long=method.too_long,
        seq2seq=config.model.model_arch_type == "seq2seq",
        template=common_options(config.tokenizer.chat_template_kwargs),
        name=name,
    )


def encode_preferences(
    rows: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_prompt_length: int | None = None,
    truncation: Literal["keep_start", "keep_end"] = "keep_start",
    too_long: Literal["truncate", "drop"] = "truncate",
    seq2seq: bool = False,
    template: Mapping[str, Any] | None = None,
    name: str = "preferences",
) -> FlatRows[Preference]:
    """Encode preferences as token ids, in their order.

    A row is all strings or all lists of messages. Without a prompt, the messages or tokens that both answers begin
    with are the prompt. Chosen and rejected may repeat a prompt of messages, and a prompt of text may repeat a user's
    message in both. Answers of text end with EOS, answers of messages as the chat template ends them.

    Args:
        rows: Mappings with "chosen", "rejected" and optionally "prompt", "margin" and "tools" (for a chat template), or
            tuples (prompt, chosen, rejected), or another form that `pipelines/forms.py` lists. Token ids, which are
            taken as they are, have the names of TRL: "chosen_ids" or "input_ids_chosen" with "attention_mask_chosen".
        tokenizer: The tokenizer of the model.
        max_length: Longest prompt with its longer answer, in tokens.
        max_prompt_length: Longest prompt in tokens. A longer one is cut on the tokenizer's truncation side.
        truncation: The part to keep of a row that is longer than `max_length`. keep_start cuts the end of the answers;
            keep_end cuts the beginning of the prompt, and then of the answers.
        too_long: Whether to truncate such a row or to drop it. Either way a warning is logged; `Preference.lost` counts
            the lost tokens.
        seq2seq: Whether the model is an encoder-decoder, see `TextEncoder`. Every row then needs a prompt.
        template: Options of the chat template for all messages.
        name: The name of `rows` in errors.

    Raises:
        DataError: A row has another form, its answers are the same, or nothing is left of them. The error names it.
    """
    listed = row_list(rows, name)
    encoder = TextEncoder(tokenizer, seq2seq=seq2seq)

    def encoded(values: Any, row: int) -> Preference | None:
        place = f"{name}[{row}]"
        if seq2seq and _columns(values, place).get("prompt") is None:
            raise DataError(f"{place}: 'prompt' is missing; model.model_arch_type: seq2seq has an encoder to read it.")
        whole = preference = _encode(values, place, encoder, template)
        if max_prompt_length is not None:
            preference = replace(whole, prompt=encoder.cut_prompt(whole.prompt, max_prompt_length, whole.header))
        if len(preference.prompt) + max(len(preference.chosen), len(preference.rejected)) > max_length:
            if too_long == "drop":
                return None
            preference = _cut(preference, max_length, truncation, place, encoder)
        lost = Lost(*(before - after for before, after in zip(_sizes(whole), _sizes(preference), strict=True)))
        return replace(preference, lost=lost)

    options = [max_length, max_prompt_length, truncation, too_long, seq2seq, dict(template or {})]
    read = as_preference, ("prompt", "chosen", "rejected")
    kept = prepared(Preference, listed, read, encoded, encoder, *options, name=name)
    limits = [f"max_length ({max_length} tokens)"]
    if max_prompt_length is not None:
        limits += [f"max_prompt_length ({max_prompt_length})"]
    Truncation(kept, len(listed)).warn(name, " or ".join(limits))
    if not kept:
        raise DataError(f"{name}: all {len(listed)} rows are longer than max_length ({max_length} tokens).")
    return kept


def _sizes(pair: Preference) -> tuple[int, int]:
    """Count the tokens of the prompt, and of both answers together."""
    return len(pair.prompt), len(pair.chosen) + len(pair.rejected)


def _encode(values: Any, place: str, encoder: TextEncoder, template: Mapping[str, Any] | None) -> Preference:
    """Encode one row without cutting it."""
    row = _columns(values, place)
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    margin = _margin(row.get("margin"), place)
    if isinstance(chosen, str) and isinstance(rejected, str) and (prompt is None or isinstance(prompt, str)):
        preference = Preference(*_encode_texts(prompt, chosen, rejected, place, encoder), margin=margin)
    elif is_messages(chosen) and is_messages(rejected) and (prompt is None or is_messages(prompt)):
        start, *answers = _split_messages(prompt, chosen, rejected, place)
        options = template_options(row, template, place)
        first = encode_answer(start, answers[0], encoder.tokenizer, place=f"{place}, chosen", **options)
        second = encode_answer(start, answers[1], encoder.tokenizer, place=f"{place}, rejected", **options)
        preference = Preference(first.prompt.ids, first.ids, second.ids, margin=margin, header=first.prompt.header)
        if not all(first.assistant_mask + second.assistant_mask):
            preference.chosen_mask, preference.rejected_mask = first.assistant_mask, second.assistant_mask
    elif _is_ids(chosen) and _is_ids(rejected) and (prompt is None or _is_ids(prompt)):
        known = len(encoder.tokenizer)
        if strange := [token for ids in (prompt or [], chosen, rejected) for token in ids if not 0 <= token < known]:
            raise DataError(f"{place}: the token id {strange[0]} is none of the {known} of the tokenizer.")
        apart = (prompt, chosen, rejected) if prompt else _apart(chosen, rejected, encoder)
        preference = Preference(*apart, margin=margin)
    else:
        found = ", ".join(
            f"{name} a {type(row[name]).__name__}" for name in ("prompt", "chosen", "rejected") if name in row
        )
        raise DataError(f"{place}: all must be strings, or all lists of messages, not {found}.")
    for name, answer in (("chosen", preference.chosen), ("rejected", preference.rejected)):
        if not answer:
            raise DataError(f"{place}: {name} is empty.")
    if preference.chosen == preference.rejected:
        raise DataError(f"{place}: chosen and rejected are the same; there is nothing to prefer.")
    return preference


def _columns(values: Any, place: str) -> Mapping[str, Any]:
    """Return a row as a mapping that has chosen and rejected."""
    if isinstance(values, (tuple, list)) and len(values) == 3:
        return dict(zip(("prompt", "chosen", "rejected"), values, strict=True))
    if not isinstance(values, Mapping):
        raise DataError(
            f"{place} is a {type(values).__name__}; give a dict with 'chosen' and 'rejected', or "
            "(prompt, chosen, rejected)."
        )
    row: dict[str, Any] = {**values, **_token_ids(values)}
    missing = [repr(name) for name in ("chosen", "rejected") if row.get(name) is None]
    if missing:
        raise DataError(f"{place}: {' and '.join(missing)} missing; the row has {', '.join(map(repr, values))}.")
    return row


def _token_ids(row: Mapping[str, Any]) -> dict[str, list[int] | None]:
    """Return the token ids that a row has by the names of TRL, without padding, under the names of the texts.

    Text beside them is what they were made of. Without "prompt_ids", the ids of the answers begin with the prompt's.
    """
    found: dict[str, list[int] | None] = {}
    for side in ("chosen", "rejected", "prompt"):
        ids = next((row[name] for name in (f"{side}_ids", f"input_ids_{side}") if row.get(name) is not None), None)
        if ids is not None:
            mask = row.get(f"attention_mask_{side}")
            found[side] = list(map(int, ids if mask is None else compress(ids, mask)))
    return {"prompt": None, **found} if "chosen" in found else {}


def _is_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(isinstance(token, int) for token in value)


def _margin(value: Any, place: str) -> float:
    try:
        return 0.0 if value is None else finite(value)
    except (TypeError, ValueError):
        raise DataError(f"{place}: margin must be a finite number, not {value!r}.") from None


def _encode_texts(
    prompt: str | None, chosen: str, rejected: str, place: str, encoder: TextEncoder
) -> tuple[list[int], list[int], list[int]]:
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text:
            raise DataError(f"{place}: {name} is empty.")
    if prompt is not None:
        first, second = map(encoder.ended, encoder.following([chosen, rejected]))
        return encoder.opening([prompt])[0], first, second
    first, second = map(encoder.ended, encoder.opening([chosen, rejected]))
    return _apart(first, second, encoder)


def _apart(first: list[int], second: list[int], encoder: TextEncoder) -> tuple[list[int], list[int], list[int]]:
    """Take what two answers begin with as their prompt."""
    start = min(common_prefix(first, second), len(first) - 1, len(second) - 1)
    return first[:start] or [encoder.start], first[start:], second[start:]


def _split_messages(
    prompt: Sequence[Any] | None, chosen: Sequence[Any], rejected: Sequence[Any], place: str
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return the prompt, and the messages that follow it in each conversation."""
    if prompt is None:
        start = min(common_prefix(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        prompt, answers = chosen[:start], [chosen[start:], rejected[start:]]
    else:
        length, same = len(prompt), list(prompt)
        answers = [answer[length:] if list(answer[:length]) == same else answer for answer in (chosen, rejected)]
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not answer:
            raise DataError(f"{place}: {name} is empty after the prompt.")
        role = answer[0].get("role") if isinstance(answer[0], Mapping) else None
        if role != "assistant":
            raise DataError(
                f"{place}: the answers of chosen and rejected must begin with an assistant message; after what they "
                f"have in common, {name} goes on with {role!r}."
            )
    return prompt, answers[0], answers[1]


def _cut(preference: Preference, longest: int, truncation: str, place: str, encoder: TextEncoder) -> Preference:
    """Cut a preference whose prompt and longer answer do not fit together."""
    prompt, answers = preference.prompt, [preference.chosen, preference.rejected]
    if truncation == "keep_end":
        prompt = encoder.cut(prompt, max(1, longest - max(map(len, answers))), side="left")
        kept = slice(-(longest - len(prompt)), None) if longest > len(prompt) else slice(0)
    else:
        kept = slice(max(0, longest - len(prompt)))
    answers = [answer[kept] for answer in answers]
    masks = [mask and mask[kept] for mask in (preference.chosen_mask, preference.rejected_mask)]
    if not answers[0] or any(mask is not None and not any(mask) for mask in masks):
        raise DataError(
            f"{place}: nothing is left of the answers within max_length ({longest} tokens); the prompt alone has "
            f"{len(preference.prompt)}. Set max_prompt_length, or drop what is too long."
        )
    if answers[0] == answers[1]:
        raise DataError(
            f"{place}: chosen and rejected are the same within max_length ({longest} tokens). Raise it, or drop what "
            "is too long."
        )
    chosen, rejected = answers
    return replace(
        preference, prompt=prompt, chosen=chosen, rejected=rejected, chosen_mask=masks[0], rejected_mask=masks[1]
    )
