"""Rejection-sampling fine-tuning: imitate the policy's own best responses (RAFT, Dong et al. 2023, arXiv:2304.06767;
Yuan et al. 2023, arXiv:2308.01825; the rising threshold is that of ReST, Gulcehre et al. 2023, arXiv:2308.08998).

Every prompt gets new responses, which are scored and added to a pool. Then `n_improve_steps` rounds of supervised
fine-tuning follow, on the responses above a percentile of the scores of their own prompt. Documented in
docs/algorithms/rft.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trlx_like.config.methods.rft import RFTConfig
from trlx_like.data import Completion
from trlx_like.data.pool import ResponsePool, ScoredResponse
from trlx_like.functional.selection import percentile_at, score_thresholds
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.online import OnlineTextTrainer, whole
from trlx_like.trainers.samples import ShownSamples
from trlx_like.trainers.sft import negative_log_likelihood


class RFTTrainer(OnlineTextTrainer[Completion]):
    """Fine-tune on the responses that scored best among the responses to the same prompt."""

    method_class = RFTConfig
    experience_class = Completion
    keep_dropout = True
    method: RFTConfig

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        self.pool = ResponsePool(self.method.pool_size)
        self.state.register("pool", self.pool, small=False)

    @property
    def temperature(self) -> float:
        """Temperature of the loss. It is 1 whatever the responses were sampled at, since they are imitated as text."""
        return 1.0

    def make_experience(self) -> Metrics:
        step = self.progress.round % self.method.n_improve_steps
        if step == 0:
            self.grow_pool()
        return self.select(step)

    def grow_pool(self) -> None:
        """Sample and score new responses to every prompt, and add them to the pool, which all processes share."""
        times = self.method.n_generations_per_prompt
        first = self.progress.round // self.method.n_improve_steps * times  # one epoch for each response to a prompt
        prompts = [(first + again, row) for row in range(self.prompts.rows) for again in range(times)]
        made: list[tuple[int, ScoredResponse]] = []
        shown = ShownSamples(self.run, group_size=None)
        for samples, rewards in self.scored_samples(len(prompts), self.method.chunk_size, prompts):
            shown.add(samples, rewards)
            rows = zip(samples.completion.to("cpu").split(), samples.outputs, map(whole, rewards), strict=True)
            for number, (e, text, score) in zip(samples.numbers, rows, strict=True):
                made.append((number, ScoredResponse(e.prompt.tolist(), e.response.tolist(), text, score or 0.0)))
        everything = sorted(self.world.gather(made), key=lambda pair: pair[0])
        self.pool.extend(response for _, response in everything)
        shown.log()

    def select(self, step: int) -> Metrics:
        """Fill the store with the responses that score above the threshold of a round.

        Args:
            step: Number of the round since the pool has grown, from 0.

        Returns:
            The metrics of pool and selection.
        """
        method = self.method
        percentile = percentile_at(step, method.start_percentile, method.end_percentile, method.n_improve_steps)
        scores = self.pool.scores()
        thresholds = score_thresholds(scores, percentile)
        chosen = self.pool.select(thresholds)
        self.push_to_store([Completion.of_ids(*map(torch.tensor, pair)) for pair in chosen], whole=True)
        return _metrics(scores, thresholds) | {"pool/percentile": percentile, "pool/selected": float(len(chosen))}

    def loss(self, batch: Completion) -> LossOutput:
        return negative_log_likelihood(self.model, batch)

    def units(self, batch: Completion) -> float:
        return float(batch.scored.sum())


def _metrics(scores: list[Tensor], thresholds: Tensor) -> Metrics:
    everything = torch.cat(scores)
    kept = [of_prompt[of_prompt >= threshold] for of_prompt, threshold in zip(scores, thresholds, strict=True)]
    return {
        "pool/responses": float(len(everything)),
        "pool/score_mean": float(everything.mean()),
        "pool/threshold_mean": float(thresholds.mean()),
        "pool/threshold_min": float(thresholds.min()),
        "pool/threshold_max": float(thresholds.max()),
        "pool/kept_fraction": len(torch.cat(kept)) / len(everything),
        "pool/kept_score_mean": float(torch.cat(kept).mean()),
        "pool/kept_prompts": sum(len(of_prompt) > 0 for of_prompt in kept) / len(kept),
    }
