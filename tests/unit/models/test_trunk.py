"""Scores and gradients from kept states against those of the whole model, for every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.tiny import FAMILIES, ODD_FAMILIES, SEQ2SEQ_FAMILIES
from tests.unit.models.support import batch_of_ids, scored, sharp_lm, valued_policy
from tests.unit.models.test_compaction import packing, pairs_of_rows
from trlx_like.data import Completion
from trlx_like.models import compaction
from trlx_like.models.adapters import add_adapter
from trlx_like.models.compaction import Compaction, compaction_of
from trlx_like.models.layout import blocks
from trlx_like.models.loading import checkpoint_activations
from trlx_like.models.policy import LanguagePolicy
from trlx_like.models.trunk import Trunk, make_trunk


def kept(policy: LanguagePolicy, batch: Completion) -> Completion:
    """The batch with its states, as elements that were put together again: padding is zero."""
    with torch.no_grad():
        out = policy(batch)
    assert out.trunk is not None
    batch.keep(out.trunk)
    return type(batch).collate(batch.split())


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("head_blocks", [0, 2])
@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_every_family_gives_the_same_bits(family: str, head_blocks: int) -> None:
    policy = valued_policy(sharp_lm(family), num_layers_unfrozen=1, head_blocks={"value": head_blocks})
    policy.add_reference()
    reason = policy.add_trunk()
    assert reason is None and policy.trunk is not None
    assert policy.trunk.lowest == (1 if head_blocks else 2)
    batch = batch_of_ids()
    expected = scored(policy, batch)
    assert any("blocks" not in name and value.abs().sum() > 0 for name, value in expected.items())
    assert_equal(scored(policy, kept(policy, batch)), expected)


def test_blocks_below_do_not_run() -> None:
    policy = valued_policy(sharp_lm("llama"), num_layers_unfrozen=1)
    policy.add_trunk()
    batch = kept(policy, batch_of_ids())
    ran: list[int] = []
    for number, block in enumerate(blocks(policy.lm)):
        block.register_forward_hook(lambda *_, number=number: ran.append(number))
    policy(batch)
    assert ran == [2]


def test_a_pass_that_fails_keeps_no_states() -> None:
    policy = valued_policy(sharp_lm("llama"), num_layers_unfrozen=1)
    policy.add_trunk()
    batch = kept(policy, batch_of_ids())

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    blocks(policy.lm)[2].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        policy(batch)
    assert policy.trunk is not None and not hasattr(policy.trunk.entry, "states")


def test_an_adapter_on_the_top_blocks() -> None:
    lm = sharp_lm("llama")
    add_adapter(lm, {"peft_type": "LORA", "r": 2, "layers_to_transform": [1, 2]}, "causal")
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    policy = valued_policy(lm)
    policy.add_reference()
    assert policy.add_trunk() is None and policy.trunk is not None and policy.trunk.lowest == 1
    batch = batch_of_ids()
    expected = scored(policy, batch)
    assert_equal(scored(policy, kept(policy, batch)), expected)


def adapted_top(family: str, checkpointed: bool = False) -> LanguagePolicy:
    """A policy with a new adapter of which the part in the top block is trained, a trunk, and a reference.

    The adapter has moved since the reference was added.
    """
    lm = sharp_lm(family)
    torch.manual_seed(5)
    add_adapter(lm, {"peft_type": "LORA", "r": 2, "lora_alpha": 64, "target_modules": "all-linear"}, None)
    trained = [parameter for parameter in blocks(lm)[2].parameters() if parameter.requires_grad]
    lm.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    if checkpointed:
        checkpoint_activations(lm)
    policy = LanguagePolicy(lm)
    assert policy.add_trunk() is None and policy.trunk is not None and policy.trunk.lowest == 2
    policy.add_reference()
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.3 * torch.randn_like(parameter))
    return policy


def passes(lm: PreTrainedModel) -> list[tuple[int, int]]:
    """A list that gets the number of a block and the tokens of its feed-forward network, for each later pass."""
    ran: list[tuple[int, int]] = []
    for number, block in enumerate(blocks(lm)):
        block.get_submodule("mlp.down_proj").register_forward_hook(
            lambda *of, number=number: ran.append((number, of[2].shape[:-1].numel()))
        )
    return ran


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_the_reference_of_an_adapter_shares_the_frozen_blocks(family: str) -> None:
    """It equals the model without the adapter bit by bit, whether the batch has kept states or not."""
    policy = adapted_top(family)
    with torch.no_grad():
        whole = LanguagePolicy(sharp_lm(family))(batch_of_ids()).logprobs
        for batch in (batch_of_ids(), kept(policy, batch_of_ids())):
            found = policy(batch, reference=True)
            assert torch.equal(found.ref_logprobs, whole)
            assert (found.logprobs - whole).abs().max() > 0.01


WAYS: dict[str, Callable[[Any], Compaction]] = {
    "rows": lambda lm: Compaction(hidden=16, skips_unread=True),
    "packed": packing,
    "piece by piece": lambda lm: replace(compaction_of(lm), share=False, hidden=10**6),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_reference_of_an_adapter_reads_a_batch_as_the_policy_does(
    way: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "KERNEL_CALL", 0)  # so that pieces are worth it
    policy, whole = adapted_top("llama", checkpointed).train(), LanguagePolicy(sharp_lm("llama"))
    if checkpointed:
        checkpoint_activations(whole.train().lm)
    # With frozen blocks all tokens are read; without them the last token of a response is not.
    policy.compaction, whole.compaction = WAYS[way](policy.lm), replace(WAYS[way](whole.lm), skips_last=False)
    ran, alone = passes(policy.lm), passes(whole.lm)
    with torch.no_grad():
        expected = whole(pairs_of_rows()).logprobs
        states = policy(pairs_of_rows()).trunk
    assert states is not None
    below, top = alone[:2], alone[2]
    for with_states in (False, True):
        batch = pairs_of_rows()
        if with_states:
            batch.keep(states)
        ran.clear()
        found = policy(batch, reference=True)
        assert torch.equal(found.ref_logprobs, expected)
        assert ran == [*([] if with_states else below), top, top]
        found.logprobs.sum().backward()


def test_gradient_checkpointing_computes_the_same() -> None:
    policy = valued_policy(sharp_lm("gpt2"), num_layers_unfrozen=2)
    policy.add_reference()
    policy.add_trunk()
    batch = batch_of_ids()
    policy.train()
    expected = scored(policy, batch)
    again = kept(policy, batch)
    policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
    found = scored(policy, again)
    assert_equal(found, scored(policy, batch_of_ids()))
    for name, value in expected.items():  # the last feed-forward network computes all tokens under it
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("unfrozen", [-1, 3])
def test_models_without_frozen_blocks_below_trained_ones(unfrozen: int) -> None:
    policy = valued_policy(sharp_lm("llama"), num_layers_unfrozen=unfrozen)
    assert str(policy.add_trunk()).startswith("the lowest block is trained")
    assert policy(batch_of_ids()).trunk is None


def test_with_heads_alone_the_last_block_runs() -> None:
    policy = valued_policy(sharp_lm("llama"), num_layers_unfrozen=0)
    policy.add_reference()
    expected = scored(policy, batch_of_ids())
    assert policy.add_trunk() is None and policy.trunk is not None
    assert policy.trunk.lowest == len(blocks(policy.lm)) - 1
    assert_equal(scored(policy, kept(policy, batch_of_ids())), expected)


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
def test_an_encoder_decoder_runs_whole(family: str) -> None:
    policy = valued_policy(sharp_lm(family), num_layers_unfrozen=1)
    assert "encoder-decoder" in str(policy.add_trunk())


def test_factors_of_the_longest_position_differ_from_batch_to_batch() -> None:
    policy = valued_policy(sharp_lm("phi3_longrope"), num_layers_unfrozen=1)
    assert str(policy.add_trunk()).startswith("rotary embeddings depend on the longest sample of a batch")


def test_trained_embeddings_are_below_all_blocks() -> None:
    lm = sharp_lm("llama")
    for block in blocks(lm)[:2]:
        block.requires_grad_(False)
    assert make_trunk(lm) == "weights below the blocks are trained"


@pytest.mark.parametrize("unfrozen", [1, 3])
def test_blocks_that_take_keys_from_lower_ones_run_whole(unfrozen: int) -> None:
    policy = valued_policy(sharp_lm("gemma3n", layers=6), num_layers_unfrozen=unfrozen)
    assert policy.add_trunk() == "blocks of Gemma3nForCausalLM read more than the states of the block below"


def test_a_block_that_reads_more_than_its_input_is_noticed() -> None:
    lm: Any = sharp_lm("llama")
    seen: list[Tensor] = []
    blocks(lm)[0].register_forward_hook(lambda *of_block: seen.append(of_block[2]))

    def also(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + seen.pop() if seen else output

    blocks(lm)[2].register_forward_hook(also)
    assert not Trunk(lm, 2).agrees()
    LanguagePolicy(lm, num_layers_unfrozen=1)
    assert make_trunk(lm) == "blocks of LlamaForCausalLM read more than the states of the block below"
