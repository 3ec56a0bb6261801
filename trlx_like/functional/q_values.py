"""Q-values of the actions that were taken, without keeping Q of every token of the vocabulary in memory.

At most `chunk_elements` Q-values exist at once, forward and backward, as in `logprobs.score_tokens`. The results do
not depend on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trlx_like.functional.logprobs import CHUNK_ELEMENTS, Head, by_chunks, vocabulary_of
from trlx_like.functional.q_learning import conservative_loss


def action_values(states: Tensor, actions: Tensor, head: Head, chunk_elements: int = CHUNK_ELEMENTS) -> Tensor:
    """Compute the Q-values of the taken actions: head(s)[a].

    Args:
        states: Hidden states s. [N, H]
        actions: The tokens a that were taken. [N]
        head: The Q head, from states [N, H] to Q of every token [N, V].
        chunk_elements: How many Q-values may exist at once.

    Returns:
        Q of each action. [N]
    """

    def gather(states: Tensor, actions: Tensor) -> Tensor:
        return head(states).gather(1, actions[:, None]).squeeze(1)

    return torch.cat(by_chunks(gather, [states, actions], vocabulary_of(head, states), chunk_elements))


def action_values_and_conservative_loss(
    states: Tensor, actions: Tensor, head: Head, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Compute the Q-values of the taken actions and their `conservative_loss`, with one evaluation of the head.

    Args:
        states: Hidden states s. [N, H]
        actions: The tokens a that were taken. [N]
        head: The Q head, from states [N, H] to Q of every token [N, V].
        temperature: That of `conservative_loss`, above 0.
        chunk_elements: How many Q-values may exist at once.

    Returns:
        Q and conservative loss of each action. Each [N]
    """

    def score(states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        q = head(states)  # [n, V]
        return q.gather(1, actions[:, None]).squeeze(1), conservative_loss(q, actions, temperature)

    pairs = by_chunks(score, [states, actions], vocabulary_of(head, states), chunk_elements)
    return torch.cat([q for q, _ in pairs]), torch.cat([loss for _, loss in pairs])
