"""Encoding messages as token ids with the tokenizer's chat template.

The tokens of the assistant are those that the template marks with `{% generation %}`. In a template without marks they
are found by comparing token ids: the ids of the messages before a turn, with the header of an answer, have to be a
prefix of the ids up to the turn. So every turn is predicted from exactly the ids that it would be generated after. A
template without marks that rewrites earlier turns is refused, since its turns would be learned wrongly.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakSet

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from trlx_like.errors import ConfigError, DataError, raised_as
from trlx_like.imports import import_name
from trlx_like.pipelines.rows import Message as Message, is_messages as is_messages
from trlx_like.pipelines.tokens import Dialogue, common_prefix

logger = logging.getLogger(__name__)

_looked_at: WeakSet[PreTrainedTokenizerBase] = WeakSet()  # by `warn_of_ending`
_MARK = re.compile(r"{%-?\s*generation\s*-?%}")


def template_options(
    row: Mapping[str, Any], common: Mapping[str, Any] | None = None, place: str = ""
) -> dict[str, Any]:
    """Collect the options of the chat template for one row.

    Args:
        row: A row with `tools` and `chat_template_kwargs`, which override `common`. Tools may be a JSON list as text,
            as in data sets with typed columns.
        common: Options for all rows, as `tokenizer.chat_template_kwargs`.
        place: The name of the row in errors.

    Raises:
        DataError: `tools` is text, but not a JSON list.
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
    """Prepare the options of the chat template for all conversations.

    Args:
        options: The options. Functions among their `tools`, given as such or named as "module:function", are replaced
            by JSON schemas, which are made from the functions' types and docstrings.
        option: The name of the options in errors.

    Raises:
        ConfigError: A function lacks types or a docstring.
    """
    tools = options.get("tools")
    return {**options, "tools": [_schema(tool, f"{option}.tools") for tool in tools]} if tools else dict(options)


def _schema(tool: Any, option: str) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        return dict(tool)
    function = import_name(tool, option) if isinstance(tool, str) else tool
    wanted = "must be a function with types and a docstring of each argument, or a JSON schema"
    # Exception: transformers has its own kinds for these, which are not public.
    with raised_as(ConfigError, Exception, f"{option}: {getattr(function, '__name__', function)!r} {wanted}"):
        return dict(get_json_schema(function))


@dataclass
class ChatPrompt:
    """Hold the token ids of messages that the model is to answer."""

    ids: list[int]
    header: int  # how many of the last ids are the header of an answer


def encode_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, place: str = "messages", **options: Any
) -> ChatPrompt:
    """Encode a conversation that the model is to continue, with the header of an answer at its end.

    The arguments and errors are those of `encode_chat`.
    """
    chat = _Chat(messages, tokenizer, place, options)
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{place} ends with an assistant message; a prompt ends with what is to be answered.")
    asked = chat.prompt(len(messages))
    return ChatPrompt(asked, len(asked) - common_prefix(asked, chat.ids(len(messages))))


def encode_chat(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, place: str = "messages", **options: Any
) -> Dialogue:
    """Encode a conversation, with the assistant's turns as its outputs.

    The template decides how a turn ends. Tokens that it writes after a turn's EOS are no output, nor is the header of
    an answer.

    Args:
        messages: Mappings with "role" and "content".
        tokenizer: A tokenizer with a chat template.
        place: The name of the conversation in errors, such as `samples[3]`.
        **options: Options of the template, such as tools.

    Raises:
        DataError: `messages` has another form, the tokenizer has no chat template, or a template without marks writes
            a turn differently once other turns follow.
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
    """Hold the token ids of a prompt, with the header of an answer, and of the messages that answer it."""

    prompt: ChatPrompt
    ids: list[int]
    assistant_mask: list[bool]  # which of `ids` the assistant says; others may speak between its turns


def encode_answer(
    prompt: Sequence[Message],
    answer: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    place: str = "messages",
    **options: Any,
) -> ChatAnswer:
    """Encode a prompt and the messages that answer it.

    An answer ends with its last EOS, as a generated one does, if the template writes one.

    Args:
        prompt: The messages before the answer.
        answer: The messages from the assistant's first turn on.
        tokenizer: A tokenizer with a chat template.
        place: The name of the conversation in errors.
        **options: Options of the template, such as tools.

    Raises:
        DataError: As `encode_chat`.
    """
    chat = _Chat([*prompt, *answer], tokenizer, place, options)
    if not prompt:
        raise chat.nothing_to_answer()
    before, whole = chat.around(len(prompt), len(prompt) + len(answer))
    ids = whole[len(before) : chat.end_of_turn(whole, len(before))]
    mask = [True] * len(ids)
    if len(answer) > 1:
        spans = [chat.span(turn, whole) for turn in chat.turns() if turn >= len(prompt)]
        own = {place for start, end in spans for place in range(start, end)}
        mask = [place in own for place in range(len(before), len(before) + len(ids))]
    return ChatAnswer(ChatPrompt(before, len(before) - common_prefix(before, chat.ids(len(prompt)))), ids, mask)


def warn_of_ending(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None) -> None:
    """Log a warning, once, if the template ends an answer without the tokenizer's EOS, where generation stops."""
    if tokenizer in _looked_at:
        return
    _looked_at.add(tokenizer)
    asked, said = ({"role": role, "content": "."} for role in ("user", "assistant"))
    try:
        answer = encode_answer([asked], [said], tokenizer, **(options or {})).ids
    except DataError:
        return  # encoding the messages of the data will raise it again, or their form is another one
    if answer[-1:] != [tokenizer.eos_token_id]:
        logger.warning(
            "The chat template writes the answer '.' as %r, which does not end with the tokenizer's EOS, %r, where "
            "generation stops. Set tokenizer.tokenizer_extra_configs.eos_token to the token that ends a turn.",
            tokenizer.decode(answer, skip_special_tokens=False),
            tokenizer.eos_token,
        )


class _Chat:
    """One conversation, and the token ids that the template gives for its parts."""

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
                f"{place} has messages, but the tokenizer has no chat template: set tokenizer.chat_template (such as "
                "chatml), take the tokenizer of a chat model, or give text."
            )
        self.messages = [dict(message) for message in messages]
        self._ids: dict[int, list[int]] = {}  # cache of `ids`
        self._drop_own_eos()

    def turns(self) -> list[int]:
        """Return the places of the assistant's messages."""
        return [turn for turn, message in enumerate(self.messages) if message["role"] == "assistant"]

    def ids(self, end: int) -> list[int]:
        """Return the ids of the messages up to `end`."""
        if end not in self._ids:
            self._ids[end] = self._apply(end)["input_ids"]
        return self._ids[end]

    def prompt(self, end: int) -> list[int]:
        """Return the ids of the messages up to `end`, with the header of an answer."""
        ids: list[int] = self._apply(end, add_generation_prompt=True)["input_ids"]
        return ids

    @property
    def is_marked(self) -> bool:
        """Whether the template marks what the assistant says. Only a fast tokenizer can locate the marks."""
        template = self.tokenizer.get_chat_template(self.options.get("chat_template"), self.options.get("tools"))
        return self.tokenizer.is_fast and _MARK.search(template) is not None

    def marked_spans(self, header: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Iterate over the spans that the template marks, without the header and what follows an EOS."""
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
            # The EOS after an answer belongs to it, marked or not: without it no model learns to stop.
            if ids[end : end + 1] == [self.tokenizer.eos_token_id]:
                end += 1
            yield start, self.end_of_turn(ids[:end], start)

    def span(self, turn: int, whole: Sequence[int]) -> tuple[int, int]:
        """Find the span of an assistant's turn in the whole conversation by comparing prefixes."""
        before, upto = self.around(turn, turn + 1)
        if whole[: len(upto)] != upto and upto[-1] == self.tokenizer.eos_token_id:
            upto = upto[:-1]  # some templates end the conversation with an EOS that belongs to no turn
        if whole[: len(upto)] != upto:
            raise self._rewritten(turn)
        return len(before), self.end_of_turn(upto, len(before))

    def around(self, turn: int, end: int) -> tuple[list[int], list[int]]:
        """Return the ids before an assistant's turn, and the ids up to the message `end`, which begin with them."""
        before, upto = self.prompt(turn), self.ids(end)
        if not before or upto[: len(before)] != before:
            raise self._rewritten(turn)
        return before, upto

    def end_of_turn(self, ids: Sequence[int], start: int) -> int:
        """Return where a turn that begins at `start` ends: after the last EOS, or at the end of the ids."""
        ends = (end for end in range(len(ids), start, -1) if ids[end - 1] == self.tokenizer.eos_token_id)
        return next(ends, len(ids))

    def nothing_to_answer(self) -> DataError:
        return DataError(f"{self.place} begins with an assistant message; there is nothing that it answers.")

    def _drop_own_eos(self) -> None:
        """Remove EOS from the text of answers for which the template writes an EOS itself."""
        eos, end = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        for turn, message in enumerate(self.messages):
            text = message.get("content")
            if message["role"] == "assistant" and eos and isinstance(text, str) and text.endswith(eos):
                message["content"] = text.removesuffix(eos)
                if turn == 0 or self._apply(turn + 1)["input_ids"].count(end) == self.prompt(turn).count(end):
                    message["content"] = text

    def _apply(self, end: int, **asked: Any) -> Any:
        # A template is a program, which may divide by zero or recurse without end.
        with raised_as(DataError, Exception, f"{self.place}: the chat template refuses the messages"):
            # The template writes special tokens itself, and transformers adds none to the text that it renders.
            return self.tokenizer.apply_chat_template(
                self.messages[:end], tokenize=True, return_dict=True, **asked, **self.options
            )

    def _rewritten(self, turn: int) -> DataError:
        return DataError(
            f"{self.place}: the chat template of {self.tokenizer.name_or_path or 'the tokenizer'} is not "
            f"prefix-stable: it writes message {turn} in other tokens than it would be generated in, or once others "
            "follow. Set a chat_template that keeps earlier turns as they are or marks answers with {% generation %}, "
            "or end the conversation with this message."
        )


def _check(messages: Any, place: str) -> None:
    """Raise DataError unless a value is a list of messages that each have a role and content."""
    if not is_messages(messages):
        raise DataError(f"{place} must be a list of messages, not {messages!r:.60}.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{place}: message {number} must have a role and content, not be {message!r:.60}.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{place}: message {number} ({message['role']}) has no content.")
