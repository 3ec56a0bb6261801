"""Text to ids, once: special tokens where the tokenizer's own encoding puts them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer
from trlx_like.errors import DataError
from trlx_like.pipelines.tokens import TextEncoder

EOS, PAD, BOS, A, B, C, D = range(7)


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


def test_messages_that_do_not_begin_with_bos_are_cut_as_other_text() -> None:
    """A chat template may write no BOS where the tokenizer adds one to text."""
    tokenizer = with_bos(adds=True)
    tokenizer.truncation_side = "left"
    encoder = TextEncoder(tokenizer)
    assert encoder.cut([A, B, C, D], 2) == [C, D]
    assert encoder.cut([0.1, 0.2, 0.3, 0.4], 2, ids=[A, B, C, D]) == [0.3, 0.4]
    assert encoder.cut([0.1, 0.2, 0.3, 0.4], 2, ids=[BOS, B, C, D]) == [0.1, 0.4]
    tokenizer = with_language()
    assert TextEncoder(tokenizer, seq2seq=True).cut([A, B, C, D], 2) == [A, B]


def with_language(language: str = "<pad>") -> PreTrainedTokenizerFast:
    """A tokenizer that writes a language before and EOS after a text, as mBart's kin do."""
    tokenizer = with_bos(adds=False)
    template = processors.TemplateProcessing(
        single=f"{language} $A <eos>", special_tokens=[("<pad>", PAD), ("<bos>", BOS), ("<eos>", EOS)]
    )
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def test_prompts_for_an_encoder_end_as_the_tokenizer_ends_them() -> None:
    # One token a letter from 2 on: there is no BOS.
    encoder = TextEncoder(tiny_tokenizer(ends=True), seq2seq=True)
    assert encoder.opening(["ab", "ab<eos>", "", "<eos>"]) == [[2, 3, EOS], [2, 3, EOS], [EOS], [EOS]]
    assert encoder.following(["ab", "", "a<eos>"]) == [[2, 3], [], [2, EOS]]
    plain = TextEncoder(tiny_tokenizer(), seq2seq=True)
    assert plain.opening(["ab", ""]) == [[2, 3], [EOS]]
    causal = TextEncoder(tiny_tokenizer(ends=True))
    assert causal.opening(["ab"]) == [[2, 3]]


def test_both_sequences_of_an_encoder_decoder_begin_as_the_tokenizer_begins_them() -> None:
    encoder = TextEncoder(with_language(), seq2seq=True)
    assert encoder.opening(["ab", "<pad>ab<eos>"]) == [[PAD, A, B, EOS]] * 2
    assert encoder.following(["ab", "<pad>ab", ""]) == [[PAD, A, B], [PAD, A, B], [PAD]]


@pytest.mark.parametrize(
    ("side", "longest", "kept"),
    [
        ("right", 5, [PAD, A, B, C, EOS]),
        ("right", 4, [PAD, A, B, EOS]),
        ("left", 4, [PAD, B, C, EOS]),
        ("left", 3, [PAD, C, EOS]),
        ("right", 2, [PAD, EOS]),
        ("left", 1, [EOS]),
    ],
)
def test_a_prompt_that_is_cut_keeps_its_ends(side: str, longest: int, kept: list[int]) -> None:
    tokenizer = with_language()
    tokenizer.truncation_side = side
    assert TextEncoder(tokenizer, seq2seq=True).cut([PAD, A, B, C, EOS], longest) == kept


def test_a_text_that_cannot_be_encoded_is_named() -> None:
    """The library raises a bare Exception, for all texts of a call together."""
    level = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}))
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=level, eos_token="</s>"))
    assert encoder.opening(["a", "b"]) == [[0], [1]]
    for encode in (encoder.opening, encoder.following, encoder.read_ahead):
        with pytest.raises(DataError, match=r"The tokenizer cannot encode the text 'x': .*\[UNK\]"):
            encode(["a", "x", "b"])
