"""Conditioning on prompts and trajectories of images: what is doubled, what one step has, and how a caption is kept."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from trlx_like.data.diffusion import Conditioning, DenoisingExperience, as_bytes

EMBEDS, NEGATIVE = torch.ones(2, 3, 4), torch.full((2, 3, 4), -1.0)
POOLED, NEGATIVE_POOLED = torch.full((2, 5), 2.0), torch.full((2, 5), -2.0)


def element(number: int, caption: str) -> DenoisingExperience:
    """Three steps of two numbers: latents 10 n, 10 n + 1, ... and log-probabilities -10 n, -10 n - 1, ..."""
    (text,), (mask,) = as_bytes([caption])
    start = 10.0 * number
    return DenoisingExperience(
        embeds=EMBEDS[0],
        pooled=None,
        negative_embeds=None,
        negative_pooled=None,
        latents=torch.arange(4.0)[:, None].expand(4, 2) + start,
        old_logprobs=-torch.arange(3.0) - start,
        order=torch.tensor([2, 0] if number % 2 else [1, 2]),
        rewards=torch.tensor(float(number)),
        advantages=torch.tensor(-float(number)),
        caption=text,
        caption_mask=mask,
    )


def test_negative_prompts_come_first() -> None:
    embeds, pooled = Conditioning(EMBEDS, POOLED, NEGATIVE, NEGATIVE_POOLED).doubled()
    assert embeds[:, 0, 0].tolist() == [-1, -1, 1, 1]
    assert pooled is not None and pooled[:, 0].tolist() == [-2, -2, 2, 2]


@pytest.mark.parametrize(("pooled", "negative"), [(None, None), (POOLED, None), (None, NEGATIVE_POOLED)])
def test_without_both_pooled_embeddings_there_are_none(pooled: Tensor | None, negative: Tensor | None) -> None:
    embeds, both = Conditioning(EMBEDS, pooled, NEGATIVE, negative).doubled()
    assert embeds.shape == (4, 3, 4) and both is None


def test_one_step_of_each_image() -> None:
    batch = DenoisingExperience.collate([element(1, "a cat"), element(2, "dog")])
    first, second = batch.at(0), batch.at(1)  # steps 2 and 1, then 0 and 2
    assert first.latents.tolist() == [[[12, 12], [13, 13]], [[21, 21], [22, 22]]]
    assert second.latents.tolist() == [[[10, 10], [11, 11]], [[22, 22], [23, 23]]]
    assert first.old_logprobs.tolist() == [[-12], [-21]] and second.old_logprobs.tolist() == [[-10], [-22]]
    assert first.order.tolist() == [[2], [1]] and second.order.tolist() == [[0], [2]]
    for name in ("embeds", "rewards", "advantages", "caption", "caption_mask"):
        assert getattr(first, name) is getattr(batch, name)


def test_captions_are_padded_and_come_back() -> None:
    elements = [element(1, "a cät"), element(2, ""), element(3, "dog")]
    batch = DenoisingExperience.collate(elements)
    assert batch.caption.shape == batch.caption_mask.shape == (3, 6)  # ä has two bytes
    assert batch.caption_mask.sum(dim=1).tolist() == [6, 0, 3]
    assert batch.caption[2].tolist() == [*b"dog", 0, 0, 0]
    assert batch.lengths().tolist() == [6, 0, 3]
    assert batch[1:].trim().caption.shape == (2, 3)
    for got, put in zip(batch.split(), elements, strict=True):
        assert all(equal(getattr(got, column.name), getattr(put, column.name)) for column in fields(put))
    assert [row["caption"] for row in batch.describe(str)] == ["a cät", "", "dog"]


def equal(got: Any, put: Any) -> bool:
    return got is put if put is None else torch.equal(got, put)


def test_texts_as_bytes() -> None:
    ids, mask = as_bytes(["ab", "\ud800", "c d e"])  # a lone surrogate has no bytes in UTF-8
    assert ids.dtype == torch.uint8 and ids.tolist() == [[97, 98, 0, 0, 0], [63, 0, 0, 0, 0], [*b"c d e"]]
    assert mask.tolist() == [[True] * 2 + [False] * 3, [True] + [False] * 4, [True] * 5]
