"""Encoding samples as token ids: plain text, dialogues (prompt, output, prompt, output, ...), messages and dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trlx_like.data.columns import Column
from trlx_like.data.flat import FlatRows
from trlx_like.errors import DataError
from trlx_like.pipelines.chat import encode_chat, template_options, warn_of_ending
from trlx_like.pipelines.forms import as_sample
from trlx_like.pipelines.prepared import CHUNK, prepared
from trlx_like.pipelines.returns import RowRewards, SampleReward, place_rewards
from trlx_like.pipelines.rows import checked_rows, is_messages, row_list
from trlx_like.pipelines.tokens import Dialogue, TextEncoder
from trlx_like.pipelines.truncation import Lost, Truncation

__all__ = ["Dialogue", "encode_dialogues"]


def encode_dialogues(
    samples: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    rewards: Sequence[SampleReward] | None = None,
    *,
    seq2seq: bool = False,
    template: Mapping[str, Any] | None = None,
    name: str = "samples",
) -> FlatRows[Dialogue]:
    """Encode samples as token ids that end with EOS.

    A string is output from its second token on. The outputs of a dialogue are its second, fourth, ... turn. The outputs
    of messages are what the assistant says, and the chat template decides how they end.

    Args:
        samples: Strings, lists of strings (dialogues), lists of messages, or dicts with "prompt" and "output", with
            "messages" (and "tools"), or of another form that `pipelines/forms.py` lists.
        tokenizer: The tokenizer of the model.
        max_length: Longest sample in tokens. A longer one is cut on the tokenizer's truncation side, with a warning;
            `Dialogue.lost` counts its lost tokens. None cuts no sample.
        rewards: One entry per sample, see `place_rewards`. Rewards of outputs that are cut at the end go to the last
            token that is left. `RowRewards` are not read if the samples were prepared before.
        seq2seq: Whether the model is an encoder-decoder. A sample is then one prompt and one output, or plain text,
            whose prompt is empty; `max_length` counts the tokens of both.
        template: Options of the chat template for all messages.
        name: The name of `samples` in errors.

    Raises:
        DataError: A sample has another form, or no output is left of it. The error names the row.
    """
    listed = row_list(samples, name)
    encoder = TextEncoder(tokenizer, seq2seq=seq2seq)
    if any(is_messages(_conversation(as_sample(sample))) for sample in checked_rows(listed[:CHUNK], name)):
        warn_of_ending(tokenizer, template)

    def encoded(sample: Any, row: int) -> Dialogue:
        dialogue = _encode(sample, f"{name}[{row}]", encoder, template)
        if rewards:
            dialogue.rewards = place_rewards(rewards[row], dialogue.is_output, row)
        return (_cut_pair if seq2seq else _cut)(dialogue, max_length or len(dialogue), encoder)

    about = rewards.about if isinstance(rewards, RowRewards) else rewards
    read, options = (as_sample, ("prompt", "output")), [max_length, seq2seq, dict(template or {}), about]
    dialogues = prepared(Dialogue, listed, read, encoded, encoder, *options, name=name)
    Truncation(dialogues).warn(name, f"train.seq_length ({max_length} tokens)")
    for row in np.flatnonzero(dialogues.sums("is_output") == 0)[:1]:
        raise DataError(
            f"{name}[{row}]: no output is left within train.seq_length ({max_length} tokens); "
            f"{'shorten its prompt' if any(dialogues[int(row)].lost) else 'it is empty'}."
        )
    return dialogues


def columns_of(dialogues: FlatRows[Dialogue], at: Tensor | None = None) -> dict[str, Column]:
    """Return the fields of completions, of which token number `at` begins the response of each sample.

    Args:
        dialogues: The samples.
        at: [N] int64; None: the second token of each.
    """
    ids = Column.of(dialogues, "ids")
    assert ids.lengths is not None
    prompt = torch.ones_like(ids.lengths) if at is None else at
    rest = ids.lengths - prompt
    return {
        "prompt": ids.part(0, prompt),
        "prompt_mask": Column.true(prompt),
        "response": ids.part(prompt, rest),
        "mask": Column.true(rest),
    }


def first_outputs(dialogues: FlatRows[Dialogue]) -> Tensor:
    """Return the number of the first output in each sample. The first token of a sample is never one. [N] int64"""
    outputs, lengths = dialogues.values("is_output"), dialogues.lengths("is_output")
    starts = np.cumsum(lengths) - lengths
    begins = np.flatnonzero(outputs[1:] > outputs[:-1]) + 1
    return torch.from_numpy(begins[np.searchsorted(begins, starts)] - starts)


def _conversation(sample: Any) -> Any:
    """Return what a sample has in the place of its messages."""
    return sample.get("messages") if isinstance(sample, Mapping) else sample


def _turns(sample: Any, place: str) -> list[str]:
    """Return the alternating prompts and outputs of a sample, or a single output for plain text."""
    if isinstance(sample, Mapping):
        if sample.get("prompt") is None or sample.get("output") is None:
            raise DataError(
                f"{place}: a dict needs 'prompt' and 'output' (or 'completion'); it has {sorted(sample)}. Name its "
                "columns in data.columns."
            )
        parts = {name: sample[name] for name in ("prompt", "output")}
        if strange := [f"{name} is {value!r:.60}" for name, value in parts.items() if not isinstance(value, str)]:
            raise DataError(f"{place}: both must be strings, or both lists of messages; {' and '.join(strange)}.")
        sample = tuple(parts.values())
    turns = [sample] if isinstance(sample, str) else sample
    if not isinstance(turns, Sequence) or not all(isinstance(turn, str) for turn in turns):
        raise DataError(
            f"{place} is a {type(sample).__name__}; give a string, a list of strings (prompt, output, ...) "
            "or a dict with 'prompt' and 'output'."
        )
    if not isinstance(sample, str) and (not turns or len(turns) % 2):
        raise DataError(f"{place} has {len(turns)} turns; a dialogue alternates prompt and output: 2, 4, ...")
    return list(turns)


def _encode(sample: Any, place: str, encoder: TextEncoder, template: Mapping[str, Any] | None) -> Dialogue:
    """Encode one sample without cutting it."""
    conversation = _conversation(sample)
    turns = [] if is_messages(conversation) else _turns(sample, place)
    if encoder.seq2seq and len(turns) not in (1, 2):
        what = f"has {len(turns)} turns" if turns else "is messages"
        raise DataError(f"{place} {what}; model.model_arch_type: seq2seq needs one prompt and one output.")
    if is_messages(conversation):
        if not any(isinstance(message, Mapping) and message.get("role") == "assistant" for message in conversation):
            raise DataError(f"{place} has no assistant message; there is nothing to learn.")
        options = template_options(sample if isinstance(sample, Mapping) else {}, template, place)
        return encode_chat(conversation, encoder.tokenizer, place=place, **options)
    if encoder.seq2seq and len(turns) == 1:
        turns = ["", *turns]  # the encoder reads an empty prompt: the tokenizer's special tokens, or BOS
    ids = [encoder.opening(turns[:1])[0], *encoder.following(turns[1:])]
    ids[-1] = encoder.ended(ids[-1])
    alone = len(turns) == 1
    is_output = [bool(alone or turn % 2) for turn, part in enumerate(ids) for _ in part]
    return Dialogue([token for part in ids for token in part], is_output)


def _cut(dialogue: Dialogue, longest: int, encoder: TextEncoder) -> Dialogue:
    """Cut a dialogue. Its first token is no output, since it has nothing to be predicted from."""
    kept = encoder.cut(dialogue.is_output, longest, ids=dialogue.ids)
    is_output = [False, *kept[1:]]
    rewards = dialogue.rewards and encoder.cut(dialogue.rewards, longest, ids=dialogue.ids)
    if rewards and dialogue.rewards and any(is_output) and encoder.tokenizer.truncation_side == "right":
        rewards[max(place for place, output in enumerate(is_output) if output)] += sum(dialogue.rewards[longest:])
    return Dialogue(encoder.cut(dialogue.ids, longest), is_output, rewards, _lost(dialogue.is_output, kept))


def _lost(before: Sequence[bool], after: Sequence[bool]) -> Lost:
    """Count the lost tokens, given which tokens are outputs before and after a cut."""
    outputs = sum(before) - sum(after)
    return Lost(len(before) - len(after) - outputs, outputs)


def _cut_pair(dialogue: Dialogue, longest: int, encoder: TextEncoder) -> Dialogue:
    """Cut a prompt and its output. A prompt that is cut before its output keeps at least one token."""
    prompt, output = dialogue.split()
    rewards = (dialogue.rewards or [0.0] * len(dialogue))[len(prompt) :]
    if encoder.tokenizer.truncation_side == "left":
        prompt = encoder.cut(prompt, max(longest - len(output), 1))
    room = max(longest - len(prompt), 0)
    output, kept = output[:room], rewards[:room]
    if kept:
        kept[-1] += sum(rewards[room:])
    is_output = [False] * len(prompt) + [True] * len(output)
    placed = dialogue.rewards and [0.0] * len(prompt) + kept
    return Dialogue(prompt + output, is_output, placed, _lost(dialogue.is_output, is_output))
