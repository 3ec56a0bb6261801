"""Prompts that rows share: which they are, and the same scores and gradients as of whole rows, for every family."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import FAMILIES, ODD_FAMILIES, SEQ2SEQ_FAMILIES, tiny_lm
from tests.unit.models.support import assert_equal_scores, batch_of_ids, scored, sharp_lm, valued_policy
from trlx_like.data import Completion
from trlx_like.models.compaction import Compaction
from trlx_like.models.layout import blocks
from trlx_like.models.shared_prompts import SharedPrompts, can_share, same_prompts

SHARING = Compaction(hidden=16, share=True)


def shared_batch(order: tuple[int, ...] = (0, 1, 0, 2, 1, 0)) -> Completion:
    """Responses of different lengths to three prompts of different lengths."""
    prompts = batch_of_ids(((3, 1), (5, 1), (4, 1)))
    responses = batch_of_ids(tuple((1, length) for length in (4, 2, 3, 3, 1, 4)), seed=7)
    rows = list(order)
    return Completion(prompts.prompt[rows], prompts.prompt_mask[rows], responses.response, responses.mask)


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_scores_and_gradients_are_those_of_whole_rows(family: str) -> None:
    policy = valued_policy(sharp_lm(family))
    policy.add_reference()
    assert can_share(policy.lm)
    batch = shared_batch()
    expected = scored(policy, batch)
    policy.compaction = SHARING
    found = scored(policy, batch)
    assert_equal_scores(found, expected)


def test_blocks_read_each_prompt_once() -> None:
    policy = valued_policy(sharp_lm("llama"))
    policy.compaction = SHARING
    tokens: list[tuple[int, ...]] = []
    blocks(policy.lm)[0].register_forward_hook(lambda _, args, output: tokens.append(tuple(args[0].shape[:2])))
    policy(shared_batch())
    assert tokens == [(3, 5), (6, 4)]  # 3 prompts of up to 5 tokens, 6 responses of up to 4
    tokens.clear()
    policy(batch_of_ids())
    assert tokens == [(3, 11)]  # no prompt twice


def test_the_rows_of_each_prompt() -> None:
    batch = shared_batch((0, 1, 0, 2, 1, 0))
    shared = SharedPrompts.of(batch, same_prompts(batch))
    assert shared is not None and shared.width == 5 and len(shared.first) == 3
    assert torch.equal(batch.prompt[shared.first][shared.of_row], batch.prompt)
    assert torch.equal(batch.prompt_mask[shared.first][shared.of_row], batch.prompt_mask)


def test_padding_tells_prompts_apart() -> None:
    batch = shared_batch((0, 0, 0, 0, 0, 0))
    batch.prompt_mask[1, -3] = False  # the same ids, of which one is padding
    shared = SharedPrompts.of(batch, same_prompts(batch))
    assert shared is not None
    assert (shared.of_row == shared.of_row[0]).tolist() == [True, False, True, True, True, True]


def test_few_tokens_are_not_worth_it() -> None:
    """In 2 rows one prompt of 5 tokens is saved: 5 of the 22 tokens of 5 + 6 are too few, 5 of 20 are a quarter."""
    prompts = batch_of_ids(((5, 1), (5, 1)))
    for length, worth in ((6, False), (5, True)):
        responses = batch_of_ids(((1, length), (1, length)))
        prompt, mask = prompts.prompt[[0, 0]], prompts.prompt_mask[[0, 0]]
        batch = Completion(prompt, mask, responses.response, responses.mask)
        found = SharedPrompts.of(batch, same_prompts(batch))
        assert (found is not None) == worth


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
def test_an_encoder_reads_every_prompt(family: str) -> None:
    assert not can_share(sharp_lm(family))


def test_dropout_and_checkpointing_read_every_prompt() -> None:
    assert not can_share(tiny_lm("gpt2", resid_pdrop=0.1))
    lm = sharp_lm("gpt2")
    assert can_share(lm)
    lm.gradient_checkpointing_enable()
    assert not can_share(lm)


def test_factors_of_the_longest_position_are_not_those_of_a_prompt() -> None:
    assert not can_share(sharp_lm("phi3_longrope"))
    policy = valued_policy(sharp_lm("gpt2"))
    policy.compaction = SHARING
    policy.add_reference(sharp_lm("phi3_longrope"))
    assert not policy.compaction.share


def test_a_reference_with_an_encoder_reads_every_prompt() -> None:
    policy = valued_policy(sharp_lm("gpt2"))
    policy.compaction = SHARING
    policy.add_reference(sharp_lm("llama"))
    assert policy.compaction.share
    policy.add_reference(sharp_lm("t5"))
    assert not policy.compaction.share
