"""Advantages and returns of finished episodes. One row is one response, and one token is one action."""

from __future__ import annotations

import torch
from torch import Tensor

from trlx_like.functional.masked import zero_padding


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates: A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t.

    The returns are A_t + V_t. The episode ends with the last real token, so the value after it is 0. Advantages are not
    whitened, and returns are computed before any whitening.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; the returns are PPO's V^targ, arXiv:1707.06347, sec. 5.

    Args:
        rewards: r_t, the reward of the action at t. [B, R]
        values: V_t, the value of the state before the action at t. [B, R]
        mask: True on real tokens, which must be contiguous in each row; padding may be on either side, and rewards and
            values there are ignored. [B, R] bool
        gamma: The discount.
        lam: The lambda of GAE; 0 is one-step TD, 1 is Monte Carlo.

    Returns:
        Advantages and returns, 0 at padding. Each [B, R]
    """
    rewards, values = zero_padding(rewards, mask), zero_padding(values, mask)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)  # [B, R]
    deltas = rewards + gamma * next_values - values
    advantages = torch.empty_like(deltas)
    advantage = deltas.new_zeros(len(deltas))  # [B]
    for t in reversed(range(deltas.shape[1])):
        advantage = deltas[:, t] + gamma * lam * advantage
        advantages[:, t] = advantage
    advantages = zero_padding(advantages, mask)
    return advantages, advantages + values


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Compute discounted returns: G_t = sum_{k >= t} gamma^(k - t) r_k.

    Source: Sutton and Barto 2018, eq. 3.8. It equals the returns of `gae` with lam = 1 and values of 0.

    Args:
        rewards: r_t. [B, R]
        mask: True on real tokens, contiguous in each row. [B, R] bool
        gamma: The discount.

    Returns:
        The returns, 0 at padding. [B, R]
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]
