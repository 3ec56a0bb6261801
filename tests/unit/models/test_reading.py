"""The last feed-forward networks of a policy compute the tokens that are read: how many, and the same scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import FAMILIES, ODD_FAMILIES
from tests.unit.models.support import batch_of_ids, sharp_lm, valued_policy
from tests.unit.models.test_compaction import packing, pairs_of_rows
from tests.unit.models.test_shared_prompts import SHARING, scored, shared_batch
from trlx_like.data import Completion
from trlx_like.data.preference import MultiTurnCompletion
from trlx_like.models.layout import last_block
from trlx_like.models.policy import LanguagePolicy

WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[], Completion]]] = {
    "rows": (lambda lm: None, batch_of_ids),
    "packed": (packing, pairs_of_rows),
    "shared": (lambda lm: SHARING, shared_batch),
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
    takes_more = policy.lm.config.model_type == "bloom"  # what its network gets beside states has all tokens
    for name, taken in counts.items():
        assert (sum(taken) == 2 * tokens[name]) if takes_more else (sum(taken) > 2 * tokens[name] > 0), name
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm() + 1e-5, name


@pytest.mark.parametrize("family", [family for family in FAMILIES + ODD_FAMILIES if not family.startswith("opt")])
def test_every_family(family: str) -> None:
    policy = valued_policy(sharp_lm(family))
    policy.add_reference()
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
    counts, batch = counted(policy), batch_of_ids()
    policy(batch, reference=True)
    assert counts == {"policy": [15], "value": [15], "reference": [15]}
    policy(batch, reference=True, heads=False)
    policy(batch, heads=False, states=True)
    assert counts == {"policy": [15, 12, 15], "value": [15], "reference": [15, 12]}


def test_tokens_from_kept_states() -> None:
    policy = valued_policy(sharp_lm("llama"), num_layers_unfrozen=1)
    assert policy.add_trunk() is None
    batch = batch_of_ids()
    batch.keep(policy.trunk_states(batch))
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
    policy.compaction = SHARING
    policy(shared_batch())
    assert counts == [3, 6 * 4]  # the last tokens of 3 prompts, and all columns of responses


def test_tokens_of_a_dialogue() -> None:
    """Only states that scored tokens follow are read, and of what others write none."""
    policy = LanguagePolicy(sharp_lm("llama"))
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
    assert policy(batch).states is None
    whole: Tensor = policy.lm.base_model(**batch.inputs()).last_hidden_state[:, -7:]
    real = torch.cat([torch.ones_like(batch.mask[:, :1]), batch.mask], dim=1)
    torch.testing.assert_close(policy(batch, states=True).states[real], whole[real], rtol=0, atol=1e-5)
