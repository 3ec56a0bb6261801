"""Completions: ids and masks of a prompt and a response."""

from __future__ import annotations

import torch

from trlx_like.data import padded_right


def test_padding_moves_to_the_right_and_the_order_stays() -> None:
    ids, mask = padded_right(
        torch.tensor([[1, 1, 5, 6, 7], [2, 3, 4, 5, 6], [0, 0, 0, 0, 9]]),
        torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool(),
    )
    assert ids.tolist() == [[5, 6, 7, 1, 1], [2, 3, 4, 5, 6], [9, 0, 0, 0, 0]]
    assert mask.sum(dim=1).tolist() == [3, 5, 1] and not (mask[:, 1:] & ~mask[:, :-1]).any()
