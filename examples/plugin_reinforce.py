"""A trainer of one's own in one file: REINFORCE with the mean reward as baseline (Williams 1992).

    trlx-like train configs/plugin_reinforce.yml

Four verbs make a trainer; `TextTrainer` and `OnlineTextTrainer` bring the model, sampling, scoring and evaluation.
"""

from dataclasses import dataclass

from torch import Tensor

from trlx_like import LossOutput, OnlineTextTrainer, register_method, register_trainer
from trlx_like.config import OnlineTextMethodConfig
from trlx_like.data import Completion, padded
from trlx_like.functional.masked import masked_sum


@register_method
class ReinforceConfig(OnlineTextMethodConfig):
    num_rollouts: int = 64
    """Responses a round."""


@dataclass
class Rollout(Completion):
    advantages: Tensor = padded()  # [B, R]


@register_trainer
class ReinforceTrainer(OnlineTextTrainer[Rollout]):
    method_class = ReinforceConfig
    experience_class = Rollout

    def make_experience(self) -> dict[str, float]:
        rounds = list(self.scored_samples(self.method.num_rollouts, self.method.num_rollouts))
        scores = [float(reward) for _, rewards in rounds for reward in rewards]
        total, count = self.group.sum([sum(scores), len(scores)])
        for samples, rewards in rounds:
            better = samples.completion.response.new_tensor(rewards, dtype=float) - total / count
            advantages = better[:, None].float().expand(samples.completion.mask.shape)
            self.push_to_store(Rollout(**vars(samples.completion), advantages=advantages).to("cpu").split())
        return {"rollout/score_mean": total / count}

    def loss(self, batch: Rollout) -> LossOutput:
        return LossOutput(-masked_sum(self.model(batch).logprobs * batch.advantages, batch.mask))

    def units(self, batch: Rollout) -> float:
        return float(batch.mask.sum())
