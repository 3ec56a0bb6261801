"""Attention of some tokens alone: their values and gradients are those of all, and where it is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.tiny import FAMILIES, ODD_FAMILIES
from tests.unit.models.support import sharp_lm
from trlx_like.models import attention
from trlx_like.models.attention import NAME, Attending, attend, attending, attending_at, piece_by_piece
from trlx_like.models.last_states import can_skip_unread, last_block, read_at
from trlx_like.models.layout import blocks
from trlx_like.models.loading import checkpoint_activations
from trlx_like.models.pieces import Piece, set_pieces

ROWS, WIDTH, HEADS = 3, 8, 4
Masks = dict[str, Callable[[], Tensor | None]]


def seen() -> Tensor:
    """A mask of rows with 0, 2 and 4 tokens of padding on the left. [3, 1, 8, 8]"""
    real = torch.arange(WIDTH) >= torch.tensor([0, 2, 4])[:, None]
    return torch.ones(WIDTH, WIDTH).bool().tril() & real[:, None, None, :]


MASKS: Masks = {
    "none": lambda: None,
    "rows": seen,
    "one for all rows": lambda: seen()[1:2],
    "scores": lambda: torch.randn(ROWS, HEADS, WIDTH, WIDTH, dtype=torch.float64).masked_fill(~seen(), -1e9),
}


class Layer(nn.Module):
    def __init__(self, groups: int = HEADS, is_causal: bool = True) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = HEADS // groups, is_causal


class Model(nn.Module):
    """What `attending_at` asks of a model."""

    _supports_attention_backend = True

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.config, self.block = sharp_lm("llama").config, block


def states(groups: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values. [3, heads or groups, 8, 6]"""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, heads, WIDTH, 6) for heads in (HEADS, groups, groups)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of tokens a row that attend in each call of torch's kernel."""
    calls: list[int] = []
    kernel = sdpa_attention_forward

    def counted(module: nn.Module, query: Tensor, *args: Any, **options: Any) -> Any:
        calls.append(query.shape[2])
        return kernel(module, query, *args, **options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", counted)
    return calls


def learned(layer: Layer, places: Sequence[int], mask: Tensor | None, alone: bool) -> list[Tensor]:
    """The values at some places, and the gradients of queries, keys and values."""
    arguments, where = states(HEADS // layer.num_key_value_groups), torch.tensor(places)
    which = Attending(where, 7.0, lambda module: None)
    with attending_at(Model(layer), layer if alone else nn.Module(), which):
        values = attend(layer, *arguments, mask, scaling=0.3)[0].flatten(0, 1)
    chosen = values[where]
    (chosen * torch.arange(1.0, 1 + chosen.numel(), dtype=torch.float64).view_as(chosen)).sum().backward()
    if alone:
        others = torch.ones(len(values)).bool().index_fill(0, where, False)
        assert (values[others] == 7).all()
    return [chosen, *(argument.grad for argument in arguments if argument.grad is not None)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layer", [Layer(), Layer(2), Layer(1), Layer(is_causal=False)], ids=str)
@pytest.mark.parametrize("places", [[7, 15, 23], [15, 7], [14, 7, 22, 15], [5]])
def test_values_and_gradients(name: str, layer: Layer, places: list[int], queries: list[int]) -> None:
    """One or two tokens a row, in any order, and rows of which none is read."""
    torch.manual_seed(0)
    mask = MASKS[name]()
    found, expected = (learned(layer, places, mask, alone) for alone in (True, False))
    torch.testing.assert_close(found, expected)
    assert queries == [max(sum(place // WIDTH == row for place in places) for row in range(ROWS)), WIDTH]


@settings(deadline=None)
@given(places=st.sets(st.integers(0, ROWS * WIDTH - 1), min_size=1, max_size=9).map(list), masked=st.booleans())
def test_any_tokens(places: list[int], masked: bool) -> None:
    """Padding too, which sees no token; at most half of the tokens of a row, or all attend."""
    most = max(sum(place // WIDTH == row for place in places) for row in range(ROWS))
    mask = seen() if masked else None
    if most <= 4 and (masked or most <= 3):
        found, expected = (learned(Layer(), places, mask, alone) for alone in (True, False))
        torch.testing.assert_close(found, expected)
        assert all(values.isfinite().all() for values in found)


@pytest.mark.parametrize(("count", "mask", "alone"), [(6, "rows", 6), (7, "rows", 8), (6, "none", 6), (7, "none", 8)])
def test_many_tokens_do_not_attend_alone(count: int, mask: str, alone: int, queries: list[int]) -> None:
    """Three quarters of what torch's kernel computes are worth it; without a mask, it takes 32 tokens at a time."""
    layer = Layer()
    with attending_at(Model(layer), layer, Attending(torch.arange(count), 0.0, lambda module: None)):
        attend(layer, *states(), MASKS[mask]())
    assert queries == [alone]


@pytest.mark.parametrize(("length", "alone"), [(8, [2]), (2, [])])
def test_pieces_that_cost_less(length: int, alone: list[int], queries: list[int]) -> None:
    """Two of 8 tokens see 16 of them, in pieces of 2 tokens all see 2, and in pieces of 8 all see 8."""
    layer, mask = Layer(), torch.ones(ROWS, 1, WIDTH, WIDTH).bool().tril()
    count = ROWS * WIDTH // length
    set_pieces(mask, [Piece(length, prompt_piece=number) for number in range(count)])
    with attending_at(Model(layer), layer, Attending(torch.tensor([0, 1, 8, 9, 16, 17]), 0.0, lambda module: None)):
        attend(layer, *states(), mask)
    assert queries == alone


def test_what_all_tokens_attend_in(queries: list[int]) -> None:
    """A hook may look at them, a bias of positions is for all, and keys of a cache do not tell which are before."""
    layer, last = Layer(), torch.tensor([7, 15, 23])
    query, key, value = states()
    keys, values = (torch.cat([part, part], dim=2) for part in (key, value))
    with attending_at(Model(layer), layer, Attending(last, 0.0, lambda module: pytest.fail())):
        attend(layer, query, key, value, None, position_bias=torch.zeros(1, 1, WIDTH, WIDTH, dtype=torch.float64))
        attend(layer, query, keys, values, None)
        with layer.register_forward_hook(lambda *args: None):
            attend(layer, query, key, value, None)
        attend(nn.Module(), query, key, value, None)  # of another block
    attend(layer, query, key, value, None)
    assert queries == [WIDTH] * 5


IN_ALL = {
    "bloom": "takes no attention from the interface",
    "falcon": "takes no attention from the interface",
    "gemma2": "attends with eager attention",
}


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_every_family(family: str, queries: list[int]) -> None:
    """The last of three blocks; states and gradients are those of a whole pass."""
    lm, places = sharp_lm(family), torch.tensor([5, 11])
    assert can_skip_unread(lm) == (family != "bloom")
    queries.clear()
    ids = torch.randint(2, 32, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])

    def learn() -> dict[str, Tensor]:
        lm.zero_grad()
        states = lm.base_model(input_ids=ids, attention_mask=mask).last_hidden_state.flatten(0, 1)[places]
        states.square().sum().backward()
        grads = {name: weight.grad.clone() for name, weight in lm.named_parameters() if weight.grad is not None}
        return {"states": states.detach(), **grads}

    whole = learn()
    with read_at(lm, last_block(lm), places):
        found = learn()
    assert queries == ([] if family in IN_ALL else [6, 6, 1])
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=name)
    assert not [part for part in lm.modules() if "forward" in vars(part)]


def test_what_follows_the_attention_computes_these_tokens_alone() -> None:
    """Of 12 tokens 2 are read: the last block saves 10 products with o_proj, and with the three weights of `mlp`."""
    lm, flops = sharp_lm("llama"), []
    block: Any = blocks(lm)[-1]
    weights = block.self_attn.o_proj.weight.numel() + sum(weight.numel() for weight in block.mlp.parameters())
    for places in (None, torch.tensor([5, 11])):
        with FlopCounterMode(display=False) as counter, read_at(lm, block, places), torch.no_grad():
            lm.base_model(input_ids=torch.arange(12).view(2, 6))
        flops.append(counter.get_flop_counts()["Global"][torch.ops.aten.mm])
    assert flops[0] - flops[1] == 2 * 10 * weights


def test_a_model_attends_as_before_after_it() -> None:
    lm, mask = sharp_lm("llama"), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    set_pieces(mask, [Piece(5, prompt_piece=0)])
    config: Any = lm.config
    with pytest.raises(KeyError), piece_by_piece(lm, mask):
        assert config._attn_implementation == NAME
        raise KeyError
    assert config._attn_implementation == "sdpa"
    for other in (None, mask.clone()):
        with piece_by_piece(lm, other):
            assert config._attn_implementation == "sdpa"
    checkpoint_activations(lm)
    with piece_by_piece(lm, mask):  # the backward pass would attend otherwise
        assert config._attn_implementation == "sdpa"


def test_only_the_part_for_text_attends_otherwise() -> None:
    """A model for texts and images may attend in two ways."""
    model: Any = nn.Module()
    config: Any = Gemma3Config()
    model.config, mask = config, torch.ones(1, 1, 5, 5, dtype=torch.bool)
    config.text_config._attn_implementation, config.vision_config._attn_implementation = "sdpa", "eager"
    set_pieces(mask, [Piece(5, prompt_piece=0)])
    with piece_by_piece(model, mask):
        assert config.text_config._attn_implementation == NAME
    assert config.text_config._attn_implementation == "sdpa"
    assert config.vision_config._attn_implementation == "eager"


def test_the_parts_of_a_configuration_keep_their_attention() -> None:
    config: Any = Gemma3Config()
    parts = config, config.text_config, config.vision_config
    for part, name in zip(parts, ("flex_attention", "sdpa", "eager"), strict=True):
        part._attn_implementation = name
    with attending(config, NAME):
        assert [part._attn_implementation for part in parts] == [NAME, "sdpa", "eager"]
    assert [part._attn_implementation for part in parts] == ["flex_attention", "sdpa", "eager"]


def test_eager_attention_stays() -> None:
    lm, mask = sharp_lm("llama"), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    set_pieces(mask, [Piece(5, prompt_piece=0)])
    lm.set_attn_implementation("eager")
    with piece_by_piece(lm, mask):
        assert lm.config._attn_implementation == "eager"
