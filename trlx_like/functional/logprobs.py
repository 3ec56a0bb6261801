"""Log-probabilities, entropy and exact divergences of tokens under the distribution that they are sampled from.

The same functions serve sampler and learner, so that probability ratios are 1 on fresh experience. Results are
float32 whatever the model's dtype. The logits [N, V] are a language model's largest tensor: they are computed in
chunks of rows. If there are several chunks and gradients are needed, those of a frozen head are computed together with
the scores, and otherwise each chunk is computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trlx_like.functional.choices import Choices
from trlx_like.functional.kl import full_kl

T = TypeVar("T")

Head = Callable[[Tensor], Tensor]
"""A function from hidden states [N, H] to logits [N, V] that treats each row by itself."""

Divergence = Callable[[Tensor, Tensor], Tensor]
"""A function from logits of policy and reference [*, V] to their divergence at each position [*]."""

_RowScores = tuple[Tensor, Tensor | None, tuple[Tensor, ...] | None]
"""Log-probabilities, entropies and the columns of `TokenStatistics`, for a slice of rows."""

CHUNK_ELEMENTS = 2**24
"""Logits per chunk: 64 MiB in float32, and a few times that with the temporaries of the backward pass."""


class Sampling(TypedDict, total=False):
    """The settings of the distribution that tokens were sampled from."""

    temperature: float
    """T, above 0; 1 by default."""
    allowed: Tensor | None
    """`allowed[previous, next]` is True if `next` may follow `previous`. [V, V] bool

    Other tokens get probability 0 and no gradient; a forbidden token that is scored has log-probability -inf. A row of
    False gives NaN, so refuse such a table before the call.
    """
    previous: Tensor | None
    """The token before each of those that are scored; to be given if and only if `allowed` is. [N]"""
    choices: Choices | None
    """The set of tokens that could be drawn in place of each token, if sampling had a cut such as top-k.

    Other tokens are treated as forbidden.
    """


@dataclass
class TokenStatistics:
    """Statistics, without gradient, of the distributions that N tokens were sampled from."""

    entropy: Tensor  # [N] float32, in nats
    log_collision: Tensor  # [N] float32, log sum_v p_v^2: the log-probability of sampling the same token twice
    mean_logit: Tensor  # [N] float32, over the vocabulary
    is_likeliest: Tensor  # [N] bool, whether the sampled token was the most likely one


@dataclass
class TokenScores:
    """Log-probabilities of N tokens under the policy, and entropy and statistics if they were requested."""

    logprobs: Tensor  # [N] float32
    entropy: Tensor | None  # [N] float32, in nats, of the distribution that each token was sampled from
    statistics: TokenStatistics | None = None


def score_tokens(
    hidden: Tensor,
    ids: Tensor,
    head: Head,
    *,
    entropy: bool = False,
    statistics: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
    **sampling: Unpack[Sampling],
) -> TokenScores:
    """Compute log softmax(head(h) / T)[id] of tokens and, on request, entropies -sum_v p_v log p_v and statistics.

    Source: the sampling distribution itself; the temperature is as in Ziegler et al. 2019, arXiv:1909.08593, sec. 2.1.

    Args:
        hidden: Hidden states h that the tokens were sampled from. [N, H]
        ids: The tokens. [N]
        head: The language model head. It is called once per chunk (twice with gradients), so under sharded parameters
            gather it around this call.
        entropy: Whether to compute entropies, with gradient.
        statistics: Whether to compute `TokenStatistics`, without gradient.
        chunk_elements: How many logits may exist at once, forward and backward. The results do not depend on it.
        sampling: The distribution, see `Sampling`.

    Returns:
        The scores. Each column [N]

    Raises:
        ValueError: If the temperature is not above 0, or only one of `allowed` and `previous` is given.
    """

    def score(hidden: Tensor, ids: Tensor, previous: Tensor | None, spans: Tensor | None) -> _RowScores:
        logits = _sampling_logits(head(hidden), previous, spans, sampling)
        return _score_logits(logits, ids, entropy, statistics)

    def score_with_gradient(hidden: Tensor, *others: Any) -> _RowScores:
        leaf = hidden.detach().requires_grad_()
        taken, _, looked = score(leaf, *others)
        # A score depends on its own row of states only, so the gradient of their sum holds that of each of them.
        (gradient,) = torch.autograd.grad(taken.sum(), leaf)
        known: Tensor = _KnownGradient.apply(hidden, taken.detach(), gradient)  # type: ignore[no-untyped-call]
        return known, None, looked

    rows = [hidden, ids, *_rows(sampling)]
    vocabulary = vocabulary_of(head, hidden)
    at_once = len(hidden) * vocabulary > chunk_elements and not entropy and _alone_needs_gradient(hidden, head)
    scores = by_chunks(score_with_gradient if at_once else score, rows, vocabulary, chunk_elements, again=not at_once)
    entropies = [h for _, h, _ in scores if h is not None]
    seen = [looked for _, _, looked in scores if looked is not None]
    return TokenScores(
        torch.cat([lp for lp, _, _ in scores]),
        torch.cat(entropies) if entropy else None,
        TokenStatistics(*(torch.cat(column) for column in zip(*seen, strict=True))) if statistics else None,
    )


class _KnownGradient(torch.autograd.Function):
    """Numbers [N] whose gradient with respect to their rows of states [N, H] is known already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        """Return the values."""
        ctx.save_for_backward(gradient)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Scale the gradient of each row."""
        (gradient,) = ctx.saved_tensors
        return (grad[:, None] * gradient).to(gradient.dtype), None, None


def _alone_needs_gradient(hidden: Tensor, head: Head) -> bool:
    """Test whether gradients are needed with respect to the states, and not to parameters of the head."""
    return torch.is_grad_enabled() and hidden.requires_grad and not head(hidden[:0].detach()).requires_grad


def divergence_from_hidden(
    hidden: Tensor,
    ref_hidden: Tensor,
    head: Head,
    ref_head: Head,
    *,
    divergence: Divergence = full_kl,
    chunk_elements: int = CHUNK_ELEMENTS,
    **sampling: Unpack[Sampling],
) -> Tensor:
    """Compute the exact divergence of softmax(head(h) / T) and softmax(ref_head(h_ref) / T).

    The gradient goes to the policy only. Source: `functional.kl`.

    Args:
        hidden: Hidden states h of the policy. [N, H]
        ref_hidden: Hidden states h_ref of the reference at the same positions. [N, H]
        head: The policy's language model head.
        ref_head: The reference's language model head.
        divergence: Computes the divergence from logits, such as `functional.kl.full_kl`: KL(policy || reference).
        chunk_elements: How many logits may exist at once. The results do not depend on it.
        sampling: The settings of both distributions, see `Sampling`; with `choices` they are over the same set.

    Returns:
        The divergence at each position. [N] float32

    Raises:
        ValueError: If the temperature is not above 0, or only one of `allowed` and `previous` is given.
    """

    def of_rows(hidden: Tensor, ref_hidden: Tensor, previous: Tensor | None, spans: Tensor | None) -> Tensor:
        with torch.no_grad():
            ref_logits = _sampling_logits(ref_head(ref_hidden), previous, spans, sampling)
        return divergence(_sampling_logits(head(hidden), previous, spans, sampling), ref_logits)

    rows = [hidden, ref_hidden, *_rows(sampling)]
    # Half the rows, because the logits of both sides are alive together.
    return torch.cat(by_chunks(of_rows, rows, vocabulary_of(head, hidden), chunk_elements // 2))


def _sampling_logits(logits: Tensor, previous: Tensor | None, spans: Tensor | None, sampling: Sampling) -> Tensor:
    """Make the logits of the sampling distribution: float32, over the temperature, forbidden tokens at -inf."""
    temperature, allowed, choices = sampling.get("temperature", 1.0), sampling.get("allowed"), sampling.get("choices")
    if temperature <= 0:
        raise ValueError(f"temperature ({temperature}) must be above 0: greedy choices have no log-probabilities.")
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1:
        logits = logits / temperature
    if allowed is not None and previous is not None:
        logits = logits.masked_fill(~allowed[previous], -torch.inf)
    if choices is not None and spans is not None:
        logits = logits.masked_fill(~choices.possible(spans, logits.shape[-1]), -torch.inf)
    return logits


def _score_logits(logits: Tensor, ids: Tensor, entropy: bool, statistics: bool) -> _RowScores:
    """Compute log-probabilities of `ids` and, on request, entropies and statistics, from logits [*, V]."""
    logprobs = torch.log_softmax(logits, dim=-1)  # [*, V]
    taken = logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    looked = _statistics(logits, logprobs, taken) if statistics else None
    if not entropy:
        return taken, None, looked
    # log p = -inf is replaced before the product: 0 * -inf is NaN, and so would be its gradient.
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0)
    return taken, -(logprobs.exp() * finite).sum(dim=-1), looked


@torch.no_grad()
def _statistics(logits: Tensor, logprobs: Tensor, taken: Tensor) -> tuple[Tensor, ...]:
    """Compute the columns of `TokenStatistics`. Forbidden tokens (logit -inf) are left out of the mean logit."""
    probabilities, finite = logprobs.exp(), logprobs
    total, count = logits.sum(dim=-1), torch.tensor(logits.shape[-1])
    if not total.isfinite().all():
        finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)  # 0 * -inf is NaN
        possible = logits > -torch.inf
        total, count = logits.where(possible, 0).sum(dim=-1), possible.sum(dim=-1)
    collision = 2 * torch.linalg.vector_norm(probabilities, dim=-1).log()
    # In place: another tensor [*, V] would cost time and memory.
    return -probabilities.mul_(finite).sum(dim=-1), collision, total / count, taken >= logprobs.amax(dim=-1)


def _rows(sampling: Sampling) -> list[Tensor | None]:
    """Return the settings that have a row for each token: the tokens before, and the spans of `choices`."""
    previous, choices = sampling.get("previous"), sampling.get("choices")
    if (sampling.get("allowed") is None) != (previous is None):
        raise ValueError("allowed and previous must be given together: the previous token chooses the row.")
    return [previous, None if choices is None else choices.spans]


_VOCABULARIES: WeakKeyDictionary[Any, dict[int, int]] = WeakKeyDictionary()
"""How many logits per row the head of each model makes, by the width of its states.

Finding out runs the model's own code. A number that has become wrong changes the size of chunks, and no result.
"""


def vocabulary_of(head: Head, hidden: Tensor) -> int:
    """Return how many logits per row a head makes, without computing any.

    Args:
        head: A function from hidden states to logits. It may have an attribute `of_model`: all heads with the same one
            make as many, and the first is asked.
        hidden: Hidden states, of which only shape, dtype and device matter. [N, H]

    Returns:
        The size of the vocabulary, V.
    """
    model, width = getattr(head, "of_model", None), hidden.shape[-1]
    known = {} if model is None else _VOCABULARIES.setdefault(model, {})
    if width not in known:
        with torch.no_grad():
            known[width] = head(hidden[:0]).shape[-1]
    return known[width]


def by_chunks(
    function: Callable[..., T],
    rows: Sequence[Tensor | None],
    vocabulary: int,
    chunk_elements: int,
    *,
    again: bool = True,
) -> list[T]:
    """Call a function on slices of rows, so that each call makes at most `chunk_elements` logits.

    With several chunks and gradients enabled, each chunk is recomputed in the backward pass (activation checkpointing).

    Args:
        function: Called with the same slice of every entry of `rows`.
        rows: Tensors of equal length [N, ...]; None is passed on as None.
        vocabulary: How many logits the function makes per row.
        chunk_elements: The most logits per call. A call has at least one row.
        again: Recompute in the backward pass; False if the function keeps no logits for it.

    Returns:
        The results in order. Without rows the function is called once, with empty slices.
    """
    total = next(len(row) for row in rows if row is not None)
    size = max(1, chunk_elements // vocabulary)
    chunks = [[None if row is None else row[i : i + size] for row in rows] for i in range(0, max(total, 1), size)]
    if len(chunks) == 1 or not again or not torch.is_grad_enabled():
        return [function(*chunk) for chunk in chunks]
    return [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]
