"""Options of PPO: those of trlX, and the controls of TRL's PPOTrainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trlx_like.config.method import OnlineTextMethodConfig
from trlx_like.config.problems import Problem, shown


def _none_if_off(value: Any) -> Any:
    """trlX switches these off with false, 0 or "ignored"."""
    off = value is False or value == "ignored" or (isinstance(value, int | float) and value == 0)
    return None if off else value


class PPOConfig(OnlineTextMethodConfig):
    """Proximal policy optimisation (Schulman et al. 2017) with a KL penalty to a reference model."""

    ppo_epochs: int = Field(default=4, ge=1)
    """Passes over the experience of a round."""
    num_rollouts: int = Field(default=128, ge=1)
    """Responses made in a round, over all processes."""
    chunk_size: int = Field(default=128, ge=1)
    """Prompts generated from and scored at once, per process."""

    init_kl_coef: float = Field(default=0.001, ge=0)
    """Weight of the KL penalty at the start."""
    target: float | None = Field(default=None, gt=0)
    """KL in nats a response that the weight is adapted to reach; null: the weight stays."""
    horizon: int = Field(default=10000, ge=1)
    """Responses over which the adaptive weight reacts; larger is slower."""
    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    """Penalty of a token, from its log-ratio d: d, |d|, d^2 / 2, or the KL over the whole vocabulary."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the penalty acts: subtracted from each token's reward, or added to the loss."""
    target_kl: float | None = Field(default=None, gt=0)
    """KL in nats a token from the policy that sampled, above which a round's updates stop; null: never."""
    ratio_threshold: float | None = Field(default=10.0, gt=1)
    """Mean probability ratio of a batch above which it is skipped; null: never."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a reward per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    cliprange: float = Field(default=0.2, gt=0)
    """The probability ratio is clipped to 1 +- this."""
    cliprange_value: float | None = Field(default=0.2, gt=0)
    """Values are clipped to the old ones +- this; null: not clipped."""
    vf_coef: float = Field(default=1.0, ge=0)
    """Weight of the value loss."""
    ent_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    whiten_rewards: bool = False
    """Scale the token rewards of a round to variance 1."""
    whiten_advantages: bool = True
    """Scale the advantages of a round to mean 0 and variance 1."""

    scale_reward: Annotated[Literal["running", "ref"] | None, BeforeValidator(_none_if_off)] = None
    """Divide scores by their deviation: "running", of all so far, "ref", of the first round; null: do not."""
    norm_reward: bool = False
    """Subtract the mean before scaling; needs `scale_reward`."""
    ref_mean: float | None = None
    """Mean of the scores for scale_reward "ref"; null: that of the first round."""
    ref_std: float | None = Field(default=None, gt=0)
    """Standard deviation of the scores for scale_reward "ref"; null: that of the first round."""
    cliprange_reward: Annotated[float | None, BeforeValidator(_none_if_off)] = Field(default=10.0, gt=0)
    """Scores are clipped to +- this; null: not clipped."""
    missing_eos_penalty: float | None = Field(default=None, ge=0)
    """Subtracted from the score of a response that does not end by itself; null: nothing."""

    num_value_layers_unfrozen: int = Field(default=0, ge=0)
    """Top layers that the value function gets as its own trainable copy; 0: a head on the policy."""

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        if self.norm_reward and self.scale_reward is None:
            given = shown(self.scale_reward)
            yield Problem(
                ("method", "norm_reward"),
                f"true needs method.scale_reward ({given}) to be 'running' or 'ref'.",
            )

    def inert(self) -> list[str]:
        without_target = ["horizon"] if self.target is None else []
        without_ref = ["ref_mean", "ref_std"] if self.scale_reward != "ref" else []
        return [name for name in (*without_target, *without_ref) if self.changed(name)]
