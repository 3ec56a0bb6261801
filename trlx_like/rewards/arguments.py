"""The arguments of a user's function: which keywords it accepts, and copies that it may change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trlx_like.errors import RewardError

Columns = Mapping[str, Sequence[Any]]
"""The columns of a batch by name, each a list with one entry per sample."""


def accepted(function: Callable[..., Any], keywords: Mapping[str, Any], own: Sequence[str]) -> Mapping[str, Any]:
    """Select the keywords that a function accepts: all of them if it has `**kwargs`.

    A function that requires `completions`, as those of TRL do, gets the outputs under this name. Of prompts that are
    messages it gets these, and each output as a list of one message, as from TRL.

    Args:
        function: The user's function.
        keywords: Everything that it may be called with.
        own: Names of the keywords that exist for every batch. The others are keys of the prompts.

    Raises:
        RewardError: The function requires an argument that is not among the keywords.
    """
    names, required, takes_all = parameters(function)
    if "completions" in required and "outputs" in keywords:
        outputs = keywords["outputs"]
        asked = [_conversation(given) for given in keywords.get("messages", [None] * len(outputs))]
        completions = [
            text if one is None else [{"role": "assistant", "content": text}]
            for text, one in zip(outputs, asked, strict=True)
        ]
        prompts = [text if one is None else one for text, one in zip(keywords["prompts"], asked, strict=True)]
        keywords = {"completions": completions, **keywords, "prompts": prompts}  # a key of the prompts goes first
    if missing := required - set(keywords):
        name = getattr(function, "label", None) or name_of(function)
        raise RewardError(
            f"{name} wants {', '.join(sorted(missing))}, which is neither {', '.join(own[:-1])} or "
            f"{own[-1]} nor a key of the prompts ({', '.join(sorted(set(keywords) - set(own))) or 'they have none'})."
        )
    return keywords if takes_all else {name: value for name, value in keywords.items() if name in names}


def _conversation(messages: Any) -> Any:
    """Return the messages that a prompt was; None for a column of other data, which ends with an answer."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return messages if isinstance(last, Mapping) and last.get("role", "assistant") != "assistant" else None


def parameters(function: Callable[..., Any]) -> tuple[set[str], set[str], bool]:
    """List the keywords that a function accepts, those that it requires, and whether it accepts any other.

    Functions of the library and questions of a rubric list required keys of the prompts in `required_keys`.
    """
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return set(), set(), True
    names = {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in found if p.default is p.empty and p.name in names} | set(
        getattr(function, "required_keys", ())
    )
    return names, required, any(p.kind is p.VAR_KEYWORD for p in found)


def keywords_of(columns: Columns, metadata: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Collect everything that a function may be called with: the batch, the tokenizer, the prompts' own keys."""
    return {
        **{name: _stacked(values) for name, values in columns.items()},
        "tokenizer": tokenizer,
        **metadata_columns(metadata),
    }


def metadata_columns(metadata: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn one mapping per prompt into one list per key, with None for a prompt that lacks the key."""
    names = {name: None for row in metadata for name in row}
    return {name: [row.get(name) for row in metadata] for name in names}


def metadata_rows(columns: Columns, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Turn one list per key into one mapping for each of the chosen rows."""
    return [{name: column[row] for name, column in columns.items()} for row in rows]


def copied(value: Any) -> Any:
    """Copy lists, dicts and PIL images, nested ones too; every other value is returned as it is."""
    if type(value) is list:
        return [copied(entry) for entry in value]
    if is_picture(value):
        return value.copy()
    return {key: copied(entry) for key, entry in value.items()} if type(value) is dict else value


def is_picture(value: Any) -> bool:
    """Tell whether a value is a PIL image, without importing PIL."""
    return any((kind.__module__, kind.__name__) == ("PIL.Image", "Image") for kind in type(value).__mro__)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function or callable object as errors show it."""
    return getattr(function, "__qualname__", type(function).__name__)


def _stacked(values: Sequence[Any]) -> Any:
    """Stack images that are tensors of one shape; return everything else as it is."""
    if not all(type(value).__module__ == "torch" for value in values) or len({value.shape for value in values}) != 1:
        return values
    import torch  # late: a worker process does without it if it can

    return torch.stack(list(values))
