"""Which characters of a response each sampled token wrote, and rewards of its parts as one number per sampled token.

The policy trains on the sampled ids. Text that is tokenised again often has other tokens, so rewards that were computed
on them are moved to the sampled token that completes the same characters.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from os.path import commonprefix
from typing import Any

logger = logging.getLogger(__name__)

Span = tuple[int, int, float]
"""A reward of some characters of a response: begin, end, and the reward."""

TOKEN_COLUMNS = ("output_ids", "output_offsets", "finish_reasons")
"""Arguments about the sampled tokens, which only functions get that name them."""


def offsets(ids: Sequence[int], text: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Return the characters of a text that each token wrote, begin and end.

    A token that wrote none, such as EOS or one behind a stop sequence, begins and ends at the same place. A character
    that several tokens write belongs to the last of them.

    Args:
        ids: The tokens of the response.
        text: The response as text, without special tokens.
        tokenizer: The tokenizer of the policy.
    """
    parts = [tokenizer.decode([token], skip_special_tokens=True) for token in ids]
    ends = [0]
    if "".join(parts).startswith(text):
        for part in parts:
            ends.append(min(ends[-1] + len(part), len(text)))
    else:
        whole = tokenizer.decode(list(ids), skip_special_tokens=True)
        shift = text[:1] == " " and not whole.startswith(text)  # some tokenizers drop the first space
        for count in range(1, len(ids) + 1):
            begun = " " * shift + tokenizer.decode(list(ids[:count]), skip_special_tokens=True)
            ends.append(max(ends[-1], len(commonprefix([begun, text]))))
    return list(pairwise(ends))


def align(reward: Sequence[Any], ids: Sequence[int], text: str, tokenizer: Any, *, sees_ids: bool) -> list[float]:
    """Return one reward per sampled token.

    Args:
        reward: Spans, of which there may be none; or numbers: one per token, in which the last one may be missing for
            an EOS; or one per token of the text, or of the text and EOS, as the tokenizer writes it anew, for a
            function that sees no ids.
        ids: The sampled tokens of the response.
        text: The response as text.
        tokenizer: The tokenizer of the policy.
        sees_ids: Whether the function gets the sampled ids.

    Raises:
        ValueError: A span is not within the text, or the number of rewards fits neither.
    """
    if not reward or isinstance(reward[0], tuple):
        return _placed(reward, offsets(ids, text, tokenizer), len(text))
    texts = [] if sees_ids else [text, text + (tokenizer.eos_token or "")]
    again = [tokenizer(words, add_special_tokens=special).input_ids for words in texts for special in (False, True)]
    fitting = [others for others in again if len(others) == len(reward)]
    if any(list(ids[: len(others)]) == others for others in fitting):
        return [*map(float, reward), *[0.0] * (len(ids) - len(reward))]  # the rest writes nothing, as EOS
    if fitting:
        say_moved()
        spans = [(*span, value) for span, value in zip(offsets(fitting[0], text, tokenizer), reward, strict=True)]
        return _placed([span for span in spans if span[0] < span[1] or span[2]], offsets(ids, text, tokenizer))
    complete = len(reward) == len(ids)
    if complete or (len(reward) == len(ids) - 1 and ids[-1] in tokenizer.all_special_ids):
        return [*map(float, reward), *[0.0] * (not complete)]
    found = "" if sees_ids else f", and {len(again[0])} if the text is tokenised again"
    raise ValueError(f"{len(reward)} per-token rewards for a response of {len(ids)} tokens{found}.")


@cache
def say_moved() -> None:
    """Log, once in a process, that rewards were computed on other tokens than the sampled ones."""
    logger.info(
        "Rewards per token of text that was tokenised again are moved to the sampled tokens that write the same "
        "characters. A function that takes output_ids gets the sampled tokens."
    )


def _placed(spans: Sequence[Span], places: Sequence[tuple[int, int]], longest: int | None = None) -> list[float]:
    """Add each span's reward to the token that writes its last character, and that of EOS to the last token."""
    rewards, ends = [0.0] * len(places), [end for _, end in places]
    for begin, end, value in spans:
        if longest is not None and not 0 <= begin < end <= longest:
            raise ValueError(f"the span ({begin}, {end}) is not within the {longest} characters of the output.")
        at_end = begin == end == ends[-1]
        rewards[len(ends) - 1 if at_end else min(bisect_left(ends, end), len(ends) - 1)] += value
    return rewards
