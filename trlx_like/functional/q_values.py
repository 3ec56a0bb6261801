"""Q of the tokens that were taken, from hidden states, without keeping a Q of every token of the vocabulary.

At most `chunk_elements` values are alive at once, forward and backward, as in `score_tokens`; results do not depend on
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trlx_like.functional.logprobs import CHUNK_ELEMENTS, Head, by_chunks, vocabulary_of
from trlx_like.functional.q_learning import conservative_loss


def action_values(states: Tensor, actions: Tensor, head: Head, chunk_elements: int = CHUNK_ELEMENTS) -> Tensor:
    """head(s)[a]. Shapes: states [N, H], actions [N] -> [N]."""

    def gather(states: Tensor, actions: Tensor) -> Tensor:
        return head(states).gather(1, actions[:, None]).squeeze(1)

    return torch.cat(by_chunks(gather, [states, actions], vocabulary_of(head, states), chunk_elements))


def action_values_and_conservative_loss(
    states: Tensor, actions: Tensor, head: Head, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """(head(s)[a], `conservative_loss` of head(s) and a). Shapes: states [N, H], actions [N] -> [N], [N]."""

    def score(states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        q = head(states)  # [n, V]
        return q.gather(1, actions[:, None]).squeeze(1), conservative_loss(q, actions, temperature)

    pairs = by_chunks(score, [states, actions], vocabulary_of(head, states), chunk_elements)
    return torch.cat([q for q, _ in pairs]), torch.cat([loss for _, loss in pairs])
