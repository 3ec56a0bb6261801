"""Weighted sums of several reward functions: `train(reward_fn=[accuracy, brevity])` with `reward.weights`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trlx_like.errors import ConfigError, RewardError
from trlx_like.rewards.arguments import metadata_rows, name_of
from trlx_like.rewards.call import call_reward
from trlx_like.rewards.outcome import Reward


class WeightedRewards:
    """Add up several reward functions or reward models, each with its weight.

    A function that abstains (None) from a sample adds nothing to its reward, and the weights of the others stay as
    they are. If all functions abstain, so does the sum.

    Args:
        functions: Called as `train` calls a reward function.
        weights: One per function; None: 1 each.
        names: Names of the components in columns and metrics; None: the functions' own names.

    Raises:
        ConfigError: There is no function, or not one weight and one name for each.
        RewardError: A function returned per-token rewards.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.functions = list(functions)
        self.weights = [1.0] * len(self.functions) if weights is None else [float(weight) for weight in weights]
        if not self.functions or len(self.weights) != len(self.functions):
            raise ConfigError(
                f"WeightedRewards needs at least one function, and a weight for each: {len(self.functions)} functions, "
                f"{len(self.weights)} weights."
            )
        self.names = _distinct([_label(function) for function in self.functions] if names is None else names)
        if len(self.names) != len(self.functions):
            raise ConfigError(f"WeightedRewards has {len(self.functions)} functions and {len(self.names)} names.")

    def __call__(
        self, *, samples: list[str], prompts: list[str], outputs: list[str], tokenizer: Any = None, **metadata: Any
    ) -> list[Reward]:
        texts = {"samples": samples, "prompts": prompts, "outputs": outputs}
        rows = metadata_rows(metadata, range(len(samples)))
        return self.combined([call_reward(function, texts, rows, tokenizer) for function in self.functions])

    def combined(self, rewards: Sequence[Sequence[Reward]]) -> list[Reward]:
        """Add up the rewards of each sample, given one list of rewards per function."""
        return [self._sum(of_sample) for of_sample in zip(*rewards, strict=True)]

    def _sum(self, rewards: Sequence[Reward]) -> Reward:
        total = None
        for name, weight, reward in zip(self.names, self.weights, rewards, strict=True):
            if isinstance(reward, list):
                raise RewardError(f"Several rewards are added up per sample; {name} returned one per token.")
            if reward is not None:
                total = weight * reward + (0.0 if total is None else total)
        return total


def parts_of(function: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    """Return the functions that a reward is made of, by name."""
    if isinstance(function, WeightedRewards):
        return dict(zip(function.names, function.functions, strict=True))
    return {_label(function): function}


def _label(function: Callable[..., Any]) -> str:
    """Return the last part of a function's name; the name of its folder for a reward model."""
    label: str = getattr(function, "label", None) or name_of(getattr(function, "func", function)).rpartition(".")[2]
    return label.strip("<>")


def _distinct(names: Sequence[str]) -> list[str]:
    """Append _2, _3, ... to names that occurred before."""
    found: list[str] = []
    for name in names:
        numbered, number = name, 1
        while numbered in found:
            number += 1
            numbered = f"{name}_{number}"
        found.append(numbered)
    return found
