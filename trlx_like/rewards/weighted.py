"""Several reward functions as one: `train(reward_fn=[accuracy, brevity])` with `reward.weights`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trlx_like.errors import ConfigError, RewardError
from trlx_like.rewards.call import Reward, call_reward, name_of


class WeightedRewards:
    """The weighted sum of several reward functions, reward models or others.

    functions: called as `train` calls a reward function. weights: one each, by default 1. names: what columns and
    metrics call them, by default as the functions are called. A function that abstains (None) adds nothing to that
    sample, the weights of the others staying as they are; where all do, so does this. RewardError for rewards of single
    tokens.
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
        rows = [{name: column[row] for name, column in metadata.items()} for row in range(len(samples))]
        return self.combined([call_reward(function, texts, rows, tokenizer) for function in self.functions])

    def combined(self, rewards: Sequence[Sequence[Reward]]) -> list[Reward]:
        """The sum for each sample. rewards: of each function, a list with one entry a sample."""
        return [self._sum(of_sample) for of_sample in zip(*rewards, strict=True)]

    def _sum(self, rewards: Sequence[Reward]) -> Reward:
        total = None
        for name, weight, reward in zip(self.names, self.weights, rewards, strict=True):
            if isinstance(reward, list):
                raise RewardError(f"Several rewards are added up as one number a sample; {name} returned one a token.")
            if reward is not None:
                total = weight * reward + (0.0 if total is None else total)
        return total


def parts_of(function: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    """The functions that a reward is made of, by name."""
    if isinstance(function, WeightedRewards):
        return dict(zip(function.names, function.functions, strict=True))
    return {_label(function): function}


def _label(function: Callable[..., Any]) -> str:
    """The last part of a function's name; a reward model is called as its folder."""
    label: str = getattr(function, "label", None) or name_of(getattr(function, "func", function)).rpartition(".")[2]
    return label.strip("<>")


def _distinct(names: Sequence[str]) -> list[str]:
    """The names with _2, _3, ... behind those that were there before."""
    found: list[str] = []
    for name in names:
        numbered, number = name, 1
        while numbered in found:
            number += 1
            numbered = f"{name}_{number}"
        found.append(numbered)
    return found
