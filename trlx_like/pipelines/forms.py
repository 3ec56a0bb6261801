"""Recognising the forms in which data is published: each function rewrites one row to the form that a pipeline reads.

| form | columns |
|---|---|
| text | `text` |
| question and answer (gsm8k, MATH) | `question`, `answer`; `problem`, `solution`; `query`, `response` |
| Alpaca, Dolly | `instruction`, `input` or `context`, `output` or `response` |
| ShareGPT | `conversations` of `from` and `value`; `chosen` and `rejected` may be such an answer |
| messages | `messages`; or messages under `prompt` and `completion` |
| Anthropic-HH | `chosen` and `rejected`, each a whole dialogue of "Human:" and "Assistant:" |
| UltraFeedback | `prompt`, `chosen`, `rejected`; or `instruction` and `completions` with `overall_score` |
| KTO | `prompt`, `completion` and `label`, which is true or false, or 1 or 0 |
| scored logs | a sample with its `reward` or `score` in the same row |

A `system` or `system_prompt` in any of them is the system message, or stands before the text with an empty line. A row
of another form is returned as it is. Columns with other names are renamed by `data.columns` before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from os.path import commonprefix
from typing import Any

from trlx_like.errors import DataError
from trlx_like.pipelines.returns import finite
from trlx_like.pipelines.rows import is_messages

logger = logging.getLogger(__name__)

QUESTIONS = {"question": "answer", "problem": "solution", "query": "response"}
"""Columns of a prompt that has another name, and the column of its answer."""

OUTPUTS = ("output", "completion", "response")
"""Columns of the output of a sample before those in `QUESTIONS`; the first that a row has."""

SIDES = ("chosen", "rejected")
"""Columns of the answers of a preference."""

ASKED_WITH = ("tools", "chat_template_kwargs")
"""Columns with which a chat template makes another text of the same prompt."""

REWARDS = ("reward", "score")
"""Columns of the reward of a sample; the first that a row has."""

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""Roles of ShareGPT by the names of the others."""

SYSTEM = ("system", "system_prompt")
"""Columns of the system prompt; the first that a row has."""

ANSWERS = "\n\nAssistant:"
"""What stands before each answer of the assistant in a dialogue of Anthropic-HH."""


def as_prompt(row: Any) -> Any:
    """Return a row with its prompt under "prompt". The answer of a conversation is put under "reference"."""
    if not isinstance(row, Mapping):
        return row
    row = _led(_asked(row))
    if row.get("prompt") is not None:
        return row
    conversation = row.get("messages")
    if is_messages(conversation):
        last = conversation[-1]
        answered = isinstance(last, Mapping) and last.get("role") == "assistant"
        row = {name: value for name, value in row.items() if name != "messages"}
        row["prompt"] = conversation[:-1] if answered else conversation
        return {"reference": last.get("content"), **row} if answered else row
    if row.get("chosen") is not None:
        row = as_preference(row)
        if is_messages(row["chosen"]) and is_messages(row.get("rejected")):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(row["chosen"], row["rejected"], strict=False))
            row = {**row, "prompt": [message for message, _ in same]}
    if row.get("prompt") is None and isinstance(row.get("text"), str):
        row = {**{name: value for name, value in row.items() if name != "text"}, "prompt": row["text"]}
    return row


def split_prompt(value: Any, place: str, reserved: Sequence[str], *, chat: bool) -> tuple[Any, dict[str, Any]]:
    """Separate a prompt from the further keys that came with it.

    Args:
        value: Text, or a mapping that has text under "prompt" or one of the module's forms.
        place: The name of the row in errors.
        reserved: Keys that the row may not have, since reward functions are called with these keywords already.
        chat: Whether messages are accepted in place of text.

    Raises:
        DataError: The value has another form, or a reserved key.
    """
    forms = "a string or messages" if chat else "a string"
    value = as_prompt(value)
    prompt = value.get("prompt") if isinstance(value, Mapping) else value
    if not (isinstance(prompt, str) or (chat and is_messages(prompt))):
        if isinstance(value, Mapping):
            raise DataError(f"{place}: a dict needs {forms} under 'prompt'; it has {sorted(value)}.")
        raise DataError(f"{place} is a {type(value).__name__}; give {forms}, or a dict with 'prompt'.")
    keys = value if isinstance(value, Mapping) else {}
    for key in reserved:
        if key in keys:
            raise DataError(f"{place}: {key!r} is already an argument of reward functions; rename the key.")
    return prompt, {key: entry for key, entry in keys.items() if key != "prompt"}


def as_sample(row: Any) -> Any:
    """Return a row as text, as messages, or with its parts under "prompt" and "output"."""
    if not isinstance(row, Mapping):
        return row
    row, output = _answered(row)
    if is_messages(row.get("messages")):
        return row
    if row.get("prompt") is not None and output is not None:
        if is_messages(row["prompt"]) and is_messages(output):
            return {**row, "messages": [*row["prompt"], *output]}
        return {**row, "output": output}
    return row["text"] if output is None and isinstance(row.get("text"), str) else row


def as_preference(row: Any) -> Any:
    """Return a row with "chosen" and "rejected", and with "prompt" if it can be told from the answers."""
    if not isinstance(row, Mapping):
        return row
    row = _led(_matched(_continued(_asked(row)), SIDES))
    completions = row.get("completions")
    if row.get("chosen") is None and is_messages(completions) and len(completions) > 1:
        ranked = sorted(completions, key=lambda answer: float(answer.get("overall_score") or 0.0))
        return {**row, "chosen": ranked[-1].get("response"), "rejected": ranked[0].get("response")}
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if row.get("prompt") is None and isinstance(chosen, str) and isinstance(rejected, str):
        asked, found, _ = commonprefix([chosen, rejected]).rpartition(ANSWERS)
        if found:
            start = len(asked) + len(ANSWERS)
            return {**row, "prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:]}
    return row


def reward_of(row: Any) -> Any:
    """Return the reward that stands in the row of a sample, 1 or 0 for a label of KTO; None if it has none.

    The text of a number, as in a csv, becomes the number. Other text is returned as it is.
    """
    if not isinstance(row, Mapping):
        return None
    label = _label(row)
    found = next((row[name] for name in REWARDS if row.get(name) is not None), None if label is None else float(label))
    if isinstance(found, str):
        with suppress(ValueError):
            return finite(found)
    return found


def paired(rows: Sequence[Any], name: str) -> Sequence[Any]:
    """Make preferences from rows of KTO: the answers to each prompt that are labelled true and false, in their order.

    Args:
        rows: Rows of any form. Only if all are of KTO they are paired, else they are returned as they are.
        name: The name of the data in errors.

    Raises:
        DataError: No prompt has an answer of each label.
    """
    if not rows or any(_label(row) is None or "chosen" in row for row in rows):
        return rows
    answers: dict[str, tuple[dict[str, Any], tuple[list[Any], list[Any]]]] = {}
    for number, row in enumerate(rows):
        read, output = _answered(row)
        asked = read.get("prompt")
        if is_messages(said := read.get("messages")) and _is_answer(said[-1:]):
            asked, output = said[:-1], said[-1:]
        if asked is None or asked == [] or output is None:
            raise DataError(f"{name}[{number}] has a label, so it needs a prompt and a completion beside it.")
        about = {"prompt": asked, **{key: read[key] for key in ASKED_WITH if read.get(key) is not None}}
        answers.setdefault(repr(about), (about, ([], [])))[1][not _label(row)].append(output)
    pairs = [
        {**about, "chosen": chosen, "rejected": rejected}
        for about, (right, wrong) in answers.values()
        for chosen, rejected in zip(right, wrong, strict=False)
        if chosen != rejected
    ]
    if not pairs:
        raise DataError(f"{name} has labels, but no prompt has two answers, of which one is labelled true.")
    logger.info("%s: %d labelled answers make %d pairs.", name, len(rows), len(pairs))
    return pairs


def _answered(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """Return the row of a sample, with what was asked under "prompt" or "messages", and its output or None."""
    own = [answer for question, answer in QUESTIONS.items() if row.get(question) is not None]
    row = _led(_matched(_asked(row), OUTPUTS))
    names = (*OUTPUTS, *own, *QUESTIONS.values())  # MATH-500 has its solution and the answer in it
    return row, next((row[name] for name in names if row.get(name) is not None), None)


def _asked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with its question, instruction or conversation under "prompt" or "messages"."""
    row = {
        name: _said(value) if name in (*SIDES, "conversations", "conversation") else value
        for name, value in row.items()
    }
    said = next((name for name in ("conversations", "conversation") if is_messages(row.get(name))), None)
    if said is not None:
        row["messages"] = row.pop(said)
        return row
    if row.get("prompt") is not None:
        return row
    if isinstance(row.get("instruction"), str):
        used: tuple[str, ...] = ("instruction", "input", "context")
        prompt = "\n\n".join(row[name] for name in used if row.get(name))
    else:
        used = tuple(name for name in QUESTIONS if isinstance(row.get(name), str))[:1]
        if not used:
            return row
        prompt = row[used[0]]
    return {"prompt": prompt, **{name: value for name, value in row.items() if name not in (*used, "prompt")}}


def _matched(row: Mapping[str, Any], answers: Sequence[str]) -> Mapping[str, Any]:
    """Return a row of which one part was text and the other messages with messages only.

    Args:
        row: A row as `_asked` returns it.
        answers: The columns of answers.
    """
    given = [row[name] for name in answers if row.get(name) is not None]
    prompt = row.get("prompt")
    if is_messages(prompt):
        texts = [name for name in answers if isinstance(row.get(name), str)]
        return {**row, **{name: [{"role": "assistant", "content": row[name]}] for name in texts}}
    if isinstance(prompt, str) and given and all(map(is_messages, given)):
        if all(map(_is_answer, given)):
            return {**row, "prompt": [{"role": "user", "content": prompt}]}
        if all(any(_asks(message, prompt) for message in answer) for answer in given):
            return {**row, "prompt": None}  # some data sets repeat as text what the user asks in both conversations
    return row


def _continued(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row of a preference whose prompt is what its answers continue, if that stands under "messages"."""
    asked = row.get("messages")
    row = {name: value for name, value in row.items() if name != "messages"}
    sides = [row[name] for name in SIDES if row.get(name) is not None]
    if row.get("prompt") is None and is_messages(asked) and sides and all(map(_is_answer, sides)):
        row["prompt"] = asked[:-1] if _is_answer(asked[-1:]) else asked
    return row


def _is_answer(value: Any) -> bool:
    """Tell whether an answer is text, or messages that begin with the assistant's."""
    return isinstance(value, str) or (is_messages(value) and value[0].get("role") == "assistant")


def _led(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row that begins with its system prompt, if it has one and does not begin with it yet."""
    system = next((row[name] for name in SYSTEM if isinstance(row.get(name), str) and row[name]), None)
    if system is None:
        return row
    begin = next(([name] for name in ("prompt", "messages") if row.get(name) is not None), SIDES)
    led = dict(row)
    for name in begin:
        if is_messages(said := row.get(name)) and said[0].get("role") != "system":
            led[name] = [{"role": "system", "content": system}, *said]
        elif isinstance(said, str) and not said.startswith(system):
            led[name] = f"{system}\n\n{said}"
    return led


def _asks(message: Any, text: str) -> bool:
    """Tell whether a message is a text of the user."""
    said = message.get("content") if isinstance(message, Mapping) and message.get("role") == "user" else None
    return isinstance(said, str) and said.strip() == text.strip()


def _said(value: Any) -> Any:
    """Return what ShareGPT has somebody say as messages; another value as it is."""
    said = [value] if isinstance(value, Mapping) else value
    return [_message(one) for one in said] if is_messages(said) else value


def _message(said: Any) -> Any:
    if not isinstance(said, Mapping) or "from" not in said:
        return said
    return {"role": ROLES.get(str(said["from"]), str(said["from"])), "content": said.get("value")}


def _label(row: Any) -> bool | None:
    """Return the label of a row of KTO, which a table of text spells out; None if it has none."""
    label = row.get("label") if isinstance(row, Mapping) else None
    if isinstance(label, str):
        return {"true": True, "false": False, "1": True, "0": False}.get(label.lower())
    return bool(label) if isinstance(label, int) and label in (0, 1) else None
