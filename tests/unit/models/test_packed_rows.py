"""Packed rows by hand: where tokens are, what they see, and the way back."""

from __future__ import annotations

import torch

from tests.unit.models.support import batch_of_ids
from trlx_like.data import Completion
from trlx_like.models.packed_rows import PackedRows, RowPlan


def pair_and_row() -> Completion:
    """Two responses, of 2 and 1 tokens, to a prompt of 2; and a prompt of 1 with a response of 2."""
    return Completion(
        prompt=torch.tensor([[11, 12], [11, 12], [0, 21]]),
        prompt_mask=torch.tensor([[1, 1], [1, 1], [0, 1]]).bool(),
        response=torch.tensor([[13, 14], [15, 0], [22, 23]]),
        mask=torch.tensor([[1, 1], [1, 0], [1, 1]]).bool(),
    )


PLAN = RowPlan.of((0, 0, 1), (2, 2, 1), (2, 1, 2))


def test_a_plan() -> None:
    """Rows of 5, as long as the pair: its second response is behind the first, and its prompt stands once."""
    assert RowPlan(2, 5, prompt=[0, 0, 5], response=[2, 4, 6], reads=[True, False, True]) == PLAN


def test_short_groups_share_a_row() -> None:
    """Groups of 4, 3 and 1 tokens: the last two fill a row."""
    assert RowPlan.of((0, 1, 2), (2, 2, 1), (2, 1, 0)) == RowPlan(2, 4, [0, 4, 7], [2, 6, 8], [True] * 3)


def test_tokens_and_positions() -> None:
    packed = PackedRows.of(pair_and_row(), PLAN)
    assert packed.inputs["input_ids"][0].tolist() == [11, 12, 13, 14, 15]
    assert packed.inputs["input_ids"][1, :3].tolist() == [21, 22, 23]
    assert packed.inputs["position_ids"][0].tolist() == [0, 1, 2, 3, 2]
    assert packed.inputs["position_ids"][1, :3].tolist() == [0, 1, 2]


def test_a_response_sees_its_prompt_and_itself() -> None:
    mask = PackedRows.of(pair_and_row(), PLAN).inputs["attention_mask"]
    assert mask.shape == (2, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert mask[1, 0, :3].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert mask.any(dim=-1).all()  # what is not filled sees something, or its states would be NaN
    bias = PackedRows.of(pair_and_row(), PLAN, torch.float32).inputs["attention_mask"]
    assert torch.equal(bias == 0, mask) and (bias[~mask] < -1e38).all()


def test_states_there_and_back() -> None:
    """Of a shared prompt the states of its first row are packed, and both rows get them back."""
    batch = pair_and_row()
    packed, states = PackedRows.of(batch, PLAN), torch.arange(12.0).view(3, 4, 1)
    inside = packed.pack(states)
    assert inside[0, :, 0].tolist() == [0, 1, 2, 3, 6]
    assert inside[1, :3, 0].tolist() == [9, 10, 11]
    real = torch.cat([batch.prompt_mask, batch.mask], dim=1)
    assert packed.unpack(inside)[..., 0][real].tolist() == [0, 1, 2, 3, 0, 1, 6, 9, 10, 11]


def test_rows_in_another_order() -> None:
    batch = batch_of_ids(((2, 3), (5, 1), (1, 1), (4, 4)))
    packed = PackedRows.of(batch, RowPlan.of((3, 1, 2, 0), (2, 5, 1, 4), (3, 1, 1, 4)))
    real = batch.inputs()["attention_mask"].bool()
    for name in ("input_ids", "position_ids"):
        back = packed.unpack(packed.inputs[name][..., None])[..., 0]
        assert torch.equal(back[real], batch.inputs()[name][real])
