"""Options of PPO: those of trlX, and the controls of TRL's PPOTrainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trlx_like.config.method import PolicyGradientMethodConfig
from trlx_like.config.problems import Problem, at, shown
from trlx_like.config.resume import Applied, OfRollouts, OfRound, OfState, OfWeights


def _none_if_off(value: Any) -> Any:
    """Return None for the values by which trlX switches an option off: false, 0 and "ignored"."""
    off = value is False or value == "ignored" or (isinstance(value, int | float) and value == 0)
    return None if off else value


class PPOConfig(PolicyGradientMethodConfig):
    """Proximal policy optimisation (Schulman et al. 2017) with a KL penalty to a reference model."""

    ppo_epochs: OfRound[int] = Field(default=4, ge=1)
    """Number of passes over the rollouts of a round."""
    num_rollouts: OfRound[int] = Field(default=128, ge=1)
    """Number of responses in each round, over all processes."""
    chunk_size: Applied[int] = Field(default=128, ge=1)
    """Number of prompts to generate from and score at once, per process."""

    init_kl_coef: OfState[float] = Field(default=0.001, ge=0)
    """Weight of the KL penalty at the start of training."""
    target: Applied[float | None] = Field(default=None, gt=0)
    """KL to the reference, in nats per response, that the weight is adapted to; null: the weight is constant."""
    horizon: Applied[int] = Field(default=10000, ge=1)
    """Number of responses over which the adaptive weight reacts; a larger number makes it slower."""
    kl_penalty: OfRollouts[Literal["kl", "abs", "mse", "full"]] = "kl"
    """Penalty of a token from its log-ratio d: kl is d, abs |d|, mse d^2 / 2, full the KL over all tokens."""
    kl_in: OfRollouts[Literal["loss", "reward"]] = "reward"
    """Where the KL penalty acts: subtracted from each token's reward, or added to the loss."""
    target_kl: Applied[float | None] = Field(default=None, gt=0)
    """KL to the sampling policy, in nats per token, at which the updates of a round stop early; null: never."""
    ratio_threshold: Applied[float | None] = Field(default=10.0, gt=1)
    """Mean probability ratio above which a batch is skipped; null: skip none."""

    gamma: Applied[float] = Field(default=1.0, ge=0, le=1)
    """Discount factor of rewards, per token."""
    lam: Applied[float] = Field(default=0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation (GAE)."""
    cliprange: Applied[float] = Field(default=0.2, gt=0)
    """Clipping range of the probability ratio, around 1."""
    cliprange_value: Applied[float | None] = Field(default=0.2, gt=0)
    """Clipping range of a value around its old value; null: no clipping."""
    vf_coef: Applied[float] = Field(default=1.0, ge=0)
    """Weight of the value loss."""
    ent_coef: Applied[float] = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    whiten_rewards: Applied[bool] = False
    """Scale the token rewards of each round to variance 1."""
    whiten_advantages: Applied[bool] = True
    """Shift and scale the advantages of each round to mean 0 and variance 1."""

    scale_reward: OfState[Annotated[Literal["running", "ref"] | None, BeforeValidator(_none_if_off)]] = None
    """Divide scores by a standard deviation: running (of all so far) or ref (of the first round); null: do not."""
    norm_reward: OfState[bool] = False
    """Subtract the mean of the scores before they are scaled; needs `scale_reward`."""
    ref_mean: OfState[float | None] = None
    """Mean of the scores if `scale_reward` is ref; null: the mean of the first round."""
    ref_std: OfState[float | None] = Field(default=None, gt=0)
    """Standard deviation of the scores if `scale_reward` is ref; null: that of the first round."""
    cliprange_reward: Applied[Annotated[float | None, BeforeValidator(_none_if_off)]] = Field(default=10.0, gt=0)
    """Largest absolute value of a score; larger ones are clipped. Null: no clipping."""
    missing_eos_penalty: Applied[float | None] = Field(default=None, ge=0)
    """Penalty subtracted from the score of a response that was cut at max_new_tokens; null: none."""

    num_value_layers_unfrozen: OfWeights[int] = Field(default=0, ge=0)
    """Number of top layers that the value function has for itself; 0: only a head on the policy."""

    @property
    def measures_kl(self) -> bool:
        return True

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        if self.norm_reward and self.scale_reward is None:
            given = shown(self.scale_reward)
            yield at("method.norm_reward", f"true needs method.scale_reward ({given}) to be 'running' or 'ref'.")
        if self.replay_best and self.target is not None:
            words = "method.target adapts the KL weight to responses of the present policy; set one of the two only."
            yield at("method.replay_best", words)

    def acting(self) -> dict[str, bool]:
        ref = dict.fromkeys(("ref_mean", "ref_std"), self.scale_reward == "ref")
        return {**super().acting(), "horizon": self.target is not None, **ref}
