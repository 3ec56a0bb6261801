"""Options of ILQL: those of trlX, and of the original implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from trlx_like.config.method import TextMethodConfig
from trlx_like.config.problems import Problem, shown


def default_gen_kwargs() -> dict[str, Any]:
    """trlX's: guided by the advantage, from the 20 best tokens."""
    return {"max_new_tokens": 56, "top_k": 20, "beta": 1.0, "temperature": 1.0}


class ILQLConfig(TextMethodConfig):
    """Implicit language Q-learning (Snell et al. 2022): learns values from rewarded text, decodes by them."""

    generation_options: ClassVar[tuple[str, ...]] = ("beta",)

    tau: float = Field(default=0.7, gt=0, lt=1)
    """Expectile that V is of Q: .5 the mean over the data's actions, towards 1 the best of them."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of a reward per output token."""
    cql_scale: float = Field(default=0.1, ge=0)
    """Weight of the conservative term, which keeps Q low for tokens that the data does not have."""
    cql_temperature: float = Field(default=1.0, gt=0)
    """Q is divided by this in the conservative term."""
    awac_scale: float = Field(default=1.0, ge=0)
    """Weight of the language-model term."""
    beta: float = 0.0
    """Inverse temperature of the weights exp(beta A) in the language-model term; 0: plain imitation. Decoding has a
    beta of its own, in `gen_kwargs`."""
    awac_clip: float | None = Field(default=None, gt=0)
    """Largest weight in the language-model term; null: no limit."""
    awac_per: Literal["action", "token"] = "action"
    """What the language-model term is a mean over: output tokens (trlX), or all tokens (the original)."""
    alpha: float = Field(default=0.001, gt=0, le=1)
    """Share of the Q heads that their targets take over at a synchronisation (Polyak)."""
    steps_for_target_q_sync: int = Field(default=5, ge=1)
    """Optimizer steps between synchronisations of the target Q heads."""
    two_qs: bool = True
    """Two Q heads, of whose targets the smaller counts."""
    mc_returns: bool = False
    """V learns from the returns in the data in place of the target Q."""
    detach_q: bool = False
    """The Q heads do not train the language model under them."""
    detach_v: bool = False
    """The V head does not train the language model under it."""
    standardize_rewards: bool = True
    """Scale returns to variance 1, and to mean 0 where each sample has one reward. Equal ones stay as they are."""
    gen_kwargs: dict[str, Any] = Field(default_factory=default_gen_kwargs)
    """Options of `generate` for evaluation, and `beta`, the weight of the advantage; a list for one is a sweep."""

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        given = self.gen_kwargs.get("beta", 0.0)
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                yield Problem(("method", "gen_kwargs", "beta"), f"must be a number, got {shown(value)}.")
        if self.gen_kwargs.get("num_beams") not in (None, 1):
            yield Problem(("method", "gen_kwargs", "num_beams"), "guided decoding samples; leave it out.")

    def inert(self) -> list[str]:
        plain = ["awac_clip"] if self.beta == 0 else []
        return [name for name in plain if self.changed(name)]
