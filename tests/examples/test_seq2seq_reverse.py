"""The example that reverses words: its data, its reward, and a T5 that it can train."""

from __future__ import annotations

import random

from transformers import AutoModelForSeq2SeqLM

from examples.seq2seq_reverse import examples, metric_fn, model_config, reward_fn, tokenizer, word


def test_half_of_the_examples_are_right_and_the_others_are_two_letters_off() -> None:
    rows = examples(2000, seed=1)
    assert rows == examples(2000, seed=1) != examples(2000, seed=2)
    assert all(sorted(prompt) == sorted(output) for prompt, output in rows)
    off = [sum(a != b for a, b in zip(prompt[::-1], output, strict=True)) for prompt, output in rows]
    assert set(off) == {0, 2}
    # .5, and of the swaps one in eight is of two equal letters: .5 + .5 / 8 = .56, with a standard error of .011.
    assert 0.52 < off.count(0) / len(off) < 0.60


def test_reward_golden() -> None:
    # "abc" is "cba": all; "c" and "b" in their places; the second alone; too short; nothing.
    outputs = ["cba", "cbb", "abc", "cb", ""]
    assert reward_fn(["abc"] * 5, outputs) == [1.0, 2 / 3, 1 / 3, 0.0, 0.0]
    assert metric_fn(["abc"] * 5, outputs) == {"right": [1.0, 0.0, 0.0, 0.0, 0.0]}


def test_words_fit_the_tokenizer_and_the_model() -> None:
    words = [word(random.Random(seed)) for seed in range(50)]
    assert {len(each) for each in words} == {3, 4, 5, 6}
    ids = tokenizer()(words).input_ids
    assert all(row[-1] == 1 and len(row) == len(each) + 1 for row, each in zip(ids, words, strict=True))
    lm = AutoModelForSeq2SeqLM.from_config(model_config())
    assert lm.config.vocab_size == len(tokenizer()) == 10
    assert 100_000 < lm.num_parameters() < 300_000
