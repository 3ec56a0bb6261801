"""Pairs that are too long: which side is cut, what is kept, and the line that says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.tiny import tiny_tokenizer
from tests.unit.pipelines.test_preferences import EOS, A, B, C, D, E, encoded, row
from tests.unit.pipelines.test_tokens import with_bos
from trlx_like.pipelines.preferences import Preference


@pytest.mark.parametrize(
    ("longest", "truncation", "wanted"),
    [
        # Prompt a b c, answers d e <eos> and e <eos>: 6 and 5 tokens.
        (6, "keep_start", ([A, B, C], [D, E, EOS], [E, EOS])),
        (5, "keep_start", ([A, B, C], [D, E], [E, EOS])),
        (4, "keep_start", ([A, B, C], [D], [E])),
        (5, "keep_end", ([B, C], [D, E, EOS], [E, EOS])),
        (4, "keep_end", ([C], [D, E, EOS], [E, EOS])),
    ],
)
def test_max_length_golden(longest: int, truncation: Any, wanted: tuple[list[int], list[int], list[int]]) -> None:
    assert encoded(("abc", "de", "e"), max_length=longest, truncation=truncation) == [Preference(*wanted)]


def test_keep_end_cuts_answers_only_beside_a_prompt_of_one_token() -> None:
    # Prompt a b c, answers d e <eos> and e d e <eos>, in 3 tokens.
    cut = encoded(("abc", "dee", "edd"), max_length=4, truncation="keep_end")
    assert cut == [Preference([C], [E, E, EOS], [D, D, EOS])]


def test_keep_end_keeps_bos() -> None:
    (cut,) = encoded(("abc", "d", "e"), tokenizer=with_bos(), max_length=4, truncation="keep_end")
    assert cut == Preference([2, 5], [6, EOS], [7, EOS])


@pytest.mark.parametrize(
    ("side", "bos", "wanted"), [("right", False, [A, B]), ("left", False, [C, D]), ("left", True, [2, 6])]
)
def test_max_prompt_length_cuts_on_the_side_of_the_tokenizer(side: str, bos: bool, wanted: list[int]) -> None:
    tokenizer = with_bos() if bos else tiny_tokenizer()
    tokenizer.truncation_side = side
    (cut,) = encoded(("abcd", "a", "b"), tokenizer=tokenizer, max_prompt_length=2)
    assert cut.prompt == wanted and len(cut.chosen) == 2


def test_one_line_says_what_was_cut_or_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """(abcd, b, c) loses d. Of (abc, bcd<eos>, cde<eos>) five tokens leave room for two of each answer's four."""
    rows = [("a", "b", "c"), ("abcd", "b", "c"), ("abc", "bcd", "cde"), row("bb", "cc", prompt="a")]
    with caplog.at_level(logging.WARNING, "trlx_like"):
        assert len(encoded(*rows, max_length=5, max_prompt_length=3)) == 4
        dropped = encoded(*rows, max_length=5, max_prompt_length=3, too_long="drop")
    assert [len(preference.prompt) for preference in dropped] == [1, 3, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 4 preferences are longer than max_length (5 tokens) or max_prompt_length (3) and were cut: 1 tokens of "
        "prompts and 4 tokens of 1 outputs are lost.",
        "1 of 4 preferences are longer than max_length (5 tokens) or max_prompt_length (3) and were dropped.",
        "1 of 4 preferences are longer than max_length (5 tokens) or max_prompt_length (3) and were cut: 1 tokens of "
        "prompts are lost.",
    ]


def test_nothing_is_said_where_all_fits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trlx_like"):
        encoded(("a", "b", "c"), max_length=3, max_prompt_length=1)
    assert not caplog.records
