"""The parts of a language model that are found by structure: blocks, head, width, and the start of a decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from tests.tiny import FAMILIES, ODD_FAMILIES, tiny_config, tiny_lm
from tests.unit.models.support import sharp_lm
from trlx_like.errors import ConfigError
from trlx_like.models.layout import blocks, decoder_start, hidden_size, last_block, read_at
from trlx_like.models.policy import LanguagePolicy


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_hidden_size_is_that_of_the_last_hidden_state(family: str) -> None:
    lm = sharp_lm(family)
    hidden = lm.base_model(input_ids=torch.tensor([[3]])).last_hidden_state
    assert hidden_size(lm) == hidden.shape[-1] == (8 if family == "opt_projected" else 16)


def test_a_model_without_a_head_and_one_without_blocks_are_refused() -> None:
    lm: Any = sharp_lm("gpt2")
    with pytest.raises(ConfigError, match=r"model\.model_path: GPT2Model is not a language model with a head"):
        LanguagePolicy(lm.base_model, num_layers_unfrozen=1)
    lm.config.n_layer = 7
    with pytest.raises(ConfigError, match=r"no list of 7 blocks .* use model\.num_layers_unfrozen: -1"):
        LanguagePolicy(lm, num_layers_unfrozen=1)


def test_what_a_decoder_begins_with() -> None:
    assert decoder_start(tiny_lm("gpt2")) is None
    assert decoder_start(tiny_lm("t5")) == decoder_start(tiny_lm("bart")) == 1
    lm = tiny_lm("t5")
    lm.generation_config.decoder_start_token_id = 5
    assert decoder_start(lm) == 5
    lm = AutoModelForSeq2SeqLM.from_config(tiny_config("t5", decoder_start_token_id=None))
    with pytest.raises(ConfigError, match="which token its decoder begins with; set decoder_start_token_id"):
        LanguagePolicy(lm)


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_the_last_feed_forward_network_computes_what_is_read(family: str) -> None:
    """States and gradients are those of a whole pass; OPT has no such part, and Bloom's takes a second argument."""
    lm, places = sharp_lm(family), torch.tensor([4, 5, 11])
    ids, rows = torch.randint(2, 32, (2, 6)), list[int]()
    part = getattr(blocks(lm)[-1], "mlp", None)
    first = None if part is None else next(module for module in part.modules() if not list(module.children()))
    if first is not None:
        first.register_forward_hook(lambda module, args, output: rows.append(output.shape[:-1].numel()))

    def learn() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        lm.zero_grad()
        states = lm.base_model(input_ids=ids).last_hidden_state.flatten(0, 1)[places]
        states.square().sum().backward()
        return states.detach(), {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}

    whole, gradients = learn()
    with read_at(lm, last_block(lm), places):
        states, others = learn()
    assert rows == ([] if part is None else [12, 12 if family == "bloom" else 3])
    torch.testing.assert_close(states, whole, rtol=0, atol=2e-5)
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-4, msg=name)
    assert part is None or "forward" not in vars(part)


def test_all_tokens_are_computed_where_a_backward_pass_computes_them_again() -> None:
    """The second time is after the block, where the part is as it was."""
    lm, seen = sharp_lm("llama").train(), list[int]()
    lm.gradient_checkpointing_enable()
    mlp: Any = blocks(lm)[-1].mlp
    mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
    with read_at(lm, last_block(lm), torch.tensor([5])):
        states = lm.base_model(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]]), use_cache=False).last_hidden_state
    states[0, 5].sum().backward()
    assert seen == [6, 6]


def test_an_unknown_family_computes_all_tokens() -> None:
    lm: Any = sharp_lm("gpt2")
    lm.config.n_layer = 7
    with read_at(lm, last_block(lm), torch.tensor([1])):
        assert not any("forward" in vars(module) for module in lm.modules())
