"""Calling the user's reward and metric functions, and checking what they return."""

from trlx_like.rewards.call import RewardFn, call_metric, call_reward

__all__ = ["RewardFn", "call_metric", "call_reward"]
