"""Pairs of answers of which one is preferred, as token ids: what reward models and DPO learn from."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from trlx_like.errors import DataError
from trlx_like.pipelines.chat import encode_answer, is_messages, template_options
from trlx_like.pipelines.tokens import TextEncoder
from trlx_like.pipelines.truncation import Lost, Truncation


@dataclass
class Preference:
    """A prompt and two answers to it as token ids, none of them empty."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    said: tuple[list[bool], list[bool]] | None = None
    """Which tokens of either answer are the assistant's own, where it goes on after others; None: all."""
    margin: float = 0.0
    """By how much the chosen one is better, where the data says so."""
    header: int = field(default=0, compare=False)
    """How many of the prompt's last tokens begin an answer; they are not cut."""
    lost: Lost = field(default=Lost(), compare=False)
    """What was cut, of both answers together."""


class SamePreferences:
    """A digest of preferences, for checkpoints that hold what was made of them: other ones would go unread."""

    def __init__(self, preferences: Sequence[Preference], name: str = "preferences") -> None:
        self.name = name
        digest = hashlib.sha256()
        for pair in preferences:
            digest.update(array("q", [*pair.prompt, -1, *pair.chosen, -1, *pair.rejected, -1]).tobytes())
            digest.update(b"" if pair.said is None else bytes([*pair.said[0], *pair.said[1]]))
        self.state = {"pairs": len(preferences), "sha256": digest.hexdigest()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if dict(state) != self.state:
            raise DataError(
                f"{self.name}: the run that is resumed had {state['pairs']} pairs, and these {self.state['pairs']} are "
                "others. Give it the same ones, or start a new run from its hf_model."
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
) -> list[Preference]:
    """Preferences as token ids, their order kept.

    rows: mappings with "chosen" and "rejected" and, if they like, "prompt", "margin" and (for a chat template) "tools";
    or (prompt, chosen, rejected). All of a row is strings or all is lists of messages; chosen and rejected may repeat
    a prompt of messages, and a prompt of text a user's message in both. Without a prompt it is what both begin with:
    messages, or tokens of text. Answers of text end with EOS, those of messages as the chat template ends them.

    max_prompt_length: tokens of a prompt, cut on the tokenizer's truncation side. max_length: tokens of a prompt and
    an answer together. What is longer loses the end of the answer (keep_start) or the beginning of the prompt and then
    of the answer (keep_end), or the row is dropped. What is lost is in `Preference.lost`, and one line is logged about
    it. seq2seq: as of `TextEncoder`; a row of text needs a prompt of its own. template: what the chat template is told
    with all messages. name: what errors call rows.

    DataError, with the row, for anything else, and for answers that are the same or of which nothing is left.
    """
    if isinstance(rows, str):
        raise DataError(f"{name} is a string; give a list of rows.")
    if not len(rows):
        raise DataError(f"{name} is empty; give at least one row.")
    encoder = TextEncoder(tokenizer, seq2seq=seq2seq)
    kept: list[Preference] = []
    for row, values in enumerate(rows):
        place = f"{name}[{row}]"
        if seq2seq and _columns(values, place).get("prompt") is None:
            raise DataError(f"{place}: 'prompt' is missing; model.model_arch_type: seq2seq has an encoder to read it.")
        whole = preference = _encode(values, place, encoder, template)
        if max_prompt_length is not None:
            preference = replace(whole, prompt=encoder.cut_prompt(whole.prompt, max_prompt_length, whole.header))
        if len(preference.prompt) + max(len(preference.chosen), len(preference.rejected)) > max_length:
            if too_long == "drop":
                continue
            preference = _cut(preference, max_length, truncation, place, encoder)
        preference.lost = Lost(
            *(before - after for before, after in zip(_sizes(whole), _sizes(preference), strict=True))
        )
        kept.append(preference)
    limits = [f"max_length ({max_length} tokens)"]
    if max_prompt_length is not None:
        limits += [f"max_prompt_length ({max_prompt_length})"]
    Truncation.of((pair.lost for pair in kept), len(rows)).warn(name, " or ".join(limits))
    if not kept:
        raise DataError(f"{name}: all {len(rows)} rows are longer than max_length ({max_length} tokens).")
    return kept


def _sizes(pair: Preference) -> tuple[int, int]:
    """Tokens of the prompt, and of both answers."""
    return len(pair.prompt), len(pair.chosen) + len(pair.rejected)


def _encode(values: Any, place: str, encoder: TextEncoder, template: Mapping[str, Any] | None) -> Preference:
    row = _columns(values, place)
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if isinstance(prompt, str) and is_messages(chosen) and is_messages(rejected):
        # Some data sets say once more as text what the user asks in both conversations.
        asked = {"role": "user", "content": prompt}
        prompt = None if asked in chosen and asked in rejected else prompt
    margin = _margin(row.get("margin"), place)
    if isinstance(chosen, str) and isinstance(rejected, str) and (prompt is None or isinstance(prompt, str)):
        preference = Preference(*_encode_texts(prompt, chosen, rejected, place, encoder), margin=margin)
    elif is_messages(chosen) and is_messages(rejected) and (prompt is None or is_messages(prompt)):
        start, *answers = _split_messages(prompt, chosen, rejected, place)
        options = template_options(row, template, place)
        first = encode_answer(start, answers[0], encoder.tokenizer, place=f"{place}, chosen", **options)
        second = encode_answer(start, answers[1], encoder.tokenizer, place=f"{place}, rejected", **options)
        said = None if all(first.said) and all(second.said) else (first.said, second.said)
        header = first.prompt.header
        preference = Preference(first.prompt.ids, first.ids, second.ids, said, margin, header=header)
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
    if isinstance(values, (tuple, list)) and len(values) == 3:
        return dict(zip(("prompt", "chosen", "rejected"), values, strict=True))
    if not isinstance(values, Mapping):
        raise DataError(
            f"{place} is a {type(values).__name__}; give a dict with 'chosen' and 'rejected', or "
            "(prompt, chosen, rejected)."
        )
    missing = [repr(name) for name in ("chosen", "rejected") if values.get(name) is None]
    if missing:
        raise DataError(f"{place}: {' and '.join(missing)} missing; the row has {', '.join(map(repr, values))}.")
    return values


def _margin(value: Any, place: str) -> float:
    if value is None:
        return 0.0
    try:
        margin = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        margin = float("nan")
    if not math.isfinite(margin):
        raise DataError(f"{place}: margin must be a finite number, not {value!r}.")
    return margin


def _encode_texts(
    prompt: str | None, chosen: str, rejected: str, place: str, encoder: TextEncoder
) -> tuple[list[int], list[int], list[int]]:
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text:
            raise DataError(f"{place}: {name} is empty.")
    if prompt is not None:
        first, second = (_ended(ids, encoder) for ids in encoder.following([chosen, rejected]))
        return encoder.opening([prompt])[0], first, second
    first, second = (_ended(ids, encoder) for ids in encoder.opening([chosen, rejected]))
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    start = min(common, len(first) - 1, len(second) - 1)
    return first[:start] or [encoder.start], first[start:], second[start:]


def _ended(ids: list[int], encoder: TextEncoder) -> list[int]:
    return ids if ids[-1:] == [encoder.eos] else [*ids, encoder.eos]


def _split_messages(
    prompt: Sequence[Any] | None, chosen: Sequence[Any], rejected: Sequence[Any], place: str
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The prompt, and the messages that follow it in either conversation."""
    if prompt is None:
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
        start = min(common, len(chosen) - 1, len(rejected) - 1)
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
    """What fits of a preference of which some answer does not fit beside the prompt."""
    prompt, answers = preference.prompt, [preference.chosen, preference.rejected]
    if truncation == "keep_end":
        prompt = encoder.cut(prompt, max(1, longest - max(map(len, answers))), side="left")
        kept = slice(-(longest - len(prompt)), None) if longest > len(prompt) else slice(0)
    else:
        kept = slice(max(0, longest - len(prompt)))
    answers = [answer[kept] for answer in answers]
    said = preference.said and (preference.said[0][kept], preference.said[1][kept])
    if not answers[0] or (said and not all(map(any, said))):
        raise DataError(
            f"{place}: nothing is left of the answers within max_length ({longest} tokens); the prompt alone has "
            f"{len(preference.prompt)}. Set max_prompt_length, or drop what is too long."
        )
    if answers[0] == answers[1]:
        raise DataError(
            f"{place}: chosen and rejected are the same within max_length ({longest} tokens). Raise it, or drop what "
            "is too long."
        )
    return replace(preference, prompt=prompt, chosen=answers[0], rejected=answers[1], said=said)
