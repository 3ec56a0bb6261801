"""A custom trainer in one file: REINFORCE with the mean reward as baseline (Williams 1992).

    trlx-like train configs/plugin_reinforce.yml

A trainer implements four methods (`build` is inherited here). `OnlineTextTrainer` provides the model, sampling, scoring
and evaluation.
"""

from dataclasses import dataclass

from torch import Tensor

from trlx_like import LossOutput, OnlineTextTrainer, register_method, register_trainer
from trlx_like.config import OnlineTextMethodConfig
from trlx_like.data import Completion, padded
from trlx_like.functional.masked import masked_sum
from trlx_like.trainers.online import dense


@register_method
class ReinforceConfig(OnlineTextMethodConfig):
    num_rollouts: int = 64
    """Number of responses in each round."""


@dataclass
class Rollout(Completion):
    advantages: Tensor = padded()  # [B, R]


@register_trainer
class ReinforceTrainer(OnlineTextTrainer[Rollout]):
    method_class = ReinforceConfig
    experience_class = Rollout

    def make_experience(self) -> dict[str, float]:
        rounds = list(self.scored_samples(self.method.num_rollouts, self.method.num_rollouts))
        batches = [(samples.completion, dense(rewards, samples.completion.mask)) for samples, rewards in rounds]
        total, count = self.world.sum([sum(float(s.sum()) for _, s in batches), sum(len(s) for _, s in batches)])
        for completion, scores in batches:
            advantages = (scores.sum(dim=1, keepdim=True) - total / count).expand(scores.shape)
            self.push_to_store(Rollout(**vars(completion), advantages=advantages).to("cpu").split())
        return {"rollout/score_mean": total / count}

    def loss(self, batch: Rollout) -> LossOutput:
        return LossOutput(-masked_sum(self.model(batch).logprobs * batch.advantages, batch.mask))

    def units(self, batch: Rollout) -> float:
        return float(batch.mask.sum())
