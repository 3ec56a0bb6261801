"""Pairs as elements and as batches, and as the 2B rows that go through a model together."""

from __future__ import annotations

import torch

from trlx_like.data import PreferenceExperience
from trlx_like.data.preference import MultiTurnCompletion


def pair(prompt: list[int], chosen: list[int], rejected: list[int], *masks: list[bool]) -> PreferenceExperience:
    """An element of these tokens; masks: those of the chosen and the rejected ones that the loss counts."""
    ids = map(torch.tensor, (prompt, chosen, rejected))
    return PreferenceExperience(*(part for row in ids for part in (row, row >= 0)), *map(torch.tensor, masks))


def batch() -> PreferenceExperience:
    """Prompts of two and one tokens, chosen ones of one and three, rejected ones of two and one."""
    rows = [pair([5, 6], [7], [8, 9]), pair([4], [1, 2, 3], [0])]
    for row in rows:
        row.ref_chosen, row.ref_rejected = -row.chosen.float(), -row.rejected.float()
    return PreferenceExperience.collate(rows)


def test_a_batch_pads_prompts_left_and_completions_right() -> None:
    pairs = batch()
    assert pairs.prompt.tolist() == [[5, 6], [0, 4]]
    assert pairs.prompt_mask.tolist() == [[True, True], [False, True]]
    assert pairs.chosen.tolist() == [[7, 0, 0], [1, 2, 3]]
    assert pairs.rejected.tolist() == [[8, 9], [0, 0]]
    assert pairs.rejected_mask.tolist() == [[True, True], [True, False]]
    assert pairs.ref_chosen is not None and pairs.ref_chosen.tolist() == [[-7, 0, 0], [-1, -2, -3]]


def test_completions_are_the_chosen_above_the_rejected() -> None:
    both = batch().completions()
    assert both.prompt.tolist() == [[5, 6], [0, 4]] * 2
    assert both.response.tolist() == [[7, 0, 0], [1, 2, 3], [8, 9, 0], [0, 0, 0]]
    assert both.mask.sum(dim=1).tolist() == [1, 3, 2, 1]
    assert both.prompt_mask.tolist() == [[True, True], [False, True]] * 2


def test_sides_are_the_inverse_of_completions() -> None:
    pairs = batch()
    chosen, rejected = pairs.sides(pairs.completions().response)
    assert torch.equal(chosen, pairs.chosen) and torch.equal(rejected, pairs.rejected)


def test_elements_come_back_from_a_batch() -> None:
    first, second = batch().split()
    assert (first.prompt.tolist(), first.chosen.tolist(), first.rejected.tolist()) == ([5, 6], [7], [8, 9])
    assert second.ref_rejected is not None and second.ref_rejected.tolist() == [0]


def test_all_tokens_are_scored_unless_masks_say_otherwise() -> None:
    pairs = batch()
    assert pairs.chosen_mask.tolist() == [[True, False, False], [True, True, True]]
    assert [side.tolist() for side in pairs.scored] == [pairs.chosen_mask.tolist(), pairs.rejected_mask.tolist()]
    one = pair([5], [7, 8], [9], [False, True], [True])
    other = pair([5], [1], [2, 3, 4], [True], [True, False, True])
    pairs = PreferenceExperience.collate([one, other])
    assert [side.tolist() for side in pairs.scored] == [
        [[False, True], [True, False]],
        [[True, False, False], [True, False, True]],
    ]
    both = pairs.completions()  # as wide as the rejected ones, which are wider here
    assert both.response.tolist() == [[7, 8, 0], [1, 0, 0], [9, 0, 0], [2, 3, 4]]
    assert both.mask.tolist() == [[True, True, False], [True, False, False], [True, False, False], [True, True, True]]
    assert both.scored.tolist() == [
        [False, True, False],
        [True, False, False],
        [True, False, False],
        [True, False, True],
    ]
    assert [row.scored[1].tolist() for row in pairs.split()] == [[True], [True, False, True]]


def test_masks_and_references_may_be_missing() -> None:
    rows = [torch.tensor([1]), torch.tensor([True])] * 3
    one = PreferenceExperience(*rows)
    assert (one.chosen_assistant_mask, one.rejected_assistant_mask) == (None, None)
    assert (one.ref_chosen, one.ref_rejected) == (None, None)
    assert [side.tolist() for side in one.scored] == [[True], [True]]


def with_extras(number: int, chosen: int, rejected: int) -> PreferenceExperience:
    """An element with choices and states of its own: one word of choices for the first token, two for the others."""
    row = pair([4] * number, [1] * chosen, [2] * rejected)
    for side, length in (("chosen", chosen), ("rejected", rejected)):
        sizes = torch.tensor([1] + [2] * (length - 1), dtype=torch.int32)
        setattr(row, f"{side}_choice_sizes", sizes)
        setattr(row, f"{side}_choices", torch.arange(int(sizes.sum())) + 1)
        setattr(row, f"{side}_trunk", torch.full((length, 2), float(length)))
    row.prompt_trunk = torch.full((number, 2), 9.0)
    return row


def test_choices_and_states_are_padded_and_stacked_with_their_tokens() -> None:
    rows = [with_extras(1, 1, 2), with_extras(2, 3, 1)]
    pairs = PreferenceExperience.collate(rows)
    for got, put in zip(pairs.split(), rows, strict=True):
        for name, value in vars(put).items():
            assert value is None or torch.equal(getattr(got, name), value), name
    both = pairs.completions()
    assert both.choices is not None and both.choice_sizes is not None
    assert both.choices.tolist() == [[1, 0, 0, 0, 0], [1, 2, 3, 4, 5], [1, 2, 3, 0, 0], [1, 0, 0, 0, 0]]
    assert both.choice_sizes.tolist() == [[1, 0, 0], [1, 2, 2], [1, 2, 0], [1, 0, 0]]
    assert both.prompt_trunk is not None and both.response_trunk is not None
    assert both.prompt_trunk[..., 1].tolist() == [[0, 9], [9, 9]] * 2
    assert both.response_trunk[..., 0].tolist() == [[1, 0, 0], [3, 3, 3], [2, 2, 0], [1, 0, 0]]
    assert both.response_trunk.shape == (4, 3, 2) and both.prompt_trunk.shape == (4, 2, 2)


def test_what_one_side_lacks_is_left_out() -> None:
    for name in ("chosen_choices", "rejected_choices", "prompt_trunk", "chosen_trunk", "rejected_trunk"):
        pairs = PreferenceExperience.collate([with_extras(1, 1, 2)])
        setattr(pairs, name, None)
        both = pairs.completions()
        assert (both.choices is None) == ("choices" in name)
        assert (both.response_trunk is None) == ("trunk" in name)


def test_kept_states_are_those_of_prompt_and_sides() -> None:
    pairs = PreferenceExperience.collate([pair([5, 6, 7], [1], [2, 3]), pair([4], [1], [2])])
    trunk = torch.arange(4 * 5 * 2).float().view(4, 5, 2)
    pairs.keep(trunk)
    assert pairs.prompt_trunk is not None and torch.equal(pairs.prompt_trunk, trunk[:2, :3])
    assert pairs.chosen_trunk is not None and torch.equal(pairs.chosen_trunk, trunk[:2, 3:4])
    assert pairs.rejected_trunk is not None and torch.equal(pairs.rejected_trunk, trunk[2:, 3:])


def test_sides_of_three_pairs() -> None:
    pairs = PreferenceExperience.collate([pair([5], [1], [2])] * 3)
    assert [side.tolist() for side in pairs.sides(torch.arange(6).view(6, 1))] == [[[0], [1], [2]], [[3], [4], [5]]]


def test_padding_is_no_token_of_the_assistant() -> None:
    rows = [torch.ones(length, dtype=torch.bool) for length in (1, 2)]
    one, two = (MultiTurnCompletion(row.long(), row, row.long(), row, row) for row in rows)
    assert MultiTurnCompletion.collate([one, two]).scored.tolist() == [[True, False], [True, True]]
