"""On-policy distillation (GKD with lambda 1: Agarwal et al. 2024, arXiv:2306.13649).

The policy writes responses, and at each of their tokens its whole next-token distribution is pulled to that of a
teacher, a frozen model with the same vocabulary. The gradient does not go through the sampling. No reward is needed.
Left out on purpose: responses of the teacher or of a data set (lambda below 1), which SFT learns from. Documented in
docs/algorithms/distill.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from trlx_like.config.methods.distill import DistillConfig
from trlx_like.data import Completion
from trlx_like.errors import ConfigError
from trlx_like.functional.kl import forward_kl, full_kl, generalized_jsd
from trlx_like.functional.masked import masked_sum
from trlx_like.models.loading import inspect_model
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.online import OnlineTextTrainer
from trlx_like.trainers.samples import ShownSamples


class DistillTrainer(OnlineTextTrainer[Completion]):
    """Pull the policy to a teacher, token by token, on the policy's own responses."""

    method_class = DistillConfig
    experience_class = Completion
    needs = ("prompts",)
    method: DistillConfig

    def inspect_models(self) -> None:
        super().inspect_models()
        model = self.config.model
        teacher = inspect_model(model.ref_model_path, model, "model.ref_model_path")
        self.check_vocabularies(inspect_model(model.model_path, model), teacher)

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        self.add_reference()
        teacher: Any = self.model.reference_modules()[0]
        self.check_vocabularies(self.model.lm.config, teacher.config)

    @property
    def temperature(self) -> float:
        """Temperature of the distributions that are compared, at whatever temperature responses are sampled."""
        return self.method.loss_temperature

    def make_experience(self) -> Metrics:
        count, shown = self.method.num_rollouts or self.config.train.batch_size, ShownSamples(self.run)
        for samples, rewards in self.all_samples(count, self.method.chunk_size):
            shown.add(samples, None if self.reward_fn is None else rewards)  # logged, not learned from
            # The loss is over the whole vocabulary, also where sampling had a cut such as top-k.
            whole = replace(samples.completion, choices=None, choice_sizes=None)
            self.push_to_store(whole.to("cpu").split())
        shown.log()
        return {}

    def loss(self, batch: Completion) -> LossOutput:
        divergence = self.model(batch, divergence=self.divergence).divergence  # [B, R]
        return LossOutput(masked_sum(divergence, batch.scored))

    def units(self, batch: Completion) -> float:
        return float(batch.scored.sum())

    def divergence(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Compute `method.divergence` of policy and teacher. [*, V], [*, V] -> [*]"""
        if self.method.divergence == "jsd":
            return generalized_jsd(logits, teacher_logits, self.method.beta)
        return (full_kl if self.method.divergence == "reverse_kl" else forward_kl)(logits, teacher_logits)

    def check_vocabularies(self, policy: Any, teacher: Any) -> None:
        """Raise ConfigError if the configurations of both models are known, and say that their logits differ in number.

        Args:
            policy: The configuration of the policy; None if it is not known.
            teacher: That of the teacher; None if it is not known.
        """
        if policy is None or teacher is None:
            return
        own, other = (config.get_text_config().vocab_size for config in (policy, teacher))
        if own != other:
            raise ConfigError(
                f"model.ref_model_path: the teacher has a vocabulary of {other} tokens and the policy one of {own}. "
                "They are compared token by token, so give a teacher with the same tokenizer and as many embeddings."
            )
