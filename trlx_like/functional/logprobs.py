"""Log-probabilities, entropy and exact KL of tokens under a temperature and a table of allowed tokens.

One function serves the sampler and the learner, so that the ratio of fresh experience is 1. All of it is
float32 whatever the model's dtype. Logits [N, V] are the largest tensor of a language model: they are made in
chunks of rows, and when there are several chunks and gradients are wanted, each chunk is made a second time
in the backward pass instead of being kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trlx_like.functional.kl import full_kl

T = TypeVar("T")

Head = Callable[[Tensor], Tensor]
"""Hidden states [N, H] to logits [N, V], each row by itself."""

_RowScores = tuple[Tensor, Tensor | None, tuple[Tensor, ...] | None]
"""Log-probabilities, entropies and the columns of `TokenStatistics`, for a slice of rows."""

CHUNK_ELEMENTS = 2**24
"""Logits in one chunk: 64 MiB in float32, and a few times that with what the backward pass makes of them."""


@dataclass
class TokenStatistics:
    """What else there is to know of the distributions that N tokens were drawn from. No gradients."""

    entropy: Tensor  # [N] float32, in nats
    log_collision: Tensor  # [N] float32, log sum_v p_v^2: of drawing the same token twice
    mean_logit: Tensor  # [N] float32, over the vocabulary
    is_likeliest: Tensor  # [N] bool, whether no token was likelier than the one that was taken


@dataclass
class TokenScores:
    """What the policy thinks of N tokens."""

    logprobs: Tensor  # [N] float32
    entropy: Tensor | None  # [N] float32, in nats, of the distribution that each token was drawn from
    statistics: TokenStatistics | None = None


def score_tokens(
    hidden: Tensor,
    ids: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    allowed: Tensor | None = None,
    previous: Tensor | None = None,
    entropy: bool = False,
    statistics: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TokenScores:
    """log softmax(head(h) / T)[id] and, if asked for, H = -sum_v p_v log p_v, and what is only looked at.

    Source: the sampling distribution itself; temperature as in Ziegler et al. 2019, arXiv:1909.08593, sec.
    2.1. Shapes: hidden [N, H], ids [N], previous [N], allowed [V, V] bool -> [N].

    `allowed[previous[i]]` says which tokens may come at i (True = allowed); the others have probability 0 and
    no gradient. A token that was taken although it is forbidden has log-probability -inf, which is the truth
    and loud. A row that allows nothing has no distribution and gives NaN: refuse such a table where it
    enters.

    At most `chunk_elements` logits are alive at once, forward and backward; values and gradients do not
    depend on it. The head is called once a chunk (twice with gradients), so under sharded parameters gather
    it around this call.
    """

    def score(hidden: Tensor, ids: Tensor, previous: Tensor | None) -> _RowScores:
        logits = _sampling_logits(head(hidden), temperature, allowed, previous)
        return _score_logits(logits, ids, entropy, statistics)

    _check_table(allowed, previous)
    scores = by_chunks(score, [hidden, ids, previous], vocabulary_of(head, hidden), chunk_elements)
    entropies = [h for _, h, _ in scores if h is not None]
    seen = [looked for _, _, looked in scores if looked is not None]
    return TokenScores(
        torch.cat([lp for lp, _, _ in scores]),
        torch.cat(entropies) if entropy else None,
        TokenStatistics(*(torch.cat(column) for column in zip(*seen, strict=True))) if statistics else None,
    )


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / T)[id], for logits that exist already.

    Shapes: logits [*, V], ids [*] -> [*] float32. The same code as `score_tokens` runs on each row.
    """
    return _score_logits(_sampling_logits(logits, temperature, None, None), ids)[0]


def full_kl_from_hidden(
    hidden: Tensor,
    ref_hidden: Tensor,
    head: Head,
    ref_head: Head,
    *,
    temperature: float = 1.0,
    allowed: Tensor | None = None,
    previous: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """KL(softmax(head(h) / T) || softmax(ref_head(h_ref) / T)), exact, with a gradient to the policy only.

    Source: `functional.kl.full_kl`. Shapes: hidden, ref_hidden [N, H], previous [N], allowed [V, V] bool ->
    [N] float32. Chunks, temperature and allowed tokens are as in `score_tokens`, and hold for both sides.
    """

    def divergence(hidden: Tensor, ref_hidden: Tensor, previous: Tensor | None) -> Tensor:
        with torch.no_grad():
            ref_logits = _sampling_logits(ref_head(ref_hidden), temperature, allowed, previous)
        return full_kl(_sampling_logits(head(hidden), temperature, allowed, previous), ref_logits)

    _check_table(allowed, previous)
    rows = [hidden, ref_hidden, previous]
    # Half the rows, because the logits of both sides are alive together.
    return torch.cat(by_chunks(divergence, rows, vocabulary_of(head, hidden), chunk_elements // 2))


def _sampling_logits(logits: Tensor, temperature: float, allowed: Tensor | None, previous: Tensor | None) -> Tensor:
    if temperature <= 0:
        raise ValueError(f"temperature ({temperature}) must be above 0: greedy choices have no log-probabilities.")
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1:
        logits = logits / temperature
    if allowed is not None and previous is not None:
        logits = logits.masked_fill(~allowed[previous], -torch.inf)
    return logits


def _score_logits(logits: Tensor, ids: Tensor, entropy: bool = False, statistics: bool = False) -> _RowScores:
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
    """The columns of `TokenStatistics`. Forbidden tokens (logit -inf) are not in the mean."""
    probabilities, possible = logprobs.exp(), logits > -torch.inf
    finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)  # 0 * -inf is NaN
    return (
        -torch.linalg.vecdot(probabilities, finite),
        torch.linalg.vecdot(probabilities, probabilities).log(),
        logits.where(possible, 0).sum(dim=-1) / possible.sum(dim=-1),
        taken >= logprobs.amax(dim=-1),
    )


def _check_table(allowed: Tensor | None, previous: Tensor | None) -> None:
    if (allowed is None) != (previous is None):
        raise ValueError("allowed and previous must be given together: the previous token chooses the row.")


def vocabulary_of(head: Head, hidden: Tensor) -> int:
    with torch.no_grad():
        return head(hidden[:0]).shape[-1]


def by_chunks(
    function: Callable[..., T], rows: Sequence[Tensor | None], vocabulary: int, chunk_elements: int
) -> list[T]:
    """`function` of each slice of rows that makes at most `chunk_elements` logits; of no rows, one slice."""
    total = next(len(row) for row in rows if row is not None)
    size = max(1, chunk_elements // vocabulary)
    chunks = [[None if row is None else row[i : i + size] for row in rows] for i in range(0, max(total, 1), size)]
    if len(chunks) == 1 or not torch.is_grad_enabled():
        return [function(*chunk) for chunk in chunks]
    return [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]
