"""Text to ids, once: special tokens where the tokenizer's own encoding puts them."""

from __future__ import annotations

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer
from trlx_like.pipelines.tokens import TextEncoder

EOS, PAD, BOS, A, B, C = range(6)


def with_bos(adds: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer that has a BOS, and adds it to a text if `adds`."""
    tokenizer = tiny_tokenizer(bos=True)
    if adds:
        template = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
        tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer("a").input_ids == [BOS, A] if adds else [A]
    return tokenizer


def test_bos_where_the_tokenizer_adds_it() -> None:
    encoder = TextEncoder(with_bos())
    assert encoder.opening(["ab", "c"]) == [[BOS, A, B], [BOS, C]]
    assert encoder.following(["ab", "c", ""]) == [[A, B], [C], []]


def test_no_bos_where_it_does_not() -> None:
    encoder = TextEncoder(with_bos(adds=False))
    assert encoder.opening(["ab"]) == [[A, B]]
    assert TextEncoder(tiny_tokenizer()).opening(["ab"]) == [[2, 3]]


@pytest.mark.parametrize("adds", [True, False])
def test_bos_is_never_doubled(adds: bool) -> None:
    assert TextEncoder(with_bos(adds)).opening(["<bos>ab", "<bos>"]) == [[BOS, A, B], [BOS]]


@pytest.mark.parametrize("adds", [True, False])
def test_an_empty_text_opens_with_bos(adds: bool) -> None:
    assert TextEncoder(with_bos(adds)).opening(["", "a"]) == [[BOS], [BOS, A] if adds else [A]]


def test_an_empty_text_opens_with_eos_where_there_is_no_bos() -> None:
    assert TextEncoder(tiny_tokenizer()).opening([""]) == [[EOS]]


def test_nothing() -> None:
    assert TextEncoder(with_bos()).opening([]) == TextEncoder(with_bos()).following([]) == []


@pytest.mark.parametrize(
    ("side", "adds", "longest", "kept"),
    [
        ("right", True, 3, [BOS, A, B]),
        ("left", False, 3, [A, B, C]),
        # BOS stays, since models have never seen a text begin without.
        ("left", True, 3, [BOS, B, C]),
        ("left", True, 1, [BOS]),
        ("left", True, 4, [BOS, A, B, C]),
        ("left", False, 1, [C]),
        ("right", False, 2, [BOS, A]),
    ],
)
def test_cut(side: str, adds: bool, longest: int, kept: list[int]) -> None:
    tokenizer = with_bos(adds)
    tokenizer.truncation_side = side
    assert TextEncoder(tokenizer).cut([BOS, A, B, C], longest) == kept
