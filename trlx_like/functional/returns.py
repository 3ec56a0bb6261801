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
        mask: True on the tokens of the episode. Others, padding on either side or the answers of a tool in between, are
            skipped, and rewards and values there are ignored. [B, R] bool
        gamma: The discount.
        lam: The lambda of GAE; 0 is one-step TD, 1 is Monte Carlo.

    Returns:
        Advantages and returns, 0 at padding. Each [B, R]
    """
    rewards, values = zero_padding(rewards, mask), zero_padding(values, mask)
    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(len(values))  # [B]
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    advantages = zero_padding(advantages, mask)
    return advantages, advantages + values


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Compute discounted returns: G_t = sum_{k >= t} gamma^(k - t) r_k.

    Source: Sutton and Barto 2018, eq. 3.8. It equals the returns of `gae` with lam = 1 and values of 0.

    Args:
        rewards: r_t. [B, R]
        mask: As in `gae`. [B, R] bool
        gamma: The discount.

    Returns:
        The returns, 0 at padding. [B, R]
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]
