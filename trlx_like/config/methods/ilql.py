"""Options of ILQL: those of trlX, and of the original implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from trlx_like.config.method import TextMethodConfig
from trlx_like.config.problems import Problem, at, shown
from trlx_like.config.resume import Applied, OfData, OfWeights

GEN_KWARGS = {"max_new_tokens": 56, "top_k": 20, "beta": 1.0, "temperature": 1.0}
"""The defaults of trlX: sampling guided by the advantage, among the 20 most likely tokens."""


class ILQLConfig(TextMethodConfig):
    """Learn values from rewarded text, and decode with them: implicit language Q-learning (Snell et al. 2022)."""

    generation_options: ClassVar[tuple[str, ...]] = ("beta",)

    tau: Applied[float] = Field(default=0.7, gt=0, lt=1)
    """Expectile of Q that V learns: 0.5 is the mean over the actions in the data, near 1 the best of them."""
    gamma: Applied[float] = Field(default=0.99, ge=0, le=1)
    """Discount factor of rewards, per output token."""
    cql_scale: Applied[float] = Field(default=0.1, ge=0)
    """Weight of the conservative (CQL) loss, which keeps Q low for tokens that are not in the data."""
    cql_temperature: Applied[float] = Field(default=1.0, gt=0)
    """Temperature of the conservative loss, which divides Q."""
    awac_scale: Applied[float] = Field(default=1.0, ge=0)
    """Weight of the language-model (AWAC) loss."""
    beta: Applied[float] = 0.0
    """Inverse temperature of the weights exp(beta A) in the language-model loss; 0: all weights are 1. Decoding has
    its own beta, in `gen_kwargs`."""
    awac_clip: Applied[float | None] = Field(default=None, gt=0)
    """Largest weight exp(beta A) in the language-model loss; null: no limit."""
    awac_per: Applied[Literal["action", "token"]] = "action"
    """What the language-model loss averages over: output tokens (action, trlX) or all tokens (token, the paper)."""
    alpha: Applied[float] = Field(default=0.001, gt=0, le=1)
    """Fraction of the Q heads that their target heads take over at each synchronization (Polyak averaging)."""
    steps_for_target_q_sync: Applied[int] = Field(default=5, ge=1)
    """Number of optimizer steps between two synchronizations of the target Q heads."""
    two_qs: OfWeights[bool] = True
    """Use two Q heads and take the smaller of their targets."""
    mc_returns: Applied[bool] = False
    """Let V learn from the returns in the data instead of from the target Q."""
    detach_q: Applied[bool] = False
    """Do not train the language model by the loss of the Q heads."""
    detach_v: Applied[bool] = False
    """Do not train the language model by the loss of the V head."""
    standardize_rewards: OfData[bool] = True
    """Scale returns to variance 1, and to mean 0 if each sample has one reward. Equal returns are left as they are."""
    gen_kwargs: Applied[dict[str, Any]] = GEN_KWARGS
    """Generation options for evaluation, and beta, the weight of the advantage in decoding. A list is a sweep."""

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        given = self.gen_kwargs.get("beta", 0.0)
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                yield at("method.gen_kwargs.beta", f"must be a number, got {shown(value)}.")
        if self.gen_kwargs.get("num_beams") not in (None, 1):
            yield at("method.gen_kwargs.num_beams", "guided decoding samples; leave it out.")

    def acting(self) -> dict[str, bool]:
        return {"awac_clip": self.beta != 0}
