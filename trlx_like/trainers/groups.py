"""What GRPO and RLOO have in common: groups of responses to each prompt, and a clipped loss without a value function.

A round: sample `num_generations` responses to each prompt, score them, compare each with the others (this is what an
algorithm adds, `advantages`), then make `num_iterations` passes of clipped updates. A group stays on one process.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trlx_like.config.methods.groups import GroupMethodConfig
from trlx_like.data import Completion, padded
from trlx_like.functional.group_advantages import group_stds, group_ties, overlong_punishment, token_weights
from trlx_like.functional.kl import kl_k1, kl_k3
from trlx_like.functional.masked import masked_sum, zero_padding
from trlx_like.functional.policy_gradient import approx_kl, clip_sides, clipped_surrogate, probability_ratio
from trlx_like.functional.sequences import sequence_means, sequence_sums
from trlx_like.pipelines.prompts import PromptBatch
from trlx_like.rewards.call import Reward
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.online import OnlineTextTrainer, whole
from trlx_like.trainers.samples import ShownSamples, spread

logger = logging.getLogger(__name__)


@dataclass
class GroupExperience(Completion):
    """Responses with what the policy thought when it sampled them, and how they compare. All [B, R] float."""

    old_logprobs: Tensor = padded()
    advantages: Tensor = padded()
    ref_logprobs: Tensor | None = padded(default=None)  # None without a reference


@dataclass
class Groups:
    """Scores of this process's share of a round as tables: a row is a prompt, its entries are responses to it."""

    scores: Tensor  # [P, G] float64
    scored: Tensor  # [P, G] bool: False where the reward function abstained
    kept: Tensor  # [P, G] bool: whether it is learned from; all that are scored of a prompt, or none
    finished: Tensor  # [P, G] bool
    lengths: Tensor  # [P, G] int64, in tokens

    def extend(self, other: Groups) -> Groups:
        rows = zip(vars(self).values(), vars(other).values(), strict=True)
        return Groups(*(torch.cat(pair) for pair in rows))


class GroupTrainer(OnlineTextTrainer[GroupExperience]):
    """A trainer that compares responses to the same prompt."""

    experience_class = GroupExperience
    method: GroupMethodConfig
    counted = ("responses",)

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        if self.method.beta:
            self.add_reference()

    @property
    def passes(self) -> int:
        return self.method.num_iterations

    @abstractmethod
    def advantages(self, batch: GroupExperience, scores: Tensor, mask: Tensor) -> Tensor:
        """Of the tokens of a round's responses [B, R], whose scores are the entries of the table under the mask.

        scores, mask: [P, G], in the order of the batch. Called on all processes; one may have no rows.
        """

    # A round.

    def take_prompts(self, count: int) -> PromptBatch:
        """This process's share of the next `count` prompts, each as often as it is to be answered."""
        return super().take_prompts(count).repeated(self.method.num_generations)

    def make_experience(self) -> Metrics:
        method = self.method
        groups, responses = self.table([], [], torch.zeros(0)), []
        shown = ShownSamples(self, method.num_generations)
        attempts, wanted = 0, method.num_prompts
        while wanted > 0 and attempts < (method.max_sampling_attempts or 1):
            for samples, rewards in self.all_samples(wanted, method.chunk_size, more=attempts > 0):
                shown.add(samples, rewards)
                part = self.table(rewards, samples.finished, samples.completion.mask.sum(dim=1).cpu())
                groups = groups.extend(part)
                responses += self.chosen(samples, part.kept)
            attempts += 1
            wanted = method.num_prompts - int(self.world.sum([float(groups.kept.any(dim=1).sum())])[0])
        batch = self.observe(responses)
        batch.advantages = zero_padding(self.advantages(batch, groups.scores, groups.kept).float(), batch.mask)
        shown.log(**self.shown_columns(batch, groups.kept.flatten().tolist()))
        trained = groups.finished[groups.kept] | (not method.mask_truncated_completions)  # [B]
        self.push_to_store(batch[trained].split())
        if not self.world.sum([len(self.store)])[0]:
            logger.warning("Nothing of this round can be learned from, and it passes without a step.")
        drawn = {"rollout/sampling_attempts": float(attempts)}
        return self.rollout_metrics(groups, trained) | drawn | self.policy_metrics(batch)

    def table(self, rewards: Sequence[Reward], finished: Sequence[bool], lengths: Tensor) -> Groups:
        """Responses to prompts, those to the same prompt one after the other, as groups. lengths: in tokens [N]."""
        method = self.method
        scores = torch.tensor([whole(reward) for reward in rewards], dtype=torch.float64)
        if method.soft_punish_cache is not None:
            scores = scores + overlong_punishment(lengths, method.max_new_tokens, method.soft_punish_cache)
        scored = torch.tensor([reward is not None for reward in rewards], dtype=torch.bool)
        columns = scores, scored, torch.tensor(list(finished), dtype=torch.bool), lengths.long()
        scores, scored, ended, lengths = (column.reshape(-1, method.num_generations) for column in columns)
        kept = scored
        if method.max_sampling_attempts is not None:
            kept = scored & ~group_ties(scores, scored)
        return Groups(scores, scored, kept, ended, lengths)

    def chosen(self, samples: TextSamples, kept: Tensor) -> list[Completion]:
        """The responses that are kept, without padding. kept: [P, G]"""
        return samples.completion.to("cpu")[kept.flatten()].split()

    @torch.no_grad()
    def observe(self, responses: list[Completion]) -> GroupExperience:
        """What policy and reference think of responses; their order stays. Without any, a batch without rows."""
        size = self.config.train.minibatch_size or self.local_batch_size
        lengths = [len(element.prompt) + len(element.response) for element in responses]
        order = sorted(range(len(responses)), key=lengths.__getitem__)  # of like length, to save padding
        seen: dict[int, GroupExperience] = {}
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            part = Completion.collate([responses[row] for row in rows]).to(self.device)
            with self.clock("observe"), self.accelerator.autocast():
                out = self.model(part, reference=self.method.beta > 0)
            known = GroupExperience(**vars(part), **_observed(out.logprobs, out.ref_logprobs))
            seen.update(zip(rows, known.to("cpu").split(), strict=True))
        return GroupExperience.collate([seen[row] for row in range(len(seen))]) if seen else self._nothing()

    def penalty(self, batch: GroupExperience) -> Tensor:
        """The KL penalty in the reward of each token [B, R]."""
        if self.method.kl_in != "reward" or batch.ref_logprobs is None:
            return torch.zeros_like(batch.old_logprobs)
        return self.method.beta * zero_padding(kl_k1(batch.old_logprobs, batch.ref_logprobs), batch.mask)

    def penalized(self, batch: GroupExperience, scores: Tensor, mask: Tensor) -> Tensor:
        """Scores less the KL penalty of the whole response. scores, mask: [P, G]"""
        penalties = torch.zeros_like(scores).masked_scatter(mask, self.penalty(batch).sum(dim=1).to(scores))
        return scores - penalties

    def shown_columns(self, batch: GroupExperience, kept: list[bool]) -> dict[str, Iterable[float | None]]:
        """Of all responses of a round, what it made of those that are kept."""
        columns = {"advantage": sequence_means(batch.advantages, batch.mask)}
        if batch.ref_logprobs is not None:
            columns["kl"] = sequence_sums(kl_k3(batch.old_logprobs, batch.ref_logprobs), batch.mask)
        return {name: spread(values.tolist(), kept) for name, values in columns.items()}

    # The loss.

    def loss(self, batch: GroupExperience) -> LossOutput:
        method, mask = self.method, batch.mask
        out = self.model(batch)
        new, old = out.logprobs, batch.old_logprobs
        if method.importance_sampling_level == "sequence":
            new, old = (sequence_means(x, mask)[:, None].expand_as(x) for x in (new, old))
        high = method.epsilon if method.epsilon_high is None else method.epsilon_high
        policy_loss = clipped_surrogate(new, old, batch.advantages, method.epsilon, high)
        tokens, responses = self.totals["units"], self.totals["responses"]
        longest = method.max_new_tokens
        weights = token_weights(mask, method.loss_type, tokens=tokens, responses=responses, max_length=longest)
        low_clipped, high_clipped = clip_sides(new, old, batch.advantages, method.epsilon, high)
        ratio = probability_ratio(out.logprobs, batch.old_logprobs)
        metrics = {
            "losses/policy_loss": weights * policy_loss,
            "policy/approx_kl": approx_kl(out.logprobs, batch.old_logprobs),
            "policy/clip_fraction_low": low_clipped,
            "policy/clip_fraction_high": high_clipped,
            "policy/ratio": ratio,
            "policy/ratio_deviation": (ratio - 1).abs(),
        }
        loss = policy_loss
        if batch.ref_logprobs is not None and method.kl_in == "loss":
            kl = kl_k3(out.logprobs, batch.ref_logprobs)
            loss = loss + method.beta * kl
            metrics["losses/kl"] = weights * kl
        sums = {name: masked_sum(value.detach(), mask) for name, value in metrics.items()}
        return LossOutput(masked_sum(weights * loss, mask), sums)

    def units(self, batch: GroupExperience) -> float:
        return float(batch.mask.sum())

    def counts(self, batch: GroupExperience) -> dict[str, float]:
        return {"responses": float(len(batch))}

    # Metrics of a round.

    def rollout_metrics(self, groups: Groups, trained: Tensor) -> Metrics:
        """Of all responses that have a score, also of those that are left out. trained: of those kept [B] bool."""
        scored = groups.scored
        compared = scored.any(dim=1, keepdim=True)  # [P, 1]
        given = self.statistics(groups.scores, scored)
        ties = self.statistics(group_ties(groups.scores, scored).double(), compared)
        length = self.statistics(groups.lengths, scored)
        learned, kept_groups = self.world.sum([float(trained.sum()), float(groups.kept.any(dim=1).sum())])
        return {
            "rollout/score_mean": given.mean,
            "rollout/score_std": given.std,
            "rollout/group_std": self.statistics(group_stds(groups.scores, scored), compared).mean,
            "rollout/zero_std_fraction": ties.mean,
            "rollout/groups_skipped": ties.count - kept_groups,
            "rollout/length_mean": length.mean,
            "rollout/length_std": length.std,
            "rollout/finished_fraction": self.statistics(groups.finished.double(), scored).mean,
            "rollout/trained_fraction": learned / given.count,
        }

    def policy_metrics(self, batch: GroupExperience) -> Metrics:
        """Of the responses that are kept."""
        mask = batch.mask
        metrics = {"policy/entropy": self.statistics(-batch.old_logprobs, mask).mean}
        if self.method.beta:
            reference = batch.old_logprobs if batch.ref_logprobs is None else batch.ref_logprobs
            divergence = zero_padding(kl_k3(batch.old_logprobs, reference), mask)
            metrics["policy/kl"] = self.statistics(sequence_sums(divergence, mask), mask.any(dim=1)).mean
            metrics["policy/kl_per_token"] = self.statistics(divergence, mask).mean
        return metrics

    def _nothing(self) -> GroupExperience:
        """A batch of no rows."""
        ids, mask, numbers = (torch.zeros(0, 1, dtype=kind) for kind in (torch.int64, torch.bool, torch.float32))
        return GroupExperience(ids, mask, ids, mask, **_observed(numbers, numbers if self.method.beta else None))


def _observed(logprobs: Tensor, ref_logprobs: Tensor | None) -> dict[str, Any]:
    return {"old_logprobs": logprobs, "advantages": torch.zeros_like(logprobs), "ref_logprobs": ref_logprobs}
