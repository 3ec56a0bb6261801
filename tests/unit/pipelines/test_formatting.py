"""A formatting function of rows, one of batches as for TRL 0.7, and those that look like the other kind."""

from __future__ import annotations

from typing import Any

import pytest

from trlx_like.errors import DataError
from trlx_like.pipelines import lines
from trlx_like.pipelines.formatting import BATCH, formatted

ROWS = [{"q": "abc", "a": "x", "n": 1}, {"q": "de", "a": "yz", "n": 2}]
TEXTS = ["### Q: abc ### A: x", "### Q: de ### A: yz"]


def of_batches(batch: dict[str, Any]) -> list[str]:
    """As in the pages of TRL 0.7: on a single row it would go through the letters of the question."""
    return [f"### Q: {batch['q'][i]} ### A: {batch['a'][i]}" for i in range(len(batch["q"]))]


def as_dialogue(row: dict[str, str]) -> list[str]:
    return [f"### Q: {row['q']}", f" ### A: {row['a']}"]


def as_messages(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["q"]}]


def strict_dialogue(row: dict[str, str]) -> list[str]:
    return [row["q"].strip(), row["a"].strip()]  # a list of strings has no strip


def test_by_rows_and_by_batches() -> None:
    assert formatted(ROWS, lambda row: f"### Q: {row['q']} ### A: {row['a']}") == TEXTS
    assert formatted(ROWS, of_batches) == TEXTS
    assert formatted(ROWS[1:], of_batches) == TEXTS[1:]
    assert formatted(ROWS * BATCH, of_batches) == TEXTS * BATCH  # two batches
    assert formatted([], of_batches) == []


@pytest.mark.parametrize("function", [as_dialogue, of_batches])
def test_many_rows_stay_text(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = formatted(ROWS * 2, function)
    monkeypatch.setattr(lines, "FEWEST", 3)
    large = lines.compact(ROWS * 2)
    made = formatted(large, function)
    assert isinstance(made, lines.JsonLines) == (function is as_dialogue)  # texts of batches are a list
    assert list(made) == expected


@pytest.mark.parametrize("function", [as_dialogue, as_messages, strict_dialogue])
def test_a_list_for_a_row_stays_one(function: Any) -> None:
    assert formatted(ROWS, function) == [function(row) for row in ROWS]
    assert formatted(["ab", "cd"], list) == [["a", "b"], ["c", "d"]]  # rows that are no dicts


def test_an_error_of_the_function_shows_the_row_that_it_got() -> None:
    with pytest.raises(TypeError) as caught:
        formatted(["a table of one column gives its cells"], lambda row: row["text"])
    assert caught.value.__notes__ == [
        "method.formatting_func got samples[0], a str: 'a table of one column gives its cells'"
    ]


def test_what_does_not_fit_is_refused() -> None:
    def first_two(batch: dict[str, Any]) -> list[str]:
        return [text[:3] for text in batch["q"]][:3]

    with pytest.raises(DataError, match=r"formatting_func returned 3 texts for 4 samples; it must return one per"):
        formatted([*ROWS, *ROWS], first_two)
    with pytest.raises(DataError, match=r"samples\[1\] has the keys \['q'\] and samples\[0\] has \['a', 'n', 'q'\]"):
        formatted([ROWS[0], {"q": "b"}], of_batches)
