"""Names of TRL: judges to derive from, whose `judge(prompts, completions)` you write, and PPO by hand (`trl_ppo`).

A judge for TRL runs after a change of the import. Here a judge compares, ranks or checks (`trlx_like.rewards.judges`);
these classes turn TRL's answers into those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from trlx_like.config.elsewhere import answers


class BaseJudge(ABC):
    """Judge completions in TRL's way; derive from one of the three classes below."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> Sequence[Any]:
        """Judge the completions of each prompt, and return one answer per prompt."""


class BasePairwiseJudge(BaseJudge):
    """Compare: `judge` gets a pair of completions per prompt and returns 0, 1, or -1 if it cannot tell."""

    def compare(self, *, prompts: list[str], pairs: list[tuple[str, str]]) -> list[int | None]:
        """Compare the two completions of each pair."""
        answers = self.judge(prompts, [list(pair) for pair in pairs])
        return [None if answer == -1 else answer for answer in answers]


class BaseRankJudge(BaseJudge):
    """Rank: `judge` gets the completions of each prompt and returns their places in the list, the best first."""

    def rank(self, *, prompts: list[str], completions: list[list[str]]) -> list[list[int]]:
        """Rank the completions of each prompt."""
        return [[list(order).index(n) for n in range(len(order))] for order in self.judge(prompts, completions)]


class BaseBinaryJudge(BaseJudge):
    """Check: `judge` gets one completion per prompt and returns 1, 0, or -1 if it cannot tell."""

    def check(self, *, prompts: list[str], completions: list[str]) -> list[bool | None]:
        """Check each completion."""
        return [None if answer == -1 else answer for answer in self.judge(prompts, completions)]


class AllTrueJudge(BaseBinaryJudge):
    """Check several things: 1 if all judges say 1, 0 if one says 0, and -1 if one cannot tell.

    Source: Xu et al. 2024, "The Perfect Blend: Redefining RLHF with Mixture of Judges", arXiv:2409.20370, and TRL.

    Args:
        judges: Binary judges of TRL's kind, or objects with `check`.
    """

    def __init__(self, judges: Sequence[Any]) -> None:
        self.judges = list(judges)

    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> list[int]:
        """Judge each completion by all judges."""
        given = [one.check(prompts=prompts, completions=completions) for one in self.judges]
        return [_all([row[place] for row in given]) for place in range(len(prompts))]


def _all(answers: Sequence[bool | None]) -> int:
    return -1 if None in answers else int(all(answers))


_MADE = {
    **dict.fromkeys(("LengthSampler", "PPOConfig", "PPOTrainer"), "compat.trl_ppo"),
    **dict.fromkeys(("AutoModelForCausalLMWithValueHead", "AutoModelForSeq2SeqLMWithValueHead"), "models.value_head"),
    "IterativeSFTTrainer": "compat.trl_sft",
    "PreTrainedModelWrapper": "models.wrapper",
    "create_reference_model": "models.reference",
}
"""Names of TRL that are made in other modules of this package, under the same name."""


def __getattr__(name: str) -> Any:
    if name in _MADE:
        return getattr(import_module(f"trlx_like.{_MADE[name]}"), name)
    if name == "set_seed":
        return import_module("trlx_like.checkpoint").seed_everything
    if words := answers("trl").get(name):
        raise ImportError(f"{__name__} has no {name}; use {words}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
