"""Implicit language Q-learning (ILQL): its loss terms and its decoding rule. Element-wise: the caller masks and sums.

One token is one action. Tokens of other speakers may stand between the actions of a row: they are part of the state,
and the episode continues after them. State t is the text before response token t, so a row of R tokens has R + 1
states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trlx_like.functional.kl import MAX_LOG_RATIO
from trlx_like.functional.masked import zero_padding
from trlx_like.functional.returns import discounted_returns


def next_action_values(values: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Look up, for each action at t, the value V(s_u) of the state at the row's next action u > t.

    Source: Snell et al. 2022, arXiv:2206.11871, where other speakers' tokens belong to the environment.

    Args:
        values: V of every state; those before other speakers' tokens are not used. [B, R + 1]
        action: True where a token is an action. [B, R] bool

    Returns:
        The next values [B, R], and whether there is a next action [B, R] bool. Both are 0 (False) at a row's last
        action and where there is no action.
    """
    width = action.shape[1]
    places = torch.arange(width, device=action.device).expand_as(action)  # [B, R]
    places = places.masked_fill(~action, width)
    here_or_later = places.flip(1).cummin(dim=1).values.flip(1)  # [B, R] first action at t or after it
    later = torch.cat([here_or_later[:, 1:], torch.full_like(places[:, :1], width)], dim=1)[:, :width]
    continues = action & (later < width)
    return zero_padding(values.gather(1, later), continues), continues


def q_targets(rewards: Tensor, next_values: Tensor, gamma: float, continues: Tensor) -> Tensor:
    """Compute the targets of Q: r + gamma V(s'), or r if the episode ends. No gradient reaches V.

    Source: Kostrikov et al. 2021, arXiv:2110.06169, eq. 6.

    Args:
        rewards: Reward r of each action. [*]
        next_values: V(s') at the next action; ignored where the episode ends. [*]
        gamma: The discount per action.
        continues: False where the episode ends. [*] bool

    Returns:
        The targets. [*]
    """
    return rewards + gamma * zero_padding(next_values.detach(), continues)


def monte_carlo_returns(rewards: Tensor, action: Tensor, gamma: float) -> Tensor:
    """Compute the discounted return of each action: G_t = r_t + gamma G_u, with u the row's next action.

    Source: Snell et al. 2022, arXiv:2206.11871 (its Monte-Carlo baseline).

    Args:
        rewards: Rewards r_t; those at other speakers' tokens are ignored. [B, R]
        action: True where a token is an action. [B, R] bool
        gamma: The discount per action; other speakers' tokens do not discount.

    Returns:
        The returns, 0 where there is no action. [B, R]
    """
    return discounted_returns(rewards, action, gamma)


def td_loss(q: Tensor, target: Tensor) -> Tensor:
    """Compute the squared temporal-difference error: (Q(s, a) - y)^2. No gradient reaches the target.

    Source: Kostrikov et al. 2021, arXiv:2110.06169, eq. 6. Shapes: q and target y [*] -> [*]. Not halved, as in trlX
    and in the code of the ILQL paper; JAX ports of ILQL halve this term and `expectile_loss`.
    """
    return (q - target.detach()).square()


def expectile_loss(target: Tensor, values: Tensor, tau: float) -> Tensor:
    """Compute the loss of expectile regression: |tau - 1(target < V)| (target - V)^2. V converges to the tau-expectile.

    Source: Kostrikov et al. 2021, arXiv:2110.06169, sec. 4.1. Not halved, like `td_loss`.

    Args:
        target: The regression target, which gets no gradient. [*]
        values: Predicted values V. [*]
        tau: In (0, 1): 1/2 regresses to the mean, values near 1 approach the maximum.

    Returns:
        The loss of each value. [*]
    """
    error = target.detach() - values
    return (tau - (error < 0).to(error.dtype)).abs() * error.square()


def conservative_loss(q_logits: Tensor, actions: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the conservative penalty of CQL: log sum_v e^(Q(s, v) / T) - Q(s, a) / T.

    It is the cross entropy of the taken actions under softmax(Q / T).

    Source: Kumar et al. 2020, arXiv:2006.04779, eq. 4; Snell et al. 2022, arXiv:2206.11871.

    Args:
        q_logits: Q of every token. [N, V]
        actions: The tokens that were taken. [N]
        temperature: T, above 0.

    Returns:
        The loss of each action. [N]

    Raises:
        ValueError: If the temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature ({temperature}) must be above 0.")
    return torch.nn.functional.cross_entropy(q_logits / temperature, actions, reduction="none")


def awac_weights(target_q: Tensor, values: Tensor, beta: float, clip: float | None = None) -> Tensor:
    """Compute the weight with which each action is imitated, without gradient: min(e^(beta (Q - V)), clip).

    Source: Nair et al. 2020, arXiv:2006.09359, algorithm 1; beta is 1 / lambda there.

    Args:
        target_q: Q of the taken actions. [*]
        values: V of their states. [*]
        beta: Nats per unit of reward; 0 is plain imitation, with weights of 1.
        clip: The largest weight; None is no limit.

    Returns:
        The weights. [*]

    Difference: the exponent is clamped to +-20, which keeps weights finite without a clip.
    """
    weights = (beta * (target_q - values).detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return weights if clip is None else weights.clamp(max=clip)


def guided_logits(logits: Tensor, q: Tensor, values: Tensor, beta: float) -> Tensor:
    """Compute the logits that ILQL samples from: log pi + beta (Q - V).

    Source: Snell et al. 2022, arXiv:2206.11871. A top-k and then a temperature may be applied to the result, as in
    trlX.

    Args:
        logits: The policy's logits; a token at -inf stays impossible whatever its Q. [N, V]
        q: Q of every token. [N, V]
        values: V of the state. It shifts all logits of a row alike, which changes no probability and keeps them small.
            [N]
        beta: Nats per unit of reward; 0 samples from the policy itself.

    Returns:
        The guided logits. [N, V]
    """
    return torch.log_softmax(logits, dim=-1) + beta * (q - values[:, None])


def polyak(online: Tensor, target: Tensor, alpha: float) -> Tensor:
    """Move target parameters towards the online ones (Polyak averaging): alpha online + (1 - alpha) target.

    Source: Lillicrap et al. 2015, arXiv:1509.02971, algorithm 1.

    Args:
        online: Trained parameters. [*]
        target: Target parameters. [*]
        alpha: The share of the online parameters; 1 copies them, 0 keeps the target.

    Returns:
        The next target parameters. [*]
    """
    return target.lerp(online, alpha)
