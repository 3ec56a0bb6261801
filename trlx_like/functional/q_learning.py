"""Implicit language Q-learning: its loss terms and its decoding rule. Element-wise: the caller masks and sums.

One token is one action. Between the actions of a row may stand tokens of other speakers: they are part of the state,
and the episode goes on behind them. State t is the text before response token t, so a row of R tokens has R + 1 states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trlx_like.functional.kl import MAX_LOG_RATIO
from trlx_like.functional.masked import zero_padding


def next_action_values(values: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """V(s_u) for the next action u > t of the row, and whether there is one; 0 and False for the last action.

    Source: Snell et al. 2022, arXiv:2206.11871 (a token is an action; the other side's tokens belong to the
    environment). Shapes: values [B, R + 1], of every state; action [B, R] bool -> next values [B, R], continues
    [B, R] bool, 0 and False where there is no action. Values of states before other tokens are not looked at.
    """
    width = action.shape[1]
    places = torch.arange(width, device=action.device).expand_as(action)  # [B, R]
    places = places.masked_fill(~action, width)
    here_or_later = places.flip(1).cummin(dim=1).values.flip(1)  # [B, R] first action at t or after it
    later = torch.cat([here_or_later[:, 1:], torch.full_like(places[:, :1], width)], dim=1)[:, :width]
    continues = action & (later < width)
    return zero_padding(values.gather(1, later), continues), continues


def q_targets(rewards: Tensor, next_values: Tensor, gamma: float, continues: Tensor) -> Tensor:
    """r + gamma V(s') where the episode goes on, r where it ends. No gradient reaches V.

    Source: Kostrikov et al. 2021, arXiv:2110.06169, eq. 6. Shapes: rewards, next_values, continues (bool) [*] -> [*].
    What next_values holds where the episode ends counts for nothing.
    """
    return rewards + gamma * zero_padding(next_values.detach(), continues)


def monte_carlo_returns(rewards: Tensor, action: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_u with u the next action after t, and G = r_t for the last one.

    Source: Snell et al. 2022, arXiv:2206.11871 (its Monte-Carlo baseline). Shapes: rewards, action (bool)
    [B, R] -> [B, R], 0 where there is no action. Tokens of other speakers are not discounted, and a reward at one of
    them does not count.
    """
    rewards = zero_padding(rewards, action)
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))  # [B]
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(action[:, t], rewards[:, t] + gamma * following, following)
        returns[:, t] = following
    return zero_padding(returns, action)


def td_loss(q: Tensor, target: Tensor) -> Tensor:
    """(Q(s, a) - y)^2. No gradient reaches the target.

    Source: Kostrikov et al. 2021, arXiv:2110.06169, eq. 6. Shapes: both [*] -> [*]. Not halved, as in trlX and in the
    code of the ILQL paper; JAX ports of it halve this term and `expectile_loss`.
    """
    return (q - target.detach()).square()


def expectile_loss(target: Tensor, values: Tensor, tau: float) -> Tensor:
    """|tau - 1(target < V)| (target - V)^2, so that V settles at the tau-expectile of the target.

    Source: Kostrikov et al. 2021, arXiv:2110.06169, sec. 4.1. Shapes: target, values [*] -> [*]. tau in (0, 1): 1/2 is
    the mean, towards 1 the maximum. No gradient reaches the target. Not halved, as `td_loss`.
    """
    error = target.detach() - values
    return (tau - (error < 0).to(error.dtype)).abs() * error.square()


def conservative_loss(q_logits: Tensor, actions: Tensor, temperature: float = 1.0) -> Tensor:
    """log sum_v e^(Q(s, v) / T) - Q(s, a) / T: the cross entropy of the taken actions under softmax(Q / T).

    Source: Kumar et al. 2020, arXiv:2006.04779, eq. 4; Snell et al. 2022, arXiv:2206.11871. Shapes: q_logits
    [N, V], Q of every token; actions [N] -> [N]. Raises ValueError unless temperature > 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature ({temperature}) must be above 0.")
    return torch.nn.functional.cross_entropy(q_logits / temperature, actions, reduction="none")


def awac_weights(target_q: Tensor, values: Tensor, beta: float, clip: float | None = None) -> Tensor:
    """min(e^(beta (Q - V)), clip), without gradient: how much imitating an action counts. beta 0 is plain imitation.

    Source: Nair et al. 2020, arXiv:2006.09359, algorithm 1 (1 / lambda there is beta here). Shapes: target_q, values
    [*] -> [*]. beta: nats to a unit of reward.

    Difference: the exponent is bounded to +-20, which keeps the weight finite without a clip.
    """
    weights = (beta * (target_q - values).detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return weights if clip is None else weights.clamp(max=clip)


def guided_logits(logits: Tensor, q: Tensor, values: Tensor, beta: float) -> Tensor:
    """log pi + beta (Q - V): the logits to sample from. A top-k and then a temperature may follow, as in trlX.

    Source: Snell et al. 2022, arXiv:2206.11871. Shapes: logits, q [N, V], values [N] -> [N, V]. beta: nats to a unit of
    reward; 0 is the policy itself.

    A token with logit -inf stays impossible whatever its Q. V shifts all tokens of a row alike: it changes no
    probability, and keeps the numbers small.
    """
    return torch.log_softmax(logits, dim=-1) + beta * (q - values[:, None])


def polyak(online: Tensor, target: Tensor, alpha: float) -> Tensor:
    """alpha online + (1 - alpha) target: the next target parameters. alpha 1 copies, 0 leaves them.

    Source: Lillicrap et al. 2015, arXiv:1509.02971, algorithm 1. Shapes: both [*] -> [*].
    """
    return target.lerp(online, alpha)
