"""What a policy says of a batch, against the model's own logits of each row alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from tests.tiny import FAMILIES, ODD_FAMILIES, SEQ2SEQ_FAMILIES
from tests.unit.models.support import (
    LENGTHS,
    VOCABULARY,
    allowed_table,
    batch_of_ids,
    gradients,
    plain_distributions,
    plain_logprobs,
    repadded,
    rows_of_ids,
    sharp_lm,
    valued_policy,
)
from trlx_like.data import Completion
from trlx_like.functional.kl import full_kl
from trlx_like.models.layout import blocks
from trlx_like.models.policy import LanguagePolicy, PolicyOutput


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5, check_dtype=False)


def test_inputs_golden() -> None:
    # Two real prompt tokens (5, 6), then 7; one real prompt token (8), then 9 and 4.
    batch = Completion(
        torch.tensor([[5, 6], [3, 8]]),
        torch.tensor([[True, True], [False, True]]),
        torch.tensor([[7, 3], [9, 4]]),
        torch.tensor([[True, False], [True, True]]),
    )
    inputs = {name: value.tolist() for name, value in batch.inputs().items()}
    assert inputs == {
        "input_ids": [[5, 6, 7, 3], [3, 8, 9, 4]],
        "attention_mask": [[1, 1, 1, 0], [0, 1, 1, 1]],
        "position_ids": [[0, 1, 2, 2], [0, 0, 1, 2]],
    }
    assert batch.previous().tolist() == [[6, 7], [8, 9]]


def test_equal_logits_golden() -> None:
    # With an output layer of zeros all tokens are as likely: log p = -ln 32, entropy ln 32. After token 5 only 6 and 7
    # are allowed: -ln 2.
    lm = sharp_lm("llama")
    lm.lm_head.weight.data.zero_()
    batch = batch_of_ids([(2, 1)])
    out = LanguagePolicy(lm)(batch, entropy=True)
    close(out.logprobs, torch.tensor([[-math.log(32)]]))
    assert out.entropy is not None
    close(out.entropy, torch.tensor([[math.log(32)]]))
    batch.prompt[0, -1], batch.response[0, 0] = 5, 6
    allowed = torch.ones(VOCABULARY, VOCABULARY).bool()
    allowed[5] = torch.tensor([token in (6, 7) for token in range(VOCABULARY)])
    close(LanguagePolicy(lm, allowed=allowed)(batch).logprobs, torch.tensor([[-math.log(2)]]))


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES + SEQ2SEQ_FAMILIES)
def test_logprobs_and_entropy_are_those_of_the_model_alone(family: str) -> None:
    lm, batch = sharp_lm(family), batch_of_ids()
    settings: list[tuple[float, Tensor | None]] = [(1.0, None)]
    if family not in ODD_FAMILIES:
        settings += [(0.7, None), (1.3, allowed_table(batch))]
    for temperature, allowed in settings:
        out = LanguagePolicy(lm, temperature=temperature, allowed=allowed)(batch, entropy=True)
        assert out.entropy is not None and out.ref_logprobs is None and out.divergence is None
        for i, row in enumerate(rows_of_ids()):
            length = len(row.response)
            logp = plain_distributions(lm, row, temperature, allowed)
            close(out.logprobs[i, :length], logp.gather(1, row.response[:, None])[:, 0])
            close(out.entropy[i, :length], -(logp.exp() * logp.clamp(min=-1e9)).sum(-1))
            assert not out.logprobs[i, length:].any() and not out.entropy[i, length:].any()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tied_and_untied_embeddings(family: str, tied: bool) -> None:
    lm = sharp_lm(family, tie_word_embeddings=tied)
    assert (lm.get_output_embeddings().weight is lm.get_input_embeddings().weight) == tied
    out = LanguagePolicy(lm)(batch_of_ids())
    for i, row in enumerate(rows_of_ids()):
        close(out.logprobs[i, : len(row.response)], plain_logprobs(lm, row))


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_values_are_of_the_states_around_the_tokens(family: str) -> None:
    lm = sharp_lm(family)
    policy = valued_policy(lm)
    values = policy(batch_of_ids()).heads["value"]
    assert values.shape == (3, 7)
    for i, row in enumerate(rows_of_ids()):
        with torch.no_grad():
            hidden = lm.base_model(input_ids=torch.cat([row.prompt, row.response])[None]).last_hidden_state[0]
            states = policy.heads["value"](hidden[len(row.prompt) - 1 :])
        assert states.std() > 0.05
        close(values[i, : len(states)], states)


def scored_sum(out: PolicyOutput, batch: Completion) -> Tensor:
    """Something that depends on all outputs at real places, differently on each."""
    real_states = torch.cat([torch.ones_like(batch.mask[:, :1]), batch.mask], dim=1)
    weights = torch.linspace(-1, 1, int(batch.mask.sum()))
    assert out.entropy is not None
    parts = [out.logprobs[batch.mask] * weights, out.entropy[batch.mask] * weights.flip(0)]
    return torch.cat([*parts, out.heads["value"][real_states].square()]).sum()


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES + SEQ2SEQ_FAMILIES)
def test_padding_changes_nothing(family: str) -> None:
    policy = valued_policy(sharp_lm(family), num_layers_unfrozen=2, head_blocks={"value": 1})
    policy.add_reference()
    batch = batch_of_ids()
    other = repadded(batch, left=3, right=2)
    width = batch.mask.shape[1]
    results = []
    for each in (batch, other):
        out = policy(each, entropy=True, reference=True)
        scored_sum(out, each).backward()
        assert out.ref_logprobs is not None
        results.append(([out.logprobs[:, :width], out.ref_logprobs[:, :width]], gradients(policy)))
        assert not out.logprobs[:, width:].any()
    (values, grads), (other_values, other_grads) = results
    for one, two in zip(values, other_values, strict=True):
        close(one, two)
    assert grads.keys() == other_grads.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], other_grads[name], rtol=1e-4, atol=2e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ_FAMILIES)
def test_a_row_without_tokens_scores_nothing_and_harms_nothing(family: str) -> None:
    policy = valued_policy(sharp_lm(family))
    policy.add_reference()
    batch = batch_of_ids()
    batch.prompt_mask[1], batch.mask[1] = False, False
    out = policy(batch, entropy=True, reference=True, divergence=full_kl)
    for field in (out.logprobs, out.entropy, out.ref_logprobs, out.divergence):
        assert field is not None and not field[1].any() and torch.isfinite(field).all()
    assert torch.isfinite(out.heads["value"]).all()
    (out.logprobs.sum() + out.entropy.sum() + out.divergence.sum() + out.heads["value"].sum()).backward()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(policy).values())
    for i in (0, 2):
        close(out.logprobs[i, : LENGTHS[i][1]], plain_logprobs(policy.lm, rows_of_ids()[i]))


def test_a_forbidden_token_is_impossible_and_has_no_nan_gradient() -> None:
    batch = batch_of_ids()
    allowed = allowed_table(batch)
    allowed[batch.previous()[0, 1], batch.response[0, 1]] = False
    policy = LanguagePolicy(sharp_lm("gpt2"), allowed=allowed)
    out = policy(batch, entropy=True)
    forbidden = (~allowed[batch.previous(), batch.response]) & batch.mask
    assert torch.equal(out.logprobs == -torch.inf, forbidden) and forbidden.any()
    assert out.entropy is not None and torch.isfinite(out.entropy).all()
    (out.logprobs[batch.mask & ~forbidden].sum() + out.entropy.sum()).backward()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(policy).values())


@pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ_FAMILIES)
def test_full_kl_is_exact_and_trains_the_policy_only(family: str) -> None:
    lm, other, batch = sharp_lm(family), sharp_lm(family, seed=5), batch_of_ids()
    allowed = allowed_table(batch)
    policy = LanguagePolicy(lm, temperature=0.8, allowed=allowed)
    policy.add_reference(other)
    out = policy(batch, divergence=full_kl)
    assert out.divergence is not None
    for i, row in enumerate(rows_of_ids()):
        logp, logq = (plain_distributions(each, row, 0.8, allowed) for each in (lm, other))
        exact = (logp.exp() * (logp.clamp(min=-1e9) - logq.clamp(min=-1e9))).sum(-1)
        close(out.divergence[i, : len(row.response)], exact)
    out.divergence.sum().backward()
    assert gradients(policy) and not gradients(other)


@pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ_FAMILIES)
@pytest.mark.parametrize("unfrozen", [-1, 2])
def test_gradient_checkpointing_gives_the_same_gradients(family: str, unfrozen: int) -> None:
    """But for rounding, since the last feed-forward network computes all tokens under it."""
    batch, found = batch_of_ids(), []
    for saving in (False, True):
        lm = sharp_lm(family)
        if saving:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        policy = valued_policy(lm, num_layers_unfrozen=unfrozen, head_blocks={"value": 2})
        policy.train()
        scored_sum(policy(batch, entropy=True), batch).backward()
        found.append(gradients(policy))
    assert found[0].keys() == found[1].keys()
    assert any(name.startswith("head_tops.value") for name in found[0])
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES + SEQ2SEQ_FAMILIES)
def test_a_value_branch_begins_as_the_trunk_and_is_trained_by_the_values_alone(family: str) -> None:
    batch = batch_of_ids()
    policy = valued_policy(sharp_lm(family), head_blocks={"value": 1})
    shared = LanguagePolicy(policy.lm, heads=dict(policy.heads))
    out = policy(batch)
    assert torch.equal(out.heads["value"], shared(batch).heads["value"])
    out.heads["value"].square().sum().backward()
    found = gradients(policy)
    last = {id(parameter) for parameter in blocks(policy.lm)[2].parameters()}
    top = {name for name, parameter in policy.lm.named_parameters() if id(parameter) in last}
    assert top and not any(f"lm.{name}" in found for name in top)
    own = {name.rpartition("2.")[2] for name in top}
    assert any(name.startswith("head_tops.value.base") and name.rpartition("2.")[2] in own for name in found)
    policy(batch).logprobs.sum().backward()
    assert not any(name.startswith("head") for name in gradients(policy))


@pytest.mark.parametrize("unfrozen", [0, 1])
def test_a_value_branch_is_trained_where_the_trunk_is_frozen(unfrozen: int) -> None:
    policy = valued_policy(sharp_lm("llama"), num_layers_unfrozen=unfrozen, head_blocks={"value": 2})
    policy(batch_of_ids()).heads["value"].square().sum().backward()
    found = gradients(policy)
    norm = {f"head_tops.value.base.norm.{name}" for name, _ in policy.lm.get_submodule("model.norm").named_parameters()}
    branch = {name for name, _ in policy.named_parameters() if ".layers.1." in name or ".layers.2." in name}
    assert {name for name in found if name.startswith("head_tops")} == norm | {
        name for name in branch if name.startswith("head_tops")
    }
    assert not any(name.startswith("lm.") for name in found)


def test_a_copied_policy_stands_on_its_own() -> None:
    policy, batch = LanguagePolicy(sharp_lm("llama")), batch_of_ids()
    before = policy(batch).logprobs
    other = copy.deepcopy(policy)
    with torch.no_grad():
        policy.lm.lm_head.weight.mul_(2)
    assert torch.equal(other(batch).logprobs, before)
    assert not torch.equal(policy(batch).logprobs, before)
