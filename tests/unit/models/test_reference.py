"""The reference is the policy's start: exactly at step 0, and for ever after. What is frozen is frozen."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from tests.tiny import FAMILIES, ODD_FAMILIES, SEQ2SEQ_FAMILIES, save_tiny, tiny_lm
from tests.unit.models.support import batch_of_ids, plain_logprobs, rows_of_ids, sharp_lm, valued_policy
from tests.unit.models.test_top_blocks import LAYERS
from trlx_like.config import ModelConfig
from trlx_like.errors import CheckpointError, ConfigError
from trlx_like.functional.kl import full_kl
from trlx_like.models.loading import load_model
from trlx_like.models.policy import LanguagePolicy
from trlx_like.models.reference import Fingerprint, create_reference_model
from trlx_like.models.top_blocks import TopBlocks
from trlx_like.models.value_head import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

UNFROZEN = (-1, 0, 1, 2, LAYERS, LAYERS + 2)


def move(policy: LanguagePolicy) -> None:
    """A large optimiser step on everything that is trained."""
    batch = batch_of_ids()
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    out = policy(batch)
    loss = out.logprobs.sum() + out.heads["value"].sum()
    loss.backward()
    torch.optim.SGD(trained, lr=0.1).step()
    policy.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    ("family", "unfrozen"),
    [(family, k) for family in FAMILIES + SEQ2SEQ_FAMILIES for k in (-1, 1, LAYERS)]
    + [
        pytest.param(family, k, marks=pytest.mark.slow)
        for family in FAMILIES + SEQ2SEQ_FAMILIES
        for k in set(UNFROZEN) - {-1, 1, LAYERS}
    ]
    + [(family, k) for family in ODD_FAMILIES for k in (-1, 1, LAYERS)],
)
def test_kl_is_exactly_zero_and_the_reference_stays(family: str, unfrozen: int) -> None:
    policy = valued_policy(sharp_lm(family), num_layers_unfrozen=unfrozen)
    start = copy.deepcopy(policy.lm)
    policy.add_reference()
    policy.train()
    batch = batch_of_ids()
    out = policy(batch, reference=True, divergence=full_kl)
    assert out.ref_logprobs is not None and not out.ref_logprobs.requires_grad
    assert torch.equal(out.logprobs, out.ref_logprobs)
    assert out.divergence is not None and out.divergence.tolist() == torch.zeros_like(out.logprobs).tolist()
    move(policy)
    later = policy(batch, reference=True)
    assert later.ref_logprobs is not None and torch.equal(later.ref_logprobs, out.ref_logprobs)
    moved = (later.logprobs - out.logprobs)[batch.mask].abs().max()
    assert moved > 0.01 if unfrozen else moved == 0
    for i, row in enumerate(rows_of_ids()):
        expected = plain_logprobs(start, row).float()
        torch.testing.assert_close(later.ref_logprobs[i, : len(row.response)], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("unfrozen", [1, 3, 6])
def test_a_reference_of_blocks_that_take_keys_from_lower_ones(unfrozen: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    policy = valued_policy(sharp_lm("gemma3n", layers=6), num_layers_unfrozen=unfrozen)
    policy.add_reference()
    words = "The reference is a copy of the whole model: blocks of Gemma3nForCausalLM read more than"
    assert (words in caplog.text) == (unfrozen > 1)  # one block alone gets the keys among its recorded inputs
    batch = batch_of_ids()
    out = policy(batch, reference=True)
    assert torch.equal(out.logprobs, out.ref_logprobs)
    move(policy)
    later = policy(batch, reference=True)
    assert torch.equal(later.ref_logprobs, out.ref_logprobs) and not torch.equal(later.logprobs, out.logprobs)


@pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ_FAMILIES)
def test_models_in_files_get_a_reference_of_their_top(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, layers=4)
    options = ModelConfig(
        model_path=str(tmp_path), model_arch_type="seq2seq" if family in SEQ2SEQ_FAMILIES else "causal"
    )
    for unfrozen in (1, 2, 4):
        policy = LanguagePolicy(load_model(str(tmp_path), options, unread=True), num_layers_unfrozen=unfrozen)
        policy.add_reference()
        assert isinstance(policy.reference_modules()[0], TopBlocks)


def follow(policy: LanguagePolicy, share: float) -> None:
    with torch.no_grad():
        for reference, weight in policy.followed():
            reference.lerp_(weight, share)


@pytest.mark.parametrize("unfrozen", [-1, 0, 1, LAYERS + 2])
@pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ_FAMILIES)
def test_a_reference_that_moved_all_the_way_is_the_policy(family: str, unfrozen: int) -> None:
    """And one that moved by nothing stays what it was."""
    policy = valued_policy(sharp_lm(family), num_layers_unfrozen=unfrozen)
    policy.add_reference()
    batch = batch_of_ids()
    start = policy(batch, reference=True).ref_logprobs
    move(policy)
    follow(policy, 0.0)
    assert torch.equal(policy(batch, reference=True).ref_logprobs, start)
    follow(policy, 1.0)
    moved = policy(batch, reference=True)
    assert torch.equal(moved.ref_logprobs, moved.logprobs)
    assert torch.equal(moved.logprobs, start) == (unfrozen == 0)


@pytest.mark.parametrize("unfrozen", [-1, 0, 1, LAYERS])
@pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ_FAMILIES)
def test_kl_is_exactly_zero_in_bfloat16_and_with_checkpointing(family: str, unfrozen: int) -> None:
    lm = sharp_lm(family)
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = LanguagePolicy(lm, num_layers_unfrozen=unfrozen, temperature=0.7)
    policy.add_reference()
    policy.train()
    with torch.autocast("cpu", torch.bfloat16):
        out = policy(batch_of_ids(), reference=True)
    assert torch.equal(out.logprobs, out.ref_logprobs)


@pytest.mark.parametrize("unfrozen", [-1, 0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ_FAMILIES)
def test_frozen_parameters_get_no_gradient_and_do_not_change(family: str, unfrozen: int) -> None:
    policy = valued_policy(sharp_lm(family), num_layers_unfrozen=unfrozen, head_blocks={"value": 1})
    policy.add_reference()
    held = {id(p): p.clone() for module in policy.reference_modules() for p in module.parameters()}
    before = {name: p.clone() for name, p in policy.lm.named_parameters()}
    out = policy(batch_of_ids(), reference=True, divergence=full_kl)
    assert out.divergence is not None
    (out.logprobs.sum() + out.heads["value"].sum() + out.divergence.sum()).backward()
    for parameter in policy.lm.parameters():
        assert parameter.requires_grad or parameter.grad is None
    move(policy)
    for name, parameter in policy.lm.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, before[name]), name
    if unfrozen:
        assert any(not torch.equal(parameter, before[name]) for name, parameter in policy.lm.named_parameters())
    for module in policy.reference_modules():
        for parameter in module.parameters():
            assert not parameter.requires_grad and parameter.grad is None
            assert torch.equal(parameter, held[id(parameter)])


@pytest.mark.parametrize("unfrozen", UNFROZEN)
@pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ_FAMILIES)
def test_the_reference_is_no_part_of_the_policy(family: str, unfrozen: int) -> None:
    policy = valued_policy(sharp_lm(family), num_layers_unfrozen=unfrozen)
    names, count = set(policy.state_dict()), len(list(policy.parameters()))
    policy.add_reference()
    assert set(policy.state_dict()) == names and len(list(policy.parameters())) == count
    own = {id(parameter) for parameter in policy.parameters()}
    held = [p for module in policy.reference_modules() for p in module.parameters()]
    assert not own & {id(parameter) for parameter in held}
    assert policy.train() and not any(
        module.training for part in policy.reference_modules() for module in part.modules()
    )


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES + SEQ2SEQ_FAMILIES)
def test_a_deep_trunk_under_one_trained_block(family: str) -> None:
    # Families whose blocks return tuples take one apart after each block, also after those that are passed through.
    policy = LanguagePolicy(sharp_lm(family, layers=6), num_layers_unfrozen=1)
    policy.add_reference()
    out = policy(batch_of_ids(), reference=True)
    assert torch.equal(out.logprobs, out.ref_logprobs)


def test_only_the_trained_top_is_held_twice() -> None:
    def size(modules: list[nn.Module]) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    policies = {k: LanguagePolicy(sharp_lm("llama"), num_layers_unfrozen=k) for k in (-1, 0, 1)}
    for policy in policies.values():
        policy.add_reference()
    trained = sum(p.numel() for p in policies[1].parameters() if p.requires_grad)
    assert size(policies[-1].reference_modules()) == size([policies[-1].lm])
    assert size(policies[0].reference_modules()) == 0
    assert size(policies[1].reference_modules()) == trained


@pytest.mark.parametrize("unfrozen", [-1, 1])
def test_another_model_as_reference(unfrozen: int) -> None:
    other = sharp_lm("llama", seed=7)
    policy = valued_policy(sharp_lm("gpt2"), num_layers_unfrozen=unfrozen)
    policy.add_reference(other.train())
    batch = batch_of_ids()

    def held() -> Tensor:
        out = policy(batch, reference=True)
        assert out.ref_logprobs is not None
        return out.ref_logprobs

    first = held()
    move(policy)
    assert torch.equal(held(), first)
    for i, row in enumerate(rows_of_ids()):
        expected = plain_logprobs(other, row).float()
        torch.testing.assert_close(first[i, : len(row.response)], expected, rtol=0, atol=1e-5)
    assert not other.training and not any(p.requires_grad for p in other.parameters())


@pytest.mark.parametrize("unfrozen", UNFROZEN)
def test_the_reference_samples_from_the_same_distribution(unfrozen: int) -> None:
    # Temperature and allowed tokens hold for both sides.
    batch = batch_of_ids()
    allowed = torch.ones(32, 32).bool()
    allowed[:, 5:] = torch.rand(32, 27, generator=torch.Generator().manual_seed(0)) < 0.7
    allowed[batch.previous(), batch.response] = True
    policy = valued_policy(sharp_lm("qwen3"), num_layers_unfrozen=unfrozen, temperature=0.5, allowed=allowed)
    start = copy.deepcopy(policy.lm)
    policy.add_reference()
    move(policy)
    out = policy(batch, reference=True)
    assert out.ref_logprobs is not None
    for i, row in enumerate(rows_of_ids()):
        expected = plain_logprobs(start, row, 0.5, allowed).float()
        torch.testing.assert_close(out.ref_logprobs[i, : len(row.response)], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("pattern", "family"), [(None, "gpt2"), ("transformer.h.{layer}", "gpt2"), (None, "t5")])
def test_create_reference_model_shares_and_freezes(pattern: str | None, family: str) -> None:
    """Block 0 and the embeddings are one tensor in both; block 1 and what follows are a copy."""
    lm = tiny_lm(family)
    wrapper = AutoModelForSeq2SeqLMWithValueHead if family == "t5" else AutoModelForCausalLMWithValueHead
    model = wrapper(lm)
    reference = create_reference_model(model, num_shared_layers=1, pattern=pattern)
    mine, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    shared = {name for name in mine if mine[name] is theirs[name]}
    assert shared == {name for name, weight in mine.items() if not weight.requires_grad}
    first, second = ("decoder.block.0.", "decoder.block.1.") if family == "t5" else ("h.0.", "h.1.")
    assert any(first in name for name in shared) and not any(second in name for name in shared)
    assert not any(name.startswith("v_head") for name in shared)
    assert any("wte" in name or "shared" in name for name in shared)
    assert not any(weight.requires_grad for weight in reference.parameters()) and not reference.training
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1)
    assert all(not torch.equal(mine[name], theirs[name]) for name in mine if name not in shared)


def test_what_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match=r"num_shared_layers \(2\) must be at least 0 and below 2"):
        create_reference_model(tiny_lm(), num_shared_layers=2)
    with pytest.raises(
        ConfigError, match=r"pattern \('layers\.\{layer\}'\): no weight of GPT2LMHeadModel has 'layers\.1'"
    ):
        create_reference_model(tiny_lm(), num_shared_layers=1, pattern="layers.{layer}")
    lm = tiny_lm()
    lm.add_adapter(LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(ConfigError, match="all blocks of a model with an adapter are frozen already"):
        create_reference_model(lm, num_shared_layers=1)


def test_create_reference_model_is_a_frozen_copy_in_evaluation_mode() -> None:
    lm = tiny_lm("gpt2").train()
    reference = create_reference_model(lm)
    assert lm.training and not reference.training
    assert all(p.requires_grad for p in lm.parameters()) and not any(p.requires_grad for p in reference.parameters())
    ids = torch.tensor([[3, 4, 5]])
    before = reference(ids).logits
    assert torch.equal(lm.eval()(ids).logits, before)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(1)
    assert torch.equal(reference(ids).logits, before)


def test_another_reference_than_the_runs_is_refused() -> None:
    saved = Fingerprint([tiny_lm(seed=0)]).state_dict()
    Fingerprint([tiny_lm(seed=0)]).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="the reference is not the model that the run began with"):
        Fingerprint([tiny_lm(seed=1)]).load_state_dict(saved)
