"""Messages to token ids, by the tokenizer's chat template.

What the assistant said is what the template marks with `{% generation %}`, where it does. Else it is found by
comparing token ids: the template of the messages before a turn, with the header of an answer, has to begin that of the
messages up to the turn. So every turn is predicted from exactly the ids that it would be generated after. Templates
without marks that rewrite earlier turns are refused instead of being learnt from wrongly.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, TypeGuard

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from trlx_like.errors import ConfigError, DataError
from trlx_like.imports import import_name
from trlx_like.pipelines.tokens import Dialogue

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

_MARK = re.compile(r"{%-?\s*generation\s*-?%}")


def is_messages(value: Any) -> TypeGuard[Sequence[Message]]:
    """Whether a value is meant as messages: a list, not empty, that begins with a mapping."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


def template_options(
    row: Mapping[str, Any], common: Mapping[str, Any] | None = None, place: str = ""
) -> dict[str, Any]:
    """What the template is told beside a row's messages: the row's `tools` and `chat_template_kwargs`, before `common`.

    common: of all rows, as in `tokenizer.chat_template_kwargs`. Tools may be text, as data sets have them whose columns
    are typed; DataError for text that is no JSON list. place: how it names the row.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = None
        if not isinstance(tools, list):
            name = f"{place}: tools" if place else "tools"
            raise DataError(f"{name} must be a list of JSON schemas, or such a list as text, not {row['tools']!r:.60}.")
    own = {} if tools is None else {"tools": tools}
    return {**(common or {}), **own, **(row.get("chat_template_kwargs") or {})}


def common_options(options: Mapping[str, Any], option: str = "tokenizer.chat_template_kwargs") -> dict[str, Any]:
    """What the template is told with every conversation, functions among its `tools` as JSON schemas.

    A schema is made from a function's types and docstring; a function may be named, as "module:function". ConfigError
    for one that says too little about itself. option: how errors name the options.
    """
    tools = options.get("tools")
    return {**options, "tools": [_schema(tool, f"{option}.tools") for tool in tools]} if tools else dict(options)


def _schema(tool: Any, option: str) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        return dict(tool)
    function = import_name(tool, option) if isinstance(tool, str) else tool
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # transformers has its own kinds for these, which are not public
        raise ConfigError(
            f"{option}: {getattr(function, '__name__', function)!r} must be a function with types and a docstring of "
            f"each argument, or a JSON schema: {error}"
        ) from error
    return schema


@dataclass
class ChatPrompt:
    """Token ids of messages that are to be answered."""

    ids: list[int]
    header: int  # how many of the last ones begin an answer


def encode_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, place: str = "messages", **options: Any
) -> ChatPrompt:
    """A conversation that the model is to continue, with the header of an answer. DataError as `encode_chat`."""
    chat = _Chat(messages, tokenizer, place, options)
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{place} ends with an assistant message; a prompt ends with what is to be answered.")
    asked = chat.prompt(len(messages))
    return ChatPrompt(asked, len(asked) - _common(asked, chat.ids(len(messages))))


def encode_chat(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, place: str = "messages", **options: Any
) -> Dialogue:
    """Token ids of a conversation, and which of them the assistant said.

    messages: mappings with "role" and "content". place: how errors name the conversation (`samples[3]`). options: of
    the template, such as tools.

    The template says how a turn ends; what it writes after a turn's EOS is no output, nor is the header of an answer.
    DataError for anything but messages, for a tokenizer without template, and for a template without marks that writes
    a turn differently once others follow.
    """
    chat = _Chat(messages, tokenizer, place, options)
    turns = chat.turns()
    if turns and turns[0] == 0:
        raise chat.nothing_to_answer()
    whole = chat.ids(len(messages))
    if turns and chat.is_marked:
        header = encode_prompt(messages[: turns[0]], tokenizer, place=place, **options)
        spans = list(chat.marked_spans(header.ids[len(header.ids) - header.header :]))
    else:
        spans = [chat.span(turn, whole) for turn in turns]
    is_output = [False] * len(whole)
    for start, end in spans:
        is_output[start:end] = [True] * (end - start)
    return Dialogue(whole, is_output)


@dataclass
class ChatAnswer:
    """Token ids of a prompt, with the header of an answer, and of what answers it."""

    prompt: ChatPrompt
    ids: list[int]
    said: list[bool]  # which of `ids` are the assistant's own; others may speak between its turns


def encode_answer(
    prompt: Sequence[Message],
    answer: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    place: str = "messages",
    **options: Any,
) -> ChatAnswer:
    """A prompt and the messages that answer it.

    An answer ends with its last EOS, as a generated one does, if the template writes one. DataError as in
    `encode_chat`.
    """
    chat = _Chat([*prompt, *answer], tokenizer, place, options)
    if not prompt:
        raise chat.nothing_to_answer()
    before, whole = chat.around(len(prompt), len(prompt) + len(answer))
    ids = whole[len(before) : chat.said(whole, len(before))]
    said = [True] * len(ids)
    if len(answer) > 1:
        spans = [chat.span(turn, whole) for turn in chat.turns() if turn >= len(prompt)]
        own = {place for start, end in spans for place in range(start, end)}
        said = [place in own for place in range(len(before), len(before) + len(ids))]
    return ChatAnswer(ChatPrompt(before, len(before) - _common(before, chat.ids(len(prompt)))), ids, said)


def warn_of_ending(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
    """Says so if what answers the messages does not end with the tokenizer's EOS, at which generation stops."""
    try:
        answer = encode_answer(messages, [{"role": "assistant", "content": "."}], tokenizer, **options).ids
    except DataError:
        return  # whoever encodes the messages says what is wrong with them
    if answer[-1] != tokenizer.eos_token_id:
        logger.warning(
            "The chat template writes the answer '.' as %r, which does not end with the tokenizer's EOS, %r, where "
            "generation stops. Set tokenizer.tokenizer_extra_configs.eos_token to the token that ends a turn.",
            tokenizer.decode(answer, skip_special_tokens=False),
            tokenizer.eos_token,
        )


class _Chat:
    """One conversation and what the template makes of its parts."""

    def __init__(
        self,
        messages: Sequence[Message],
        tokenizer: PreTrainedTokenizerBase,
        place: str,
        options: Mapping[str, Any],
    ) -> None:
        _check(messages, place)
        self.tokenizer, self.place, self.options = tokenizer, place, options
        if tokenizer.chat_template is None and "chat_template" not in options:
            raise DataError(
                f"{place} has messages, but the tokenizer has no chat template: set its chat_template, take the "
                "tokenizer of a chat model, or give text."
            )
        self.messages = [dict(message) for message in messages]
        self._ids: dict[int, list[int]] = {}  # what `ids` has made, of which the whole is asked for twice
        self._drop_own_eos()

    def turns(self) -> list[int]:
        """Places of what the assistant says."""
        return [turn for turn, message in enumerate(self.messages) if message["role"] == "assistant"]

    def ids(self, end: int) -> list[int]:
        """Of the messages up to `end`."""
        if end not in self._ids:
            self._ids[end] = self._apply(end)["input_ids"]
        return self._ids[end]

    def prompt(self, end: int) -> list[int]:
        """Of the messages up to `end`, with the header of an answer."""
        ids: list[int] = self._apply(end, add_generation_prompt=True)["input_ids"]
        return ids

    @property
    def is_marked(self) -> bool:
        """Whether the template marks what the assistant says. Only a fast tokenizer can tell where that is."""
        template = self.tokenizer.get_chat_template(self.options.get("chat_template"), self.options.get("tools"))
        return self.tokenizer.is_fast and _MARK.search(template) is not None

    def marked_spans(self, header: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Where the template marks what the assistant says, header and what follows an EOS taken away."""
        encoded = self._apply(len(self.messages), return_assistant_tokens_mask=True)
        ids, marks = encoded["input_ids"], encoded["assistant_masks"]
        if not any(marks):
            raise DataError(f"{self.place}: the chat template has generation marks, but none around what is said here.")
        for mark, places in groupby(range(len(ids)), key=marks.__getitem__):
            run = list(places)
            if not mark:
                continue
            start, end = run[0], run[-1] + 1
            # Some templates mark the header too, or the part of it that opens a thought.
            for after in range(min(start + len(header), end), start, -1):
                if ids[max(after - len(header), 0) : after] == header:
                    start = after
                    break
            # The EOS after an answer is how it ends, marked or not: without it no model learns to stop.
            if ids[end : end + 1] == [self.tokenizer.eos_token_id]:
                end += 1
            yield start, self.said(ids[:end], start)

    def span(self, turn: int, whole: Sequence[int]) -> tuple[int, int]:
        """Where in the whole conversation a turn of the assistant is, found by prefix."""
        before, upto = self.around(turn, turn + 1)
        if whole[: len(upto)] != upto and upto[-1] == self.tokenizer.eos_token_id:
            upto = upto[:-1]  # some templates close a conversation with one, which is no turn's
        if whole[: len(upto)] != upto:
            raise self._rewritten(turn)
        return len(before), self.said(upto, len(before))

    def around(self, turn: int, end: int) -> tuple[list[int], list[int]]:
        """Ids that an assistant's turn is generated after, and those up to the message `end`, which begin with them."""
        before, upto = self.prompt(turn), self.ids(end)
        if not before or upto[: len(before)] != before:
            raise self._rewritten(turn)
        return before, upto

    def said(self, ids: Sequence[int], start: int) -> int:
        """Where what was said from `start` on ends: after its last EOS, or with the ids."""
        for end in range(len(ids), start, -1):
            if ids[end - 1] == self.tokenizer.eos_token_id:
                return end
        return len(ids)

    def nothing_to_answer(self) -> DataError:
        return DataError(f"{self.place} begins with an assistant message; there is nothing that it answers.")

    def _drop_own_eos(self) -> None:
        """Of answers that end with EOS as text, where the template writes one of its own."""
        eos, end = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        for turn, message in enumerate(self.messages):
            text = message.get("content")
            if message["role"] == "assistant" and eos and isinstance(text, str) and text.endswith(eos):
                message["content"] = text.removesuffix(eos)
                if turn == 0 or self._apply(turn + 1)["input_ids"].count(end) == self.prompt(turn).count(end):
                    message["content"] = text

    def _apply(self, end: int, **asked: Any) -> Any:
        try:
            # The template writes special tokens itself; transformers adds none to what it rendered.
            return self.tokenizer.apply_chat_template(
                self.messages[:end], tokenize=True, return_dict=True, **asked, **self.options
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise DataError(f"{self.place}: the chat template refuses the messages: {error}") from error

    def _rewritten(self, turn: int) -> DataError:
        return DataError(
            f"{self.place}: the chat template of {self.tokenizer.name_or_path or 'the tokenizer'} is not "
            f"prefix-stable: it writes message {turn} in other tokens than it would be generated in, or once others "
            "follow. Set a chat_template that keeps earlier turns as they are or marks answers with {% generation %}, "
            "or end the conversation with this message."
        )


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _check(messages: Any, place: str) -> None:
    if not is_messages(messages):
        raise DataError(f"{place} must be a list of messages, not {messages!r:.60}.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{place}: message {number} must have a role and content, not be {message!r:.60}.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{place}: message {number} ({message['role']}) has no content.")
