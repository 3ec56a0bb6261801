"""Samples to ids and to what is learnt of them; packed rows say what their samples say alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.tiny import FAMILIES, ODD_FAMILIES, tiny_lm, tiny_tokenizer
from tests.unit.models.support import gradients, sharp_lm
from tests.unit.pipelines.test_tokens import with_bos
from trlx_like.data.flat import FlatRows
from trlx_like.errors import DataError
from trlx_like.models.layout import keeps_packed_apart
from trlx_like.models.policy import LanguagePolicy
from trlx_like.pipelines.dialogues import Dialogue, encode_dialogues
from trlx_like.pipelines.packing import fit_best
from trlx_like.trainers.sft import SFTExperience, _packed, _rows

EOS, A, B, C, D = 0, 2, 3, 4, 5


def encoded(*samples: Any, longest: int = 20, side: str = "right") -> list[tuple[list[int], list[int]]]:
    tokenizer = tiny_tokenizer()
    tokenizer.truncation_side = side
    return [(d.ids, [int(o) for o in d.is_output]) for d in encode_dialogues(samples, tokenizer, longest)]


def test_text_is_output_from_its_second_token_on() -> None:
    assert encoded("abc") == [([A, B, C, EOS], [0, 1, 1, 1])]


def test_every_second_turn_is_output() -> None:
    assert encoded(["a", "bc"]) == [([A, B, C, EOS], [0, 1, 1, 1])]
    assert encoded(("ab", "c", "d", "a")) == [([A, B, C, D, A, EOS], [0, 0, 1, 0, 1, 1])]


@pytest.mark.parametrize("key", ["output", "completion"])
def test_dicts(key: str) -> None:
    assert encoded({"prompt": "a", key: "b", "more": 1}) == [([A, B, EOS], [0, 1, 1])]


def test_eos_is_not_doubled() -> None:
    assert encoded("ab<eos>", ["a", "b<eos>"]) == [([A, B, EOS], [0, 1, 1])] * 2


def test_bos_opens_and_only_opens() -> None:
    (dialogue,) = encode_dialogues([["a", "b", "a", ""]], with_bos(), 20)
    assert dialogue == Dialogue([2, 3, 4, 3, EOS], [False, False, True, False, True])
    assert encode_dialogues(["<bos>ab"], with_bos(), 20) == [Dialogue([2, 3, 4, EOS], [False, True, True, True])]


def test_empty_turns() -> None:
    # An empty prompt gives EOS (there is no BOS) to predict the output from; an empty output is EOS alone.
    assert encoded(["", "a"], ["a", ""]) == [([EOS, A, EOS], [0, 1, 1]), ([A, EOS], [0, 1])]
    assert encoded(["a", "", "b", "c"]) == [([A, B, C, EOS], [0, 0, 1, 1])]


@pytest.mark.parametrize(
    ("side", "kept"),
    [("right", ([A, B, C], [0, 0, 1])), ("left", ([C, D, EOS], [0, 1, 1]))],
)
def test_long_samples_are_cut_and_counted(
    side: str, kept: tuple[list[int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trlx_like"):
        assert encoded(["ab", "cd"], "a", longest=3, side=side)[0] == kept
    lost = {"right": "2 tokens of 1 outputs", "left": "2 tokens of prompts"}[side]
    assert f"1 of 2 samples are longer than train.seq_length (3 tokens) and were cut: {lost} are lost." in caplog.text


def test_bos_stays_where_the_beginning_is_cut() -> None:
    tokenizer = with_bos()
    tokenizer.truncation_side = "left"
    assert encode_dialogues([["ab", "cd"]], tokenizer, 4) == [Dialogue([2, 5, 6, EOS], [False, True, True, True])]


def test_messages_without_bos_keep_no_token_of_their_beginning() -> None:
    tokenizer = with_bos()
    tokenizer.truncation_side = "left"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    said = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    assert encode_dialogues([said], tokenizer, 3, [1.5]) == [Dialogue([4, 5, 6], [False, True, True], [0.0, 0.0, 1.5])]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "samples is empty"),
        ("abc", "samples is a string; give a list"),
        (len, "samples is a builtin_function_or_method; give a list"),
        (["ab", ["a"]], r"samples\[1\] has 1 turns; a dialogue alternates"),
        ([["a", "b", "c"]], r"samples\[0\] has 3 turns"),
        ([[]], r"samples\[0\] has 0 turns"),
        (["ab", 3], r"samples\[1\] is a int; give a string, a list of strings"),
        ([["a", 3]], r"samples\[0\] is a list"),
        ([b"ab"], r"samples\[0\] is a bytes"),
        (
            [{"prompt": "a"}],
            r"samples\[0\]: a dict needs 'prompt' and 'output' \(or 'completion'\); it has \['prompt'\]",
        ),
        ([{"output": "a"}], r"samples\[0\]: a dict needs"),
        ([{"prompt": "a", "output": 3}], r"samples\[0\]: both must be strings, or .*; output is 3\."),
        ([{"prompt": ["a"], "output": ["b"]}], r"prompt is \['a'\] and output is \['b'\]\."),
        (["ab", ""], r"samples\[1\]: no output is left within train\.seq_length \(4 tokens\); it is empty"),
        (["ab", ["abcd", "b"]], r"samples\[1\]: no output is left .* shorten its prompt"),
    ],
)
def test_errors_name_the_row(samples: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode_dialogues(samples, tiny_tokenizer(), 4)


APART = ("gpt2", "llama", "qwen3", "gpt_neox", "gemma2", "cohere", "granite")
"""Families that tell by positions which sample of a packed row a token is of."""


def of_length(length: int, start: int = 0) -> Dialogue:
    return Dialogue([2 + (start + n) % 28 for n in range(length)], [n > 0 for n in range(length)])


def scored(policy: LanguagePolicy, batch: SFTExperience) -> list[float]:
    """Log-probabilities of the tokens that are learnt, sorted, since packing changes their order."""
    logprobs = policy(batch).logprobs
    logprobs[batch.target].sum().backward()
    return sorted(logprobs[batch.target].tolist())


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_families_that_mix_packed_samples_are_found(family: str) -> None:
    for lm in (tiny_lm(family), sharp_lm(family), sharp_lm(family).train().bfloat16()):
        training = lm.training
        assert keeps_packed_apart(lm) == (family in APART) and lm.training == training


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, kind) for family in APART for kind in ("sdpa", "eager") if (family, kind) != ("gemma2", "sdpa")],
)
def test_packed_samples_are_scored_as_they_are_alone(family: str, attention: str) -> None:
    samples = ["abcdef", ["gh", "ijkl"], "mn", ["o", "p", "qr", "stu"], "vwxyzab", ["", "b"]]
    dialogues = encode_dialogues(samples, tiny_tokenizer(), 14)
    rows = _packed(fit_best(dialogues, 14))
    assert max(int(row.segment.max()) for row in rows if row.segment is not None) and len(set(rows.sizes())) > 1
    lm = sharp_lm(family)
    lm.set_attn_implementation(attention)
    policy = LanguagePolicy(lm)
    alone = scored(policy, _rows(dialogues).batch())
    alone_gradients = gradients(policy)
    packed = scored(policy, SFTExperience.collate(list(rows)))
    packed_gradients = gradients(policy)
    assert packed == pytest.approx(alone, abs=1e-5)
    assert packed_gradients.keys() == alone_gradients.keys()
    for name, gradient in alone_gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=2e-4, msg=name)
    assert len(alone) == sum(sum(dialogue.is_output) for dialogue in dialogues)


def test_packed_inputs_golden() -> None:
    # Rows of 3 + 2 and of 2 tokens: positions start again with each sample, and with the padding.
    rows = _packed(fit_best(FlatRows.collect(Dialogue, map(of_length, (3, 2, 2))), 5))
    batch = SFTExperience.collate(list(rows))
    inputs = {name: value.tolist() for name, value in batch.inputs().items()}
    assert inputs["position_ids"] == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert set(inputs) == {"input_ids", "position_ids"}
    assert batch.target.tolist() == [[True, True, False, True], [True, False, False, False]]
    assert batch.scored is batch.target


def pairs(*samples: Any, longest: int = 20, side: str = "right") -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs of an encoder-decoder whose tokenizer ends texts with EOS."""
    tokenizer = tiny_tokenizer(ends=True)
    tokenizer.truncation_side = side
    return [dialogue.split() for dialogue in encode_dialogues(samples, tokenizer, longest, seq2seq=True)]


def test_prompt_and_output_for_an_encoder_decoder() -> None:
    assert pairs(["ab", "cd"], {"prompt": "a", "completion": ""}, ("", "b<eos>"), "ab") == [
        ([A, B, EOS], [C, D, EOS]),
        ([A, EOS], [EOS]),
        ([EOS], [B, EOS]),
        ([EOS], [A, B, EOS]),  # plain text: its prompt is empty
    ]


def test_prompts_or_outputs_of_an_encoder_decoder_are_cut() -> None:
    sample = ("abc", "dab")  # 4 and 4 tokens with their EOS
    assert pairs(sample, longest=7) == [([A, B, C, EOS], [D, A, B])]
    assert pairs(sample, longest=5) == [([A, B, C, EOS], [D])]
    assert pairs(sample, longest=7, side="left") == [([B, C, EOS], [D, A, B, EOS])]
    assert pairs(sample, longest=5, side="left") == [([EOS], [D, A, B, EOS])]
    assert pairs(sample, longest=3, side="left") == [([EOS], [D, A])]
    with pytest.raises(DataError, match=r"samples\[0\]: no output is left within train.seq_length \(4 tokens\)"):
        pairs(sample, longest=4)


@pytest.mark.parametrize(
    ("sample", "what"),
    [
        (["a", "b", "c", "d"], "has 4 turns"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "is messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "is messages"),
    ],
)
def test_what_an_encoder_decoder_cannot_learn_from(sample: Any, what: str) -> None:
    message = rf"samples\[1\] {what}; model.model_arch_type: seq2seq needs one prompt and one output"
    with pytest.raises(DataError, match=message):
        pairs(("a", "b"), sample)
