"""The last blocks of a policy compute the tokens that are read: how many, and the same scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from tests.tiny import FAMILIES, ODD_FAMILIES
from tests.unit.models.support import assert_equal_scores, batch_of_ids, scored, sharp_lm, valued_policy
from tests.unit.models.test_compaction import packing, pairs_of_rows
from tests.unit.models.test_shared_prompts import SHARING, shared_batch
from trlx_like.data import Completion
from trlx_like.data.preference import MultiTurnCompletion
from trlx_like.models.compaction import Compaction, compaction_of
from trlx_like.models.last_states import can_skip_unread, last_block, read_at
from trlx_like.models.layout import blocks
from trlx_like.models.packed_rows import PackedRows
from trlx_like.models.policy import LanguagePolicy
from trlx_like.trainers.sft import SFTExperience

PICKING = Compaction(hidden=16, skips_unread=True)
"""Rows are read as they are."""
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[], Completion]]] = {
    "rows": (lambda lm: PICKING, batch_of_ids),
    "packed": (packing, pairs_of_rows),
    "shared": (lambda lm: replace(SHARING, skips_unread=True), shared_batch),
}
TOP = {"num_layers_unfrozen": 1, "head_blocks": {"value": 1}}


def networks(policy: LanguagePolicy) -> dict[str, Any]:
    """The last feed-forward networks of a policy, its value branch and its reference, by name."""
    found = {"policy": last_block(policy.lm)}
    found |= {name: list(_layers(top))[-1] for name, top in policy.head_tops.items()}
    if modules := policy.reference_modules():
        found["reference"] = list(_layers(modules[0]))[-1]
    return {name: block.mlp for name, block in found.items() if block is not None}


def _layers(module: nn.Module) -> nn.ModuleList:
    return next(part for part in module.modules() if isinstance(part, nn.ModuleList))


def counted(policy: LanguagePolicy) -> dict[str, list[int]]:
    """Lists that get the number of tokens of each later pass through these networks."""
    counts: dict[str, list[int]] = {}
    for name, part in networks(policy).items():
        taken = counts[name] = list[int]()
        leaf = next(module for module in part.modules() if not list(module.children()))
        leaf.register_forward_hook(lambda module, args, out, taken=taken: taken.append(out.shape[:-1].numel()))
    return counts


def assert_as_whole(policy: LanguagePolicy, batch: Completion) -> None:
    counts = counted(policy)
    found = scored(policy, batch)
    tokens = {name: sum(taken) for name, taken in counts.items()}
    for part in networks(policy).values():
        part.forward = part.forward  # one that is replaced already computes all tokens
    expected = scored(policy, batch)
    assert policy.compaction is not None
    for name, taken in counts.items():
        assert (sum(taken) > 2 * tokens[name] > 0) == policy.compaction.skips_unread, name
    assert_equal_scores(found, expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES + ODD_FAMILIES if not family.startswith("opt")])
def test_every_family(family: str) -> None:
    """What the network of Bloom gets beside states has all tokens."""
    policy = valued_policy(sharp_lm(family))
    policy.add_reference()
    policy.compaction = replace(compaction_of(policy.lm), share=False, longest=0)
    assert policy.compaction.skips_unread == (family != "bloom")
    assert_as_whole(policy, batch_of_ids())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, TOP], ids=["all", "top"])
def test_every_way_to_read(way: str, options: dict[str, Any]) -> None:
    compaction, batch = WAYS[way]
    policy = valued_policy(sharp_lm("llama"), **options)
    policy.add_reference()
    policy.compaction = compaction(policy.lm)
    assert_as_whole(policy, batch())


def test_tokens_of_each_network() -> None:
    """Of 3 rows of 5 + 6 columns with 12 response tokens; a value is that of a state, and there is one more a row."""
    policy = valued_policy(sharp_lm("llama"), **TOP)
    policy.add_reference()
    policy.compaction = PICKING
    counts, batch = counted(policy), batch_of_ids()
    policy(batch, reference=True)
    assert counts == {"policy": [15], "value": [15], "reference": [15]}
    policy(batch, reference=True, heads=False)
    policy(batch, heads=False, states=True)
    assert counts == {"policy": [15, 12, 15], "value": [15], "reference": [15, 12]}


def test_tokens_from_kept_states() -> None:
    policy = valued_policy(sharp_lm("llama"), num_layers_unfrozen=1)
    assert policy.add_trunk() is None and policy.trunk is not None
    policy.compaction, batch = PICKING, batch_of_ids()
    batch.keep(policy.trunk.states(batch.inputs()))
    counts = counted(policy)
    policy(batch)
    assert counts == {"policy": [15]}


def test_tokens_of_packed_rows_and_shared_prompts() -> None:
    """Two responses to a prompt follow the same last token of it."""
    policy, batch = LanguagePolicy(sharp_lm("llama")), pairs_of_rows()
    policy.compaction = packing(policy.lm)
    counts = counted(policy)["policy"]
    policy(batch)  # 23 tokens follow 4 prompts, and 7 of them are the last ones
    assert counts == [int(batch.mask.sum()) - 7 + 4]
    counts.clear()
    policy.compaction = replace(SHARING, skips_unread=True)
    policy(shared_batch())
    assert counts == [3, 6 * 4]  # the last tokens of 3 prompts, and all columns of responses


def test_tokens_of_a_dialogue() -> None:
    """Only states that scored tokens follow are read, and of what others write none."""
    policy = LanguagePolicy(sharp_lm("llama"))
    policy.compaction = PICKING
    counts = counted(policy)["policy"]
    batch = batch_of_ids()
    own = batch.mask & (torch.arange(batch.mask.shape[1]) % 2 == 1)
    dialogue = MultiTurnCompletion(batch.prompt, batch.prompt_mask, batch.response, batch.mask, own)
    expected = policy(batch).logprobs.where(own, 0)
    counts.clear()
    torch.testing.assert_close(policy(dialogue).logprobs, expected, rtol=0, atol=1e-5)
    assert counts == [int(own.sum())]


def test_states_are_those_around_the_response_and_only_on_request() -> None:
    policy, batch = LanguagePolicy(sharp_lm("llama")), batch_of_ids()
    policy.compaction = PICKING
    assert policy(batch).states is None
    whole: Tensor = policy.lm.base_model(**batch.inputs()).last_hidden_state[:, -7:]
    real = torch.cat([torch.ones_like(batch.mask[:, :1]), batch.mask], dim=1)
    torch.testing.assert_close(policy(batch, states=True).states[real], whole[real], rtol=0, atol=1e-5)


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


def test_a_prompt_whose_last_token_is_read_for_one_of_two_rows() -> None:
    """The first token of one row is not trained on, and that of the other is, behind the same shared prompt."""
    policy, rows = LanguagePolicy(sharp_lm("llama")), []
    policy.add_reference()
    for count, masked in ((9, 3), (7, 0)):
        ids, real = torch.randint(3, 32, (count,)), torch.ones(count).bool()
        target = torch.arange(count) >= masked
        rows.append(SFTExperience(torch.tensor([2]), torch.tensor([True]), ids, real, target=target))
    batch, found = SFTExperience.collate(rows), []
    for compaction in (None, packing(policy.lm)):
        policy.compaction = compaction
        policy.zero_grad()
        out = policy(batch, reference=True)
        out.logprobs.sum().backward()
        grads = [p.grad for p in policy.parameters() if p.grad is not None]
        found.append(torch.cat([each.detach().flatten() for each in (out.logprobs, out.ref_logprobs, *grads)]))
    packed = packing(policy.lm).of(batch)
    assert isinstance(packed, PackedRows) and len(packed.source) == 1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class _Mixing(nn.Module):
    """A block that mixes the tokens of what its last part returns."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self.mlp = block, nn.Linear(16, 16)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = self.mlp(self.block(hidden_states, *args, **kwargs))
        return made + made.roll(1, dims=1)


class _Twice(_Mixing):
    """A block that runs twice."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = self.mlp(self.block(hidden_states, *args, **kwargs))
        return self.mlp(self.block(made, *args, **kwargs))


class _Turned(_Mixing):
    """A block with the tokens before the rows."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.mlp(self.block(hidden_states, *args, **kwargs).transpose(0, 1)).transpose(0, 1)


class _WithMore(nn.Linear):
    def forward(self, states: Tensor) -> Any:
        return super().forward(states), 0


class _Routed(_Mixing):
    """A block whose last part returns more than states."""

    def __init__(self, block: Any) -> None:
        super().__init__(block)
        self.mlp = _WithMore(16, 16)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.mlp(self.block(hidden_states, *args, **kwargs))[0]


@pytest.mark.parametrize("kind", [_Mixing, _Twice, _Turned, _Routed])
def test_models_for_which_it_would_be_wrong(kind: Any) -> None:
    lm = sharp_lm("llama")
    assert can_skip_unread(lm)
    blocks(lm)[-1] = kind(blocks(lm)[-1])
    assert not can_skip_unread(lm)


def test_a_network_that_two_blocks_share() -> None:
    lm: Any = sharp_lm("llama")
    blocks(lm)[0].mlp = blocks(lm)[-1].mlp
    assert not can_skip_unread(lm)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_decoders_of_a_pair_read_all_tokens(family: str) -> None:
    assert not can_skip_unread(sharp_lm(family))


def test_a_hook_sees_all_tokens() -> None:
    policy, seen = LanguagePolicy(sharp_lm("llama")), list[int]()
    policy.compaction = PICKING
    last = networks(policy)["policy"]
    last.register_forward_hook(lambda module, args, output: seen.append(int((output != 0).any(-1).sum())))
    policy(batch_of_ids())
    assert seen == [3 * 11]


def test_a_batch_without_scored_tokens() -> None:
    policy, batch = LanguagePolicy(sharp_lm("llama")), batch_of_ids()
    policy.compaction, batch.mask = PICKING, torch.zeros_like(batch.mask)
    counts = counted(policy)["policy"]
    assert policy(batch).logprobs.abs().sum() == 0 and counts == [3 * 11]


def test_blocks_that_are_wrapped_to_be_computed_again() -> None:
    policy, batch = LanguagePolicy(sharp_lm("llama")), batch_of_ids()
    policy.compaction = PICKING
    policy(batch).logprobs.sum().backward()
    expected = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    for at, block in enumerate(blocks(policy.lm)):
        blocks(policy.lm)[at] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    policy(batch).logprobs.sum().backward()
    for name, p in policy.named_parameters():
        if p.grad is not None:
            key = name.replace("_checkpoint_wrapped_module.", "")
            torch.testing.assert_close(p.grad, expected[key], rtol=1e-4, atol=1e-5, msg=name)
