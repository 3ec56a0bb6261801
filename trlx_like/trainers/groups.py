"""Base of GRPO and RLOO: a group of responses to each prompt, and a clipped loss without a value function.

A round samples `num_generations` responses to each prompt, scores them, compares each with the others (`advantages`,
which the algorithm defines), and makes `num_iterations` passes of clipped updates. A group stays on one process.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trlx_like.config.methods.groups import GroupMethodConfig
from trlx_like.data import Completion, Sampled, padded
from trlx_like.functional.group_advantages import (
    group_stds,
    group_ties,
    overlong_punishment,
    prefix_advantages,
    scaled,
    token_weights,
)
from trlx_like.functional.kl import kl_k1, kl_k3
from trlx_like.functional.masked import masked_sum, zero_padding
from trlx_like.functional.policy_gradient import clip_sides, clipped_surrogate, ratio_metrics
from trlx_like.functional.sequences import sequence_means, sequence_sums
from trlx_like.rewards.call import Reward
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.online import OnlineTextTrainer, whole
from trlx_like.trainers.samples import ShownSamples, spread


@dataclass
class GroupExperience(Completion):
    """Hold responses with their advantages, and their log-probabilities at sampling time. All [B, R] float."""

    old_logprobs: Tensor = padded()
    advantages: Tensor = padded()
    ref_logprobs: Tensor | None = padded(default=None)  # None without a reference
    scores: Tensor | None = None  # [B] float32
    sampling_logprobs: Tensor | None = padded(default=None)  # None without `rollout_correction`


@dataclass
class Groups:
    """Hold this process's scores of a round as tables [P, G]: a row per prompt, an entry per response to it."""

    scores: Tensor  # [P, G] float64
    scored: Tensor  # [P, G] bool: False where the reward function abstained
    kept: Tensor  # [P, G] bool: whether it is trained on, as all scored responses to a prompt are, or none
    finished: Tensor  # [P, G] bool

    def extend(self, other: Groups) -> Groups:
        """Return a table with the rows of `other` below these."""
        rows = zip(vars(self).values(), vars(other).values(), strict=True)
        return Groups(*(torch.cat(pair) for pair in rows))


class GroupTrainer(OnlineTextTrainer[GroupExperience]):
    """Base of trainers whose advantages compare the responses to one prompt."""

    experience_class = GroupExperience
    method: GroupMethodConfig

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        if self.method.beta:
            self.add_reference()

    @property
    def passes(self) -> int:
        return self.method.num_iterations

    @property
    def observes(self) -> bool:
        """Whether the log-probabilities of a round are computed before its first step, besides those of sampling.

        With one step a round the loss is computed with the policy that has sampled, so its own log-probabilities are
        the old ones. A reference, a correction, an engine with weights of its own and replay need them apart.
        """
        method = self.method
        one_step = self.passes == 1 and method.num_prompts * method.num_generations <= self.config.train.batch_size
        own = getattr(self.sampler.engine, "lm", None) is self.model.lm
        plain = method.beta == 0 and method.rollout_correction == "none" and not method.replay_best
        return not (one_step and own and plain)

    @property
    def max_at_k(self) -> int:
        """The number of responses of which the best counts at present, see `max_at_k` and `max_at_k_steps`."""
        k, steps = self.method.max_at_k, self.method.max_at_k_steps
        left = 1.0 if steps is None else max(1 - self.run.progress.step / steps, 0)
        return round(1 + (k - 1) * left)

    @abstractmethod
    def advantages(self, batch: GroupExperience, scores: Tensor, mask: Tensor) -> Tensor:
        """Compute the advantage of every token of a round. Every process calls it, even with an empty batch.

        Args:
            batch: The responses that the mask selects, in the order of the tables.
            scores: Score of each response to each prompt. [P, G]
            mask: True for the responses in the batch. [P, G] bool

        Returns:
            The advantages. [B, R]
        """

    # A round.

    def make_experience(self) -> Metrics:
        method = self.method
        groups, responses = self.table([], [], torch.zeros(0)), []
        shown = ShownSamples(self.run, method.num_generations)
        attempts, wanted = 0, method.num_prompts
        while wanted > 0 and attempts < (method.max_sampling_attempts or 1):
            for samples, rewards in self.all_samples(wanted, method.chunk_size, more=attempts > 0):
                shown.add(samples, rewards)
                part = self.table(rewards, samples.finished, samples.completion.mask.sum(dim=1).cpu())
                groups = groups.extend(part)
                logprobs = self.drawn(samples) if self.observes else samples.sampling_logprobs
                made = Sampled(**vars(samples.completion), sampling_logprobs=logprobs)
                responses += made.to("cpu")[part.kept.flatten()].split()
            attempts += 1
            wanted = method.num_prompts - int(self.world.sum([float(groups.kept.any(dim=1).sum())])[0])
        batch = self.record(responses)
        batch.scores = groups.scores[groups.kept].float()
        batch.advantages = zero_padding(self.advantages(batch, groups.scores, groups.kept).float(), batch.mask)
        batch.advantages, correction = self.corrected(batch)
        shown.log(**self.shown_columns(batch, groups.kept.flatten().tolist()))
        trained = groups.kept & (groups.finished | (not method.mask_truncated_completions))  # [P, G]
        self.rollouts.keep(trained.flatten().tolist())
        self.push_to_store(batch[trained[groups.kept]].split())
        drawn = {"rollout/sampling_attempts": float(attempts)}
        if method.max_at_k > 1:
            drawn["rollout/max_at_k"] = float(self.max_at_k)
        return self.group_metrics(groups) | drawn | self.policy_metrics(batch) | correction

    def table(self, rewards: Sequence[Reward], finished: Sequence[bool], lengths: Tensor) -> Groups:
        """Arrange the scores of N responses as a table with a row for each prompt.

        Args:
            rewards: One for each response; responses to the same prompt are consecutive.
            finished: Whether each response ended by itself, not at `max_new_tokens`.
            lengths: Tokens of each response. [N]
        """
        method = self.method
        scores = torch.tensor([whole(reward) or 0.0 for reward in rewards], dtype=torch.float64)
        if method.soft_punish_cache is not None:
            scores = scores + overlong_punishment(lengths, method.max_new_tokens, method.soft_punish_cache)
        scored = torch.tensor([reward is not None for reward in rewards], dtype=torch.bool)
        columns = scores, scored, torch.tensor(list(finished), dtype=torch.bool)
        scores, scored, ended = (column.reshape(-1, method.num_generations) for column in columns)
        kept = scored
        if method.max_sampling_attempts is not None:
            kept = scored & ~group_ties(scores, scored)
        return Groups(scores, scored, kept, ended)

    def record(self, responses: list[Sampled]) -> GroupExperience:
        """Compute log-probabilities of responses under policy and reference; keep the order. The list may be empty."""
        if not responses:
            empty = GroupExperience.filled(0, 1, 1)
            empty.ref_logprobs = empty.old_logprobs if self.method.beta else None
            return empty
        sampled = Sampled.collate(responses)
        zeros = torch.zeros(sampled.mask.shape)
        given = {name: value for name, value in vars(sampled).items() if name != "version"}
        batch = GroupExperience(**given, old_logprobs=zeros, advantages=zeros)
        if not self.observes:
            assert batch.sampling_logprobs is not None
            batch.old_logprobs, batch.sampling_logprobs = zero_padding(batch.sampling_logprobs, batch.mask), None
            return batch
        recorded: dict[int, GroupExperience] = {}
        for rows, part, out in self.score_batch(batch, self.run.microbatch_size, reference=self.method.beta > 0):
            part.old_logprobs, part.ref_logprobs = out.logprobs, out.ref_logprobs
            recorded.update(zip(rows.tolist(), part.to("cpu").split(), strict=True))
        return GroupExperience.collate([recorded[row] for row in range(len(recorded))])

    def penalty(self, batch: GroupExperience) -> Tensor:
        """Return the KL penalty that is subtracted from each token's reward; 0 unless `kl_in` is "reward". [B, R]"""
        if self.method.kl_in != "reward" or batch.ref_logprobs is None:
            return torch.zeros_like(batch.old_logprobs)
        return self.method.beta * zero_padding(kl_k1(batch.old_logprobs, batch.ref_logprobs), batch.mask)

    def scaled(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Divide scores [P, G] by the deviation that `scale_rewards` names, of those whose mask [P, G] is True."""
        kind = self.method.scale_rewards
        if kind == "none":
            return scores
        return scaled(scores, group_stds(scores, mask) if kind == "group" else self.world.statistics(scores, mask).std)

    def penalized(self, batch: GroupExperience, scores: Tensor, mask: Tensor) -> Tensor:
        """Scale scores [P, G], and subtract the KL penalty of the whole response where the mask [P, G] is True."""
        penalties = torch.zeros_like(scores).masked_scatter(mask, self.penalty(batch).sum(dim=1).to(scores))
        return self.scaled(scores, mask) - penalties

    def of_tokens(self, batch: GroupExperience, centered: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Give every token [B, R] its response's advantage [P, G], or with `credit: prefix` one of its own.

        centered: scores within their groups. [P, G]; mask: True for the responses in the batch. [P, G] bool
        """
        if self.method.credit == "response":
            return advantages[mask][:, None].expand_as(batch.old_logprobs)
        groups = mask.nonzero()[:, 0]
        return prefix_advantages(centered[mask], advantages[mask], groups, batch.response, batch.mask)

    def shown_columns(self, batch: GroupExperience, kept: list[bool]) -> dict[str, Iterable[float | None]]:
        """Return mean advantage and KL of each response of a round as table columns; None for responses not kept."""
        columns = {"advantage": sequence_means(batch.advantages, batch.mask)}
        if batch.ref_logprobs is not None:
            columns["kl"] = sequence_sums(kl_k3(batch.old_logprobs, batch.ref_logprobs), batch.mask)
        return {name: spread(values.tolist(), kept) for name, values in columns.items()}

    # The loss.

    def loss(self, batch: GroupExperience) -> LossOutput:
        method, mask = self.method, batch.mask
        out = self.model(batch, entropy=method.ent_coef > 0)
        new, old = out.logprobs, batch.old_logprobs if self.observes else out.logprobs.detach()
        if method.importance_sampling_level == "sequence":
            new, old = (sequence_means(x, mask)[:, None].expand_as(x) for x in (new, old))
        high = method.epsilon if method.epsilon_high is None else method.epsilon_high
        policy_loss = clipped_surrogate(new, old, batch.advantages, method.epsilon, high)
        low_clipped, high_clipped = clip_sides(new, old, batch.advantages, method.epsilon, high)
        watched = {
            **ratio_metrics(out.logprobs, batch.old_logprobs),
            "policy/clip_fraction_low": low_clipped,
            "policy/clip_fraction_high": high_clipped,
        }
        weighted = {"losses/policy_loss": policy_loss}  # weighted like the loss
        loss = policy_loss
        if batch.ref_logprobs is not None and method.kl_in == "loss":
            weighted["losses/kl"] = kl = kl_k3(out.logprobs, batch.ref_logprobs)
            loss = loss + method.beta * kl
        if out.entropy is not None:
            loss = loss - method.ent_coef * out.entropy
        unit = "tokens" if method.loss_type == "dapo" else "responses"
        weights = token_weights(mask, method.loss_type, max_length=method.max_new_tokens)
        metrics = {name: (masked_sum(weights * value.detach(), mask), unit) for name, value in weighted.items()}
        metrics |= {name: (masked_sum(value, mask), "tokens") for name, value in watched.items()}
        return LossOutput({"policy": (masked_sum(weights * loss, mask), unit)}, metrics)

    def units(self, batch: GroupExperience) -> dict[str, float]:
        return {"tokens": float(batch.mask.sum()), "responses": float(len(batch))}

    # Metrics of a round.

    def group_metrics(self, groups: Groups) -> Metrics:
        """Compute metrics of the spread of scores within groups, over all groups with a score, trained on or not."""
        scored, statistics = groups.scored, self.world.statistics
        compared = scored.any(dim=1, keepdim=True)  # [P, 1]
        ties = statistics(group_ties(groups.scores, scored).double(), compared)
        (kept,) = self.world.sum([float(groups.kept.any(dim=1).sum())])
        return {
            "rollout/group_std": statistics(group_stds(groups.scores, scored), compared).mean,
            "rollout/zero_std_fraction": ties.mean,
            "rollout/groups_skipped": ties.count - kept,
        }

    def policy_metrics(self, batch: GroupExperience) -> Metrics:
        """Compute entropy and KL to the reference, over the responses that have an advantage."""
        mask = batch.mask
        metrics = {"policy/entropy": self.world.statistics(-batch.old_logprobs, mask).mean}
        if self.method.beta:
            reference = batch.old_logprobs if batch.ref_logprobs is None else batch.ref_logprobs
            divergence = zero_padding(kl_k3(batch.old_logprobs, reference), mask)
            metrics["policy/kl"] = self.world.statistics(sequence_sums(divergence, mask), mask.any(dim=1)).mean
            metrics["policy/kl_per_token"] = self.world.statistics(divergence, mask).mean
        return metrics
