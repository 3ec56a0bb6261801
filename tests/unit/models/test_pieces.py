"""Attention piece by piece: the values and gradients of attention with a mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from tests.unit.models.support import sharp_lm
from tests.unit.models.test_packed_rows import pair_and_row
from trlx_like.models.attention import NAME, attend, piece_by_piece
from trlx_like.models.packed_rows import PackedRows, RowPlan, pieces_of
from trlx_like.models.pieces import Piece, set_pieces

GROUPS, PROMPTS, RESPONSES = (0, 0, 0, 3, 0, 5, 5), (3, 3, 3, 2, 3, 1, 1), (2, 4, 4, 3, 1, 2, 0)


def test_pieces_by_hand() -> None:
    """Rows of 14 tokens: 3 + 2 + 4 + 4 + 1 of the first prompt, and 2 + 3 and 1 + 2 + 0 with 6 that are missing."""
    plan = RowPlan.of(GROUPS, PROMPTS, RESPONSES, rows=2)
    assert (plan.rows, plan.width) == (2, 14)
    assert plan.pieces(PROMPTS, RESPONSES) == [
        Piece(5, prompt_piece=0),
        Piece(4, prompt_piece=0, prompt_length=3, count=2),
        Piece(1, prompt_piece=0, prompt_length=3),
        Piece(5, prompt_piece=3),
        Piece(3, prompt_piece=4),
        Piece(6),
    ]


def test_what_is_missing_in_a_row_that_is_not_the_last() -> None:
    plan = RowPlan(2, 4, [0, 4], [2, 6], [True, True])
    assert plan.pieces((2, 2), (1, 2)) == [Piece(3, prompt_piece=0), Piece(1), Piece(4, prompt_piece=2)]


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=9),
    count=st.one_of(st.none(), st.integers(1, 4)),
)
def test_pieces_are_all_tokens_of_the_rows(rows: list[tuple[int, int, int]], count: int | None) -> None:
    """Groups of any rows, with empty responses and prompts: each real token is in one piece, behind its prompt."""
    lengths = {of_row: prompt for of_row, prompt, _ in rows}  # rows of a group have the same prompt
    prompts, responses = [lengths[of_row] for of_row, *_ in rows], [response for *_, response in rows]
    if sum(prompts) + sum(responses) == 0:
        return
    plan = RowPlan.of([of_row for of_row, *_ in rows], prompts, responses, count)
    begin, found, places = 0, plan.pieces(prompts, responses), []
    for piece in found:
        places.append(begin)
        begin += piece.count * piece.length
    assert begin == plan.rows * plan.width and all(piece.length for piece in found)
    real = sum(prompt for prompt, reads in zip(prompts, plan.reads, strict=True) if reads) + sum(responses)
    assert sum(piece.count * piece.length for piece in found if piece.prompt_piece is not None) == real
    for prompt, response, size, tokens in zip(plan.prompt, plan.response, prompts, responses, strict=True):
        at = max((at for at, place in enumerate(places) if place <= response), default=0)
        piece = found[at]
        if not tokens:
            continue
        if piece.prompt_length:
            assert (piece.length, piece.prompt_length, places[piece.prompt_piece or 0]) == (tokens, size, prompt)
            assert (response - places[at]) % tokens == 0
        else:
            assert (piece.length, piece.prompt_piece, response - places[at]) == (size + tokens, at, size)


def test_pieces_of_samples_by_hand() -> None:
    """A row of samples of 2, 1 and 2 tokens, and one of 3 tokens with 2 of padding."""
    positions = torch.tensor([[0, 1, 0, 0, 1], [0, 1, 2, 0, 1]])
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    expected = [
        Piece(2, prompt_piece=0),
        Piece(1, prompt_piece=1),
        Piece(2, prompt_piece=2),
        Piece(3, prompt_piece=3),
        Piece(2),
    ]
    assert pieces_of(positions, real) == expected


def test_pairs_of_tokens() -> None:
    """Each response sees 100 + 50 tokens. A prompt and its response are computed in blocks of 32."""
    assert Piece(96, prompt_piece=0).pairs == 96 * 64 and Piece(9).pairs == 0
    assert Piece(50, prompt_piece=0, prompt_length=100, count=3).pairs == 3 * 50 * 150


def states(groups: int, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 14, width) for heads in (4, groups, groups)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


class Layer(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = 4 // groups


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients_are_those_with_the_mask(groups: int, scale: float | None) -> None:
    plan = RowPlan.of(GROUPS, PROMPTS, RESPONSES, rows=2)
    lengths = zip(PROMPTS, RESPONSES, strict=True)
    mask = torch.zeros(28, 28, dtype=torch.bool)
    for prompt, response, (p, r) in zip(plan.prompt, plan.response, lengths, strict=True):
        for place in range(r):
            seen = [*range(prompt, prompt + p), *range(response, response + place + 1)]
            mask[response + place, seen] = True
        for place in range(p):
            mask[prompt + place, prompt : prompt + place + 1] = True
    used = mask.any(dim=1)  # [28]
    mask = torch.stack([mask[:14, :14], mask[14:, 14:]])[:, None]
    other, factor = torch.ones_like(mask), torch.randn(28, 4, 8, dtype=torch.float64)
    set_pieces(other, plan.pieces(PROMPTS, RESPONSES))
    found, gradients = [], []
    for seen_by in (mask, other):
        arguments = states(groups)
        values = attend(Layer(groups), *arguments, seen_by, scaling=scale)[0].flatten(0, 1)
        (values * factor)[used].sum().backward()
        found.append(values)
        gradients.append([argument.grad for argument in arguments])
    torch.testing.assert_close(found[1][used], found[0][used])
    assert (found[1][~used] == 0).all() and len(found[1][~used]) == 6
    torch.testing.assert_close(gradients[1], gradients[0])


def test_only_the_mask_itself_stands_for_pieces() -> None:
    """What a family makes of the mask is applied, and so it is if something is added to the scores."""
    mask = torch.ones(2, 1, 14, 14, dtype=torch.bool).tril()
    set_pieces(mask, [Piece(14, prompt_piece=0), Piece(7, prompt_piece=1), Piece(7, prompt_piece=2)])
    layer, arguments = Layer(4), states(4)
    whole = attend(layer, *arguments, mask.clone())[0]
    assert not torch.allclose(attend(layer, *arguments, mask)[0][1, 7:], whole[1, 7:])
    bias = torch.zeros(1, 1, 14, 14, dtype=torch.float64)
    torch.testing.assert_close(attend(layer, *arguments, mask, position_bias=bias)[0], whole)


def test_packed_rows_tell_their_pieces() -> None:
    plan = RowPlan.of((0, 0, 2), (2, 2, 1), (2, 1, 2), rows=1)
    packed = PackedRows.of(pair_and_row(), plan, pieces=plan.pieces((2, 2, 1), (2, 1, 2)))
    assert packed.inputs["input_ids"].tolist() == [[11, 12, 13, 14, 15, 21, 22, 23]]
    lm = sharp_lm("llama")
    with piece_by_piece(lm, packed.inputs["attention_mask"]):
        assert lm.config._attn_implementation == NAME
