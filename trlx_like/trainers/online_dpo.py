"""Online DPO (Guo et al. 2024, arXiv:2402.04792): preference learning on pairs that the policy writes itself.

A round samples several responses to each prompt and ranks them with a judge or a reward function. Then it makes DPO
steps on the best and the worst response to each prompt. Documented in docs/algorithms/online_dpo.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trlx_like.checkpoint import fields
from trlx_like.config.methods.online_dpo import OnlineDPOConfig
from trlx_like.data import Completion, PreferenceExperience
from trlx_like.errors import ConfigError
from trlx_like.functional.kl import kl_k3
from trlx_like.functional.preference import ipo_loss, sigmoid_loss
from trlx_like.functional.sequences import sequence_sums
from trlx_like.models.policy import PolicyOutput
from trlx_like.rewards.call import Reward
from trlx_like.rewards.judges import GroupReward, WinRate, make_judge
from trlx_like.rewards.judging import kind_of
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.dpo_losses import Pairs
from trlx_like.trainers.online import OnlineTextTrainer, whole
from trlx_like.trainers.optimise import Term
from trlx_like.trainers.samples import ShownSamples

REFERENCE_KEY = "reference"
"""Key of an evaluation prompt that holds a completion to compare the policy's response with."""


@dataclass
class JudgedPair(PreferenceExperience):
    """Hold the best and the worst response to each prompt, with their scores in this order. [B, 2]"""

    scores: Tensor | None = field(default=None, metadata={"shape": (2,)})  # [B, 2] float, after `missing_eos_penalty`
    # [B, 2] float: 1 for a response that ended by itself
    finished: Tensor | None = field(default=None, metadata={"shape": (2,)})


class OnlineDPOTrainer(OnlineTextTrainer[JudgedPair]):
    """Train with DPO on the best and the worst of the policy's own responses to each prompt."""

    method_class = OnlineDPOConfig
    experience_class = JudgedPair
    uses = frozenset({"prompts", "eval_prompts", "judge"})
    needs = ("prompts", "reward_fn or judge")
    method: OnlineDPOConfig

    def build(self, tokenizer: Any = None) -> None:
        self.judge = make_judge(self.data["judge"]) if "judge" in self.data else None
        if self.judge is not None:
            if self.method.replay_best and kind_of(self.judge) != "check":
                raise ConfigError(
                    "method.replay_best: the judge's scores count wins within a group, so those of different rounds "
                    "cannot be compared. Use a reward function, or a judge that checks."
                )
            self.judged = GroupReward(self.judge, self.method.n_generations_per_prompt)
            self.scoring.runner(self.judged)
        super().build(tokenizer)
        self.add_reference()
        self.beta = self.method.beta_of(0)
        self.state.register("online_dpo", fields(self, "beta"))
        self._add_win_rate()

    # A round.

    def make_experience(self) -> Metrics:
        method = self.method
        self.beta = method.beta_of(self.prompts.next_epoch)
        roles: list[str | None] = []  # of each sample: "chosen", "rejected", or None outside of pairs
        without = {"ties": 0, "unjudged": 0}  # number of prompts without a pair, by reason
        shown = ShownSamples(self.run, method.n_generations_per_prompt)
        for samples, rewards in self.all_samples(method.num_prompts or self.config.train.batch_size, method.chunk_size):
            shown.add(samples, rewards)
            scores, size = self.penalized(rewards, samples.finished), method.n_generations_per_prompt
            responses = samples.completion.to("cpu").split()
            for start in range(0, len(responses), size):
                rows = range(start, start + size)
                judged = {row: score for row in rows if (score := scores[row]) is not None}
                pair = best_and_worst(judged)
                if pair is None:
                    without["ties" if len(judged) > 1 else "unjudged"] += 1
                    roles += [None] * size
                    continue
                best, worst = pair
                ended = [float(samples.finished[row]) for row in pair]
                self.push_to_store([_pair(responses[best], responses[worst], [judged[row] for row in pair], ended)])
                roles += [{best: "chosen", worst: "rejected"}.get(row) for row in rows]
        self.rollouts.keep([role is not None for role in roles])
        shown.log(pair=roles, kl=self.divergence(shown.completions))
        pairs, ties, unjudged = self.world.sum([len(self.store), without["ties"], without["unjudged"]])
        return {"rollout/pairs": pairs, "rollout/ties": ties, "rollout/unjudged": unjudged}

    def divergence(self, completions: Sequence[Completion]) -> list[float]:
        """Estimate KL(policy || reference) of each response in nats, with the k3 estimator."""
        if not completions:
            return []
        found = torch.zeros(len(completions))
        for rows, part, out in self.score_batch(
            Completion.collate(completions), self.run.microbatch_size, reference=True
        ):
            assert out.ref_logprobs is not None
            found[rows] = sequence_sums(kl_k3(out.logprobs, out.ref_logprobs), part.mask).to(found)
        return found.tolist()

    @property
    def scorer(self) -> Callable[..., Any] | None:
        return self.reward_fn if self.judge is None else self.judged

    def penalized(self, rewards: Sequence[Reward], finished: Sequence[bool]) -> list[float | None]:
        """Subtract `missing_eos_penalty` from the scores of responses that were cut off at `max_new_tokens`."""
        penalty = self.method.missing_eos_penalty or 0.0
        rows = zip(map(whole, rewards), finished, strict=True)
        return [None if score is None else score - (not ended) * penalty for score, ended in rows]

    # The loss.

    def loss(self, batch: JudgedPair) -> LossOutput:
        return self.loss_of(batch, self.model(batch.completions(), reference=True))

    def loss_of(self, batch: JudgedPair, out: PolicyOutput) -> LossOutput:
        """Compute the loss of pairs from the policy's output on them."""
        assert out.ref_logprobs is not None
        pairs = Pairs.of(batch.sides(out.logprobs), batch.sides(out.ref_logprobs), batch.scored)
        chosen, rejected = pairs.ratios
        margin = chosen - rejected
        sigmoid = self.method.loss_type == "sigmoid"
        losses = sigmoid_loss(self.beta * margin) if sigmoid else ipo_loss(margin, self.beta)
        return LossOutput(losses.sum(), self.metrics(batch, out, pairs))

    def units(self, batch: JudgedPair) -> dict[str, float]:
        return {"pairs": float(len(batch)), "tokens": float(sum(mask.sum() for mask in batch.scored))}

    @torch.no_grad()
    def metrics(self, batch: JudgedPair, out: PolicyOutput, pairs: Pairs) -> dict[str, Tensor | Term]:
        """Return metrics as sums over pairs, or over tokens. A metric of responses is averaged over each pair first."""
        assert out.ref_logprobs is not None and batch.scores is not None and batch.finished is not None
        chosen, rejected = (self.beta * ratio for ratio in pairs.ratios)
        kl = (chosen + rejected) / (2 * self.beta)  # [B]
        scores = batch.scores.mean(dim=1)
        divergence = sequence_sums(kl_k3(out.logprobs, out.ref_logprobs), batch.completions().mask).sum()
        entropy = -(pairs.chosen + pairs.rejected)
        columns = {
            "objective/kl": kl,
            "objective/entropy": entropy / 2,
            "objective/non_score_reward": -self.beta * kl,
            "objective/rlhf_reward": scores - self.beta * kl,
            "objective/scores": scores,
            "objective/scores_margin": batch.scores[:, 0] - batch.scores[:, 1],
            "policy/kl": divergence / 2,
            **pairs.metrics(self.beta),
            "val/contain_eos_token": batch.finished.mean(dim=1),
            "beta": torch.full_like(scores, self.beta),
        }
        of_tokens = {"policy/kl_per_token": (divergence, "tokens"), "policy/entropy": (entropy.sum(), "tokens")}
        return {name: column.sum() for name, column in columns.items()} | of_tokens

    # Evaluation.

    def _add_win_rate(self) -> None:
        """Add the win rate to the metrics if every evaluation prompt has a completion to compare with."""
        judge = self.reward_fn if self.judge is None else self.judge
        rows = [] if self.eval_pipeline is None else self.eval_pipeline.metadata
        if judge is not None and rows and all(isinstance(row.get(REFERENCE_KEY), str) for row in rows):
            self.metric_fn = WinRate(judge, key=REFERENCE_KEY, also=self.metric_fn)


def best_and_worst(scores: Mapping[int, float]) -> tuple[int, int] | None:
    """Find the best and the worst response to a prompt. Among equal scores the first one is taken.

    Args:
        scores: Scores by the row of the response; responses without a score are left out.

    Returns:
        The rows of the two; None if there are fewer than two scores, or all are equal.
    """
    if len(set(scores.values())) < 2:
        return None
    return max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)


def _pair(best: Completion, worst: Completion, scores: list[float], finished: list[float]) -> JudgedPair:
    return JudgedPair(
        *(best.prompt, best.prompt_mask, best.response, best.mask, worst.response, worst.mask),
        chosen_choices=best.choices,
        chosen_choice_sizes=best.choice_sizes,
        rejected_choices=worst.choices,
        rejected_choice_sizes=worst.choice_sizes,
        scores=torch.tensor(scores),
        finished=torch.tensor(finished),
        place=best.place,
    )
