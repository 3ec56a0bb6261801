"""ReMax in one file: REINFORCE whose baseline is the reward of the greedy response to the same prompt.

    trlx-like train FILE --plugin examples/plugins/remax.py

Source: Li et al. 2023, arXiv:2310.10505, eq. 6. `scores_of_others` samples and scores the second set of responses. Left
out on purpose: the paper's KL penalty, which a reward function may subtract.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trlx_like import LossOutput, OnlineTextTrainer, register_method, register_trainer
from trlx_like.config import OnlineTextMethodConfig
from trlx_like.data import Completion
from trlx_like.functional.masked import masked_sum
from trlx_like.trainers.online import whole


@register_method
class ReMaxConfig(OnlineTextMethodConfig):
    num_rollouts: int = 64
    """Number of prompts in each round, over all processes."""
    chunk_size: int = 64
    """Number of prompts to generate and score responses for at once, per process."""


@dataclass
class Compared(Completion):
    advantage: Tensor = field(kw_only=True)  # [B]


@register_trainer
class ReMaxTrainer(OnlineTextTrainer[Compared]):
    method_class = ReMaxConfig
    experience_class = Compared

    def make_experience(self) -> dict[str, float]:
        chunks = list(self.scored_samples(self.method.num_rollouts, self.method.chunk_size))
        greedy = self.scores_of_others([samples for samples, _ in chunks], do_sample=False)
        total, better, count = 0.0, 0.0, 0.0
        for (samples, rewards), baselines in zip(chunks, greedy, strict=True):
            # A greedy response without a reward counts 0, so that a sample is not lost by it.
            pairs = [(whole(own) or 0.0, whole(other) or 0.0) for own, other in zip(rewards, baselines, strict=True)]
            advantage = samples.completion.prompt.new_tensor([own - other for own, other in pairs], dtype=torch.float32)
            self.push_to_store(Compared(**vars(samples.completion), advantage=advantage).to("cpu").split())
            total, count = total + sum(other for _, other in pairs), count + len(pairs)
            better += sum(own > other for own, other in pairs)
        total, better, count = self.world.sum([total, better, count])
        return {"rollout/greedy_score_mean": total / count, "rollout/better_than_greedy": better / count}

    def loss(self, batch: Compared) -> LossOutput:
        return LossOutput(-masked_sum(self.model(batch).logprobs * batch.advantage[:, None], batch.mask))

    def units(self, batch: Compared) -> float:
        return float(len(batch))
