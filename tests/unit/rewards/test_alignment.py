"""Rewards of parts of a response reach the sampled tokens, whatever tokens its text would have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trlx_like.config import RewardFnConfig
from trlx_like.data import Completion
from trlx_like.distributed.world import World
from trlx_like.errors import RewardError
from trlx_like.rewards.alignment import align, offsets, say_moved
from trlx_like.rewards.runner import RewardRunner
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.scoring import Scoring

EOS, A, B, AB, C = 0, 1, 2, 3, 4
CUT = [5, 6]
"""The two bytes of "é", each a token."""


@cache
def tokenizer() -> Any:
    """Bytes as GPT-2 writes them, of which "ab" is also one token, as the tokenizer itself writes it."""
    vocabulary = {"<eos>": EOS, "a": A, "b": B, "ab": AB, "c": C, "Ã": CUT[0], "©": CUT[1], "Ġ": 7}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def test_the_characters_of_each_token() -> None:
    assert tokenizer()("abc").input_ids == [AB, C]
    assert offsets([A, B, C, EOS], "abc", tokenizer()) == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert offsets([AB, *CUT, C], "abéc", tokenizer()) == [(0, 2), (2, 2), (2, 3), (3, 4)]
    assert offsets([AB, C, C], "ab", tokenizer()) == [(0, 2), (2, 2), (2, 2)]  # cut before a stop sequence
    assert offsets([AB, CUT[0]], "ab\ufffd", tokenizer()) == [(0, 2), (2, 3)]  # cut within a character


@pytest.mark.parametrize(
    ("reward", "ids", "text", "sees_ids", "placed"),
    [
        ([1, 2, 3, 4], [A, B, C, EOS], "abc", True, [1, 2, 3, 4]),
        ([1, 2, 3], [A, B, C, EOS], "abc", True, [1, 2, 3, 0]),
        ([1, 2], [A, B, C, EOS], "abc", False, [0, 1, 2, 0]),  # the tokens are "ab" and "c" if it is tokenised again
        ([1, 2, 3], [A, B, C, EOS], "abc", False, [0, 1, 2, 3]),  # and EOS
        ([1, 2, 3], [AB, C, EOS], "abc", False, [1, 2, 3]),
        ([1, 2, 3], [AB, C, A, B], "abc", False, [1, 2, 0, 3]),  # ended at a stop sequence "ab"
        ([1], [EOS], "", False, [1]),
        ([1, 2], [AB, C], "abc", False, [1, 2]),
        ([1, 2], [AB, C, EOS, EOS], "abc", False, [1, 2, 0, 0]),
        ([(0, 1, 1.0), (1, 3, 2.0), (2, 3, 0.5)], [AB, C, EOS], "abc", False, [1, 2.5, 0]),
        ([(2, 3, 1.0)], [AB, *CUT, C], "abéc", True, [0, 0, 1, 0]),
        ([], [AB, C, EOS], "abc", False, [0, 0, 0]),
    ],
)
def test_rewards_reach_the_sampled_tokens(
    reward: Any, ids: Any, text: str, sees_ids: bool, placed: list[float]
) -> None:
    assert align(reward, ids, text, tokenizer(), sees_ids=sees_ids) == placed


@pytest.mark.parametrize(
    ("reward", "sees_ids", "message"),
    [
        ([1, 2], True, r"2 per-token rewards for a response of 4 tokens\.$"),
        ([1], False, r"1 per-token rewards for a response of 4 tokens, and 2 if the text is tokenised again\.$"),
        ([1, 2, 3, 4, 5], False, "5 per-token rewards"),
        ([(0, 4, 1.0)], False, r"the span \(0, 4\) is not within the 3 characters"),
        ([(1, 1, 1.0)], False, r"the span \(1, 1\) is not within"),
    ],
)
def test_a_wrong_number_is_never_guessed(reward: Any, sees_ids: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        align(reward, [A, B, C, EOS], "abc", tokenizer(), sees_ids=sees_ids)


def samples() -> TextSamples:
    prompt = torch.tensor([[C], [C]])
    response = torch.tensor([[A, B, C, EOS], [AB, C, EOS, EOS]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    completion = Completion(prompt, torch.ones_like(prompt).bool(), response, mask)
    return TextSamples(completion, ["c", "c"], ["abc", "abc"], ["cabc", "cabc"], ["eos", "length"], [{}, {}])


class FakeRun:
    """What Scoring asks of a run of one process."""

    def __init__(self, **options: Any) -> None:
        train = type("Train", (), {"reward_on_main_process": False})
        self.config: Any = type("Config", (), {"reward": RewardFnConfig(**options), "train": train})
        self.progress, self.folder = type("Progress", (), {"step": 0}), type("Folder", (), {"directory": None})
        self.world = World(Accelerator(cpu=True))


def scored(function: Callable[..., Any], **options: Any) -> Any:
    run: Any = FakeRun(**options)
    scoring = Scoring(run, function)
    scoring.tokenizer = tokenizer()
    return scoring.score(function, samples().rows())


def test_functions_get_the_tokens_that_they_name(caplog: pytest.LogCaptureFixture) -> None:
    def of_tokens(output_ids: Any, output_offsets: Any, finish_reasons: Any, outputs: Any) -> list[Any]:
        assert output_ids == [[A, B, C, EOS], [AB, C]] and finish_reasons == ["eos", "length"]
        texts = [[o[b:e] for b, e in places] for o, places in zip(outputs, output_offsets, strict=True)]
        assert texts == [["a", "b", "c", ""], ["ab", "c"]]
        return [[float(token == C) for token in ids] for ids in output_ids]

    assert scored(of_tokens).rewards == [[0, 0, 1, 0], [0, 1]]

    def of_text(outputs: list[str], **metadata: Any) -> list[Any]:
        assert not {"output_ids", "output_offsets", "finish_reasons"} & metadata.keys()
        return [[float(token == C) for token in tokenizer()(text).input_ids] for text in outputs]

    say_moved.cache_clear()
    with caplog.at_level(logging.INFO, logger="trlx_like"):
        for _ in range(2):
            assert scored(of_text).rewards == [[0, 0, 1, 0], [0, 1]]
    assert sum("moved to the sampled tokens" in line.message for line in caplog.records) == 1
    assert scored(lambda outputs: [[(0, 1, 1.0)], None]).rewards == [[1, 0, 0, 0], None]
    assert scored(lambda outputs: [[(0, 1, 1.0)], []]).rewards == [[1, 0, 0, 0], [0, 0]]
    assert scored(lambda outputs: torch.tensor([[1.0], [2.0]])).rewards == [1, 2]  # of one output per sample
    assert scored(lambda outputs: [[(*torch.tensor([0, 1]), 1.0)], None]).rewards == [[1, 0, 0, 0], None]


def test_a_wrong_number_is_a_fault() -> None:
    with pytest.raises(RewardError, match="1 per-token rewards for a response of 4 tokens, and 2 if"):
        scored(lambda outputs: [[1.0], [1.0]])
    assert scored(lambda outputs: [[1.0], [1.0, 2.0]], on_error="abstain").rewards == [None, [1.0, 2.0]]
    with pytest.raises(RewardError, match=r"a span is \(begin, end, reward\) with whole numbers"):
        scored(lambda outputs: [[(0.5, 1, 1.0)], None])


def test_without_ids_rewards_are_as_many_as_tokens_at_most() -> None:
    runner = RewardRunner(lambda outputs: [[1.0], [2.0, 3.0]])
    assert runner.result(runner.submit({"outputs": ["a", "b"]}, [{}, {}], lengths=[2, 2])).rewards == [
        [1.0],
        [2.0, 3.0],
    ]
