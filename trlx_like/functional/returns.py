"""Advantages and returns of finished episodes, where one row is one response and one token is one action."""

from __future__ import annotations

import torch
from torch import Tensor

from trlx_like.functional.masked import zero_padding


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; returns = A_t + V_t.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; the returns are PPO's V^targ, arXiv:1707.06347,
    sec. 5. Shapes: rewards r_t (for the action at t), values V_t (of the state before it), mask (bool) [B, R]
    -> advantages, returns [B, R], 0 at padding. The real places of a row are contiguous; padding may be on
    either side.

    The episode ends with the last real token, so the value after it is 0, and a value or reward at padding
    counts for nothing. Advantages are not whitened here, and returns are made before any whitening.
    """
    rewards, values = zero_padding(rewards, mask), zero_padding(values, mask)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)  # [B, R]
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(deltas)
    advantage = deltas.new_zeros(len(deltas))  # [B]
    for t in reversed(range(deltas.shape[1])):
        advantage = deltas[:, t] + gamma * lam * advantage
        advantages[:, t] = advantage
    advantages = zero_padding(advantages, mask)
    return advantages, advantages + values


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = sum_{k >= t} gamma^(k - t) r_k.

    Source: Sutton and Barto 2018, eq. 3.8. Shapes: rewards, mask (bool) [B, R] -> [B, R], 0 at padding. It is
    `gae` with lam = 1 and no values.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]
