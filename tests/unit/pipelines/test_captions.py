"""Prompts for images: read from a list or made by a function, and refused by name where they are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from trlx_like.errors import DataError
from trlx_like.pipelines.captions import CaptionFunction, read_captions


def test_texts_and_what_came_with_them_stay_together() -> None:
    found = read_captions(["a", {"prompt": "b", "weight": 2, "negative_prompt": "z"}])
    assert (found.texts, found.metadata) == (["a", "b"], [{}, {"weight": 2, "negative_prompt": "z"}])
    assert found.repeated(2).texts == ["a", "a", "b", "b"]
    chosen = found[[1, 0]] + found[:1]
    assert (chosen.texts, [row.get("weight") for row in chosen.metadata]) == (["b", "a", "a"], [2, None, None])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("abc", "prompts is a string; give a list"),
        ([], "prompts is empty"),
        (["a", 3], r"prompts\[1\] is a int; give a string, or a dict with 'prompt'"),
        ([{"words": "a"}], r"prompts\[0\]: a dict needs a string under 'prompt'; it has \['words'\]"),
        ([{"prompt": "a", "images": 1}], r"prompts\[0\]: 'images' is already an argument of reward functions"),
        ([{"prompt": "a", "negative_prompt": 3}], r"prompts\[0\]: 'negative_prompt' must be a string"),
    ],
)
def test_errors_name_the_row(prompts: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_captions(prompts)


def test_a_function_is_called_once_a_prompt_and_its_calls_are_counted_on() -> None:
    numbers, seeds = count(), list[int]()

    @contextmanager
    def seeded(call: int) -> Iterator[None]:
        seeds.append(call)
        yield

    made = CaptionFunction(lambda: f"number {next(numbers)}", seeded)
    assert made.take(2).texts == ["number 0", "number 1"] and made.state_dict() == {"calls": 2}
    resumed = CaptionFunction(lambda: None, seeded)
    resumed.load_state_dict({"calls": 2})
    with pytest.raises(DataError, match="call 2 of prompts is a NoneType"):
        resumed.take(1)
    assert seeds == [0, 1, 2]
