"""Batches to score, models with something to say about them, and what they say without any of our code."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.tiny import tiny_lm
from trlx_like.data import Completion
from trlx_like.models.dropout import disable_dropout
from trlx_like.models.heads import ValueHead
from trlx_like.models.layout import hidden_size
from trlx_like.models.policy import LanguagePolicy

VOCABULARY = 32
LENGTHS = ((3, 4), (5, 2), (1, 6))


def sharp_lm(family: str, seed: int = 0, **extra: Any) -> PreTrainedModel:
    """A tiny model with large weights: as they are initialised all tokens would be about as likely."""
    lm = tiny_lm(family, seed, **{"layers": 3, **extra})
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    disable_dropout(lm)
    return lm


def rows_of_ids(lengths: Sequence[tuple[int, int]] = LENGTHS, seed: int = 1) -> list[Completion]:
    """Elements of random ids; lengths: of prompt and response."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for sizes in lengths:
        prompt, response = (torch.randint(2, VOCABULARY, (size,), generator=generator) for size in sizes)
        rows.append(Completion.of_ids(prompt, response))
    return rows


def batch_of_ids(lengths: Sequence[tuple[int, int]] = LENGTHS, seed: int = 1) -> Completion:
    return Completion.collate(rows_of_ids(lengths, seed))


def repadded(batch: Completion, left: int, right: int, seed: int = 2) -> Completion:
    """The same completions with more columns of padding, all padding filled with random ids."""
    generator = torch.Generator().manual_seed(seed)

    def junk(*shape: int) -> Tensor:
        return torch.randint(VOCABULARY, shape, generator=generator)

    count = len(batch)
    none_left, none_right = torch.zeros(count, left).bool(), torch.zeros(count, right).bool()
    prompt = torch.where(batch.prompt_mask, batch.prompt, junk(*batch.prompt.shape))
    response = torch.where(batch.mask, batch.response, junk(*batch.response.shape))
    return Completion(
        torch.cat([junk(count, left), prompt], 1),
        torch.cat([none_left, batch.prompt_mask], 1),
        torch.cat([response, junk(count, right)], 1),
        torch.cat([batch.mask, none_right], 1),
    )


def linear(layers: nn.Module, number: int) -> nn.Linear:
    """Return a linear layer among those of a head."""
    layer = layers.get_submodule(str(number))
    assert isinstance(layer, nn.Linear)
    return layer


def valued_policy(lm: PreTrainedModel, **options: Any) -> LanguagePolicy:
    """A policy with a value head that does not say zero."""
    head = ValueHead(hidden_size(lm))
    torch.nn.init.normal_(linear(head.layers, 2).weight, generator=torch.Generator().manual_seed(3))
    return LanguagePolicy(lm, heads={"value": head}, **options)


def scored(policy: LanguagePolicy, batch: Completion) -> dict[str, Tensor]:
    """Log-probabilities, values if there are any, those of the reference, and the gradient of each trained parameter.

    The gradient is also that of entropies.
    """
    policy.zero_grad()
    out = policy(batch, reference=True, entropy=True)
    assert out.entropy is not None and out.ref_logprobs is not None
    weights = torch.linspace(0.5, 2, out.logprobs.numel()).view_as(out.logprobs)
    values = out.heads["value"][:, :-1] * batch.mask if out.heads else torch.zeros(())
    (weights * (out.logprobs + out.entropy + values)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return {
        "logprobs": out.logprobs.detach(),
        "values": values.detach(),
        "ref_logprobs": out.ref_logprobs,
        **gradients,
    }


def assert_equal_scores(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that what `scored` returned twice is the same, within rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm() + 1e-5, name


def plain_distributions(
    lm: PreTrainedModel, row: Completion, temperature: float = 1.0, allowed: Tensor | None = None
) -> Tensor:
    """log p of every token at each response position of one completion, in float64 and without padding. [R, V]"""
    previous, ids = torch.cat([row.prompt[-1:], row.response])[:-1], torch.cat([row.prompt, row.response])
    inputs = {"input_ids": ids[None]}
    if lm.config.is_encoder_decoder:
        previous = torch.cat([torch.tensor([lm.config.decoder_start_token_id]), row.response])[:-1]
        inputs = {"input_ids": row.prompt[None], "decoder_input_ids": previous[None]}
    with torch.no_grad():
        logits = copy.deepcopy(lm).eval().double()(**inputs).logits[0].double()
    logits = logits[-len(row.response) :] if lm.config.is_encoder_decoder else logits[len(row.prompt) - 1 : -1]
    logits = logits / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed[previous], -torch.inf)
    return logits.log_softmax(-1)


def plain_logprobs(lm: PreTrainedModel, row: Completion, *args: Any) -> Tensor:
    """log p of the tokens of one completion. [R]"""
    return plain_distributions(lm, row, *args).gather(1, row.response[:, None])[:, 0]


def allowed_table(batch: Completion, seed: int = 4) -> Tensor:
    """A random [V, V] table that allows everything that the batch holds."""
    allowed = torch.rand(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) < 0.5
    allowed[batch.previous(), batch.response] = True
    return allowed


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients by name, of those parameters that have one; they are taken off."""
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found
