"""Messages to token ids, by the tokenizer's chat template.

What the assistant said is found by comparing token ids: the template of the messages before a turn, with the header of
an answer, has to begin that of the messages up to the turn. So every turn is predicted from exactly the ids that it
would be generated after. Templates that rewrite earlier turns are refused instead of being learnt from wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trlx_like.errors import DataError
from trlx_like.pipelines.tokens import Dialogue

Message = Mapping[str, Any]


def is_messages(value: Any) -> TypeGuard[Sequence[Message]]:
    """Whether a value is meant as messages: a list, not empty, that begins with a mapping."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row of data says to the template beside its messages: `tools`, and `chat_template_kwargs`."""
    tools = {} if row.get("tools") is None else {"tools": row["tools"]}
    return {**tools, **(row.get("chat_template_kwargs") or {})}


def encode_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool = False,
    *,
    place: str = "messages",
    **options: Any,
) -> Dialogue:
    """Token ids of a conversation, and which of them the assistant said.

    messages: mappings with "role" and "content". add_generation_prompt: end with the header of an answer, as a prompt
    does. place: how errors name the conversation (`samples[3]`). options: of the template, such as tools.

    The template says how a turn ends; what it writes after a turn's EOS is no output. DataError for anything but
    messages, for a tokenizer without template, and for a template that writes a turn differently once others follow.
    """
    _check(messages, place)
    if add_generation_prompt and messages[-1]["role"] == "assistant":
        raise DataError(f"{place} ends with an assistant message; a prompt ends with what is to be answered.")
    whole = _ids(messages, tokenizer, place, add_generation_prompt, options)
    is_output = [False] * len(whole)
    for turn in (turn for turn, message in enumerate(messages) if message["role"] == "assistant"):
        before, upto = _around(messages, turn, turn + 1, tokenizer, place, options)
        if whole[: len(upto)] != upto:
            raise _rewritten(place, turn, tokenizer)
        end = _said(upto, len(before), tokenizer)
        is_output[len(before) : end] = [True] * (end - len(before))
    return Dialogue(whole, is_output)


def encode_answer(
    prompt: Sequence[Message],
    answer: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    place: str = "messages",
    **options: Any,
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, with the header of an answer, and of the messages that answer it.

    An answer ends with its last EOS, as a generated one does, if the template writes one. DataError as in
    `encode_chat`.
    """
    messages = [*prompt, *answer]
    _check(messages, place)
    before, whole = _around(messages, len(prompt), len(messages), tokenizer, place, options)
    return before, whole[len(before) : _said(whole, len(before), tokenizer)]


def _around(
    messages: Sequence[Message],
    turn: int,
    end: int,
    tokenizer: PreTrainedTokenizerBase,
    place: str,
    options: Mapping[str, Any],
) -> tuple[list[int], list[int]]:
    """Ids that an assistant's turn is generated after, and ids up to the message `end`. The first begin the second."""
    if turn == 0:
        raise DataError(f"{place} begins with an assistant message; there is nothing that it answers.")
    before = _ids(messages[:turn], tokenizer, place, True, options)
    upto = _ids(messages[:end], tokenizer, place, False, options)
    if not before or upto[: len(before)] != before:
        raise _rewritten(place, turn, tokenizer)
    return before, upto


def _said(ids: Sequence[int], start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Where what was said from `start` on ends: after its last EOS, or with the ids."""
    for end in range(len(ids), start, -1):
        if ids[end - 1] == tokenizer.eos_token_id:
            return end
    return len(ids)


def _ids(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    place: str,
    add_generation_prompt: bool,
    options: Mapping[str, Any],
) -> list[int]:
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise DataError(
            f"{place} has messages, but the tokenizer has no chat template: set its chat_template, take the tokenizer "
            "of a chat model, or give text."
        )
    try:
        # The template writes special tokens itself; transformers adds none to what it rendered.
        encoded: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=True,
            **options,
        )
    except (TemplateError, ValueError) as error:
        raise DataError(f"{place}: the chat template refuses the messages: {error}") from error
    ids: list[int] = encoded["input_ids"]
    return ids


def _check(messages: Any, place: str) -> None:
    if not is_messages(messages):
        raise DataError(f"{place} must be a list of messages, not {messages!r:.60}.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{place}: message {number} must have a role and content, not be {message!r:.60}.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{place}: message {number} ({message['role']}) has no content.")


def _rewritten(place: str, turn: int, tokenizer: PreTrainedTokenizerBase) -> DataError:
    return DataError(
        f"{place}: the chat template of {tokenizer.name_or_path or 'the tokenizer'} is not prefix-stable: it writes "
        f"message {turn} in other tokens than it would be generated in, or once others follow. Set a chat_template "
        "that keeps earlier turns as they are, or end the conversation with this message."
    )
