"""Prompts: checked by row, tokenised once, drawn in an order that a checkpoint remembers."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.tiny import LETTERS, tiny_tokenizer
from trlx_like.errors import DataError
from trlx_like.pipelines.prompts import DATAPIPELINES, PromptBatch, PromptPipeline, PromptStream

A, B, C = 2, 3, 4


def pipeline(prompts: Any, longest: int = 10, side: str = "right") -> PromptPipeline:
    tokenizer = tiny_tokenizer()
    tokenizer.truncation_side = side
    return PromptPipeline(prompts, longest, tokenizer)


def numbered(count: int) -> PromptPipeline:
    return pipeline([{"prompt": LETTERS[n], "number": n} for n in range(count)])


def numbers(batch: PromptBatch) -> list[int]:
    return [row["number"] for row in batch.metadata]


def test_tensors_golden() -> None:
    ids, mask = PromptBatch([[5, 6, 7], [8], [9, 9]], [{}, {}, {}]).tensors(9)
    assert ids.tolist() == [[5, 6, 7], [9, 9, 8], [9, 9, 9]]
    assert mask.tolist() == [[True, True, True], [False, False, True], [False, True, True]]
    assert ids.dtype == torch.int64 and mask.dtype == torch.bool


def test_strings_and_dicts() -> None:
    prompts = ["ab", {"prompt": "c", "goal": [1], "level": 2}, ""]
    before = copy.deepcopy(prompts)
    made = pipeline(prompts)
    assert made.ids == [[A, B], [C], [0]] and len(made) == 3
    assert made.metadata == [{}, {"goal": [1], "level": 2}, {}]
    made.metadata[1]["goal"] = None
    assert prompts == before
    assert made[[2, 0]] == PromptBatch([[0], [A, B]], [{}, {}])
    assert made[[0, 1, 2]][1:] == PromptBatch([[C], [0]], [made.metadata[1], {}])


@pytest.mark.parametrize(("side", "kept"), [("right", [A, B]), ("left", [B, C])])
def test_long_prompts_are_cut_and_counted(side: str, kept: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trlx_like"):
        made = pipeline(["abc", "ab", "abcabc"], 2, side)
    assert made.ids[0] == kept and made.ids[1] == [A, B]
    assert (
        "2 of 3 prompts are longer than train.seq_length less max_new_tokens (2 tokens) and were cut: 5 tokens"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ("abc", "prompts is a string; give a list"),
        (["a", 3], r"prompts\[1\] is a int; give a string or messages, or a dict"),
        (["a", None], r"prompts\[1\] is a NoneType"),
        (
            ["a", "b", {"words": "c"}],
            r"prompts\[2\]: a dict needs a string or messages under 'prompt'; it has \['words'\]",
        ),
        ([{"prompt": 3}], r"prompts\[0\]: a dict needs a string or messages under 'prompt'"),
        ([{"prompt": "a", "outputs": "b"}], r"prompts\[0\]: 'outputs' is already an argument of reward functions"),
        ([{"prompt": "a", "tokenizer": "b"}], r"prompts\[0\]: 'tokenizer' is already"),
    ],
)
def test_errors_name_the_row(prompts: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pipeline(prompts)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.lists(st.integers(0, 11), min_size=1, max_size=8), st.integers(0, 50))
def test_a_stream_gives_every_prompt_once_a_pass(count: int, takes: list[int], seed: int) -> None:
    stream = PromptStream(numbered(count), seed)
    taken = []
    for take in takes:
        batch = numbers(stream.take(take))
        assert len(batch) == take
        taken += batch
    for start in range(0, len(taken) - count + 1, count):
        assert Counter(taken[start : start + count]) == Counter(range(count))
    assert max(Counter(taken[len(taken) // count * count :]).values(), default=1) == 1


def test_a_stream_shuffles_anew_each_pass_and_by_its_seed() -> None:
    stream = PromptStream(numbered(20), 3)
    passes = [numbers(stream.take(20)) for _ in range(3)]
    assert len({tuple(one) for one in passes}) == 3 and list(range(20)) not in passes
    assert numbers(PromptStream(numbered(20), 3).take(20)) == passes[0]
    assert numbers(PromptStream(numbered(20), 4).take(20)) != passes[0]


def test_an_order_is_drawn_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    draw = torch.randperm

    def counted(count: int, **options: Any) -> torch.Tensor:
        drawn.append(count)
        return draw(count, **options)

    monkeypatch.setattr(torch, "randperm", counted)
    stream = PromptStream(numbered(12), 3)
    for _ in range(9):
        stream.take(4)
    assert drawn == [12] * 3


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.integers(0, 20), st.integers(1, 9))
def test_a_stream_goes_on_where_its_state_says(count: int, before: int, size: int) -> None:
    stream, other = PromptStream(numbered(count), 5), PromptStream(numbered(count), 5)
    stream.take(before)
    other.load_state_dict(stream.state_dict())
    for _ in range(3):
        assert numbers(other.take(size)) == numbers(stream.take(size))


def test_a_state_of_other_prompts_is_refused() -> None:
    with pytest.raises(DataError, match="prompts: the resumed run had 4, now there are 5"):
        PromptStream(numbered(5), 0).load_state_dict(PromptStream(numbered(4), 0).state_dict())


def test_the_pipeline_is_found_by_its_name() -> None:
    assert DATAPIPELINES.get("promptpipeline") is PromptPipeline
