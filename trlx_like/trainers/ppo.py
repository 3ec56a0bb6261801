"""Proximal Policy Optimization for language models (Schulman et al. 2017, arXiv:1707.06347; Ziegler et al. 2019,
arXiv:1909.08593).

A round: sample responses, score them, subtract a KL penalty to the reference from the reward of each token, estimate
advantages, then make `ppo_epochs` passes of clipped updates. Documented in docs/algorithms/ppo.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trlx_like.checkpoint import fields
from trlx_like.config.methods.ppo import PPOConfig
from trlx_like.data import Completion, padded
from trlx_like.errors import DataError
from trlx_like.functional.kl import adaptive_kl_coef, kl_k3, kl_penalty
from trlx_like.functional.masked import masked_sum, whiten
from trlx_like.functional.moments import RunningMoments
from trlx_like.functional.policy_gradient import (
    approx_kl,
    clip_fraction,
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    probability_ratio,
)
from trlx_like.functional.returns import gae
from trlx_like.models import PolicyOutput, ValueHead
from trlx_like.samplers.generation import generation_config
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.online import OnlineTextTrainer, Statistics, dense
from trlx_like.trainers.samples import ShownSamples
from trlx_like.trainers.text import Query


@dataclass
class PPOExperience(Completion):
    """Responses with what the policy thought when it sampled them, and what came of it. All [B, R] float."""

    old_logprobs: Tensor = padded()
    old_values: Tensor = padded()  # of the state before each token
    ref_logprobs: Tensor = padded()
    kl: Tensor = padded()  # what the penalty estimates for each token
    scores: Tensor = padded()  # from the reward function
    advantages: Tensor = padded()
    returns: Tensor = padded()


_OBSERVED = ("old_logprobs", "old_values", "ref_logprobs", "kl", "advantages", "returns")


class PPOTrainer(OnlineTextTrainer[PPOExperience]):
    """PPO with a value head on the policy and a KL penalty to the policy's own start."""

    method_class = PPOConfig
    experience_class = PPOExperience
    method: PPOConfig

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        self.add_reference()
        self.kl_coef = self.method.init_kl_coef
        self.moments = RunningMoments()
        self.ref_mean, self.ref_std = self.method.ref_mean, self.method.ref_std
        self.state.register("ppo", fields(self, "kl_coef", "ref_mean", "ref_std"))
        self.state.register("moments", self.moments)

    def heads(self, hidden_size: int, vocabulary: int) -> dict[str, nn.Module]:
        return {"value": ValueHead(hidden_size)}

    def head_blocks(self) -> dict[str, int]:
        return {"value": self.method.num_value_layers_unfrozen}

    @property
    def passes(self) -> int:
        return self.method.ppo_epochs

    def make_experience(self) -> Metrics:
        elements: list[PPOExperience] = []
        finished: list[bool] = []
        shown = ShownSamples(self)
        for samples, rewards in self.scored_samples(self.method.num_rollouts, self.method.chunk_size):
            shown.add(samples, rewards)
            scores = dense(rewards, samples.completion.mask)
            elements += self.observe(samples.completion, scores, samples.finished)
            finished += samples.finished
        ended, count = self.world.sum([sum(finished), len(finished)])
        metrics = self.add_experience(elements)
        first = self.store.elements[: len(shown.rows)]
        divergence = [float(kl_k3(element.old_logprobs, element.ref_logprobs).sum()) for element in first]
        shown.log(advantage=[float(element.advantages.mean()) for element in first], kl=divergence)
        return metrics | {"rollout/finished_fraction": ended / count}

    @torch.no_grad()
    def observe(self, completion: Completion, scores: Tensor, finished: Sequence[bool]) -> list[PPOExperience]:
        """What policy, value head and reference think of responses. scores: rewards of the tokens [B, R]."""
        last = completion.mask.sum(dim=1, keepdim=True) - 1  # [B, 1]
        if self.method.missing_eos_penalty is not None:
            missing = torch.tensor([not ended for ended in finished], device=scores.device)[:, None]
            scores = scores.scatter_add(1, last, -self.method.missing_eos_penalty * missing.to(scores))
        if self.method.cliprange_reward is not None:
            scores = scores.clamp(-self.method.cliprange_reward, self.method.cliprange_reward)
        unknown = dict.fromkeys(_OBSERVED, torch.zeros_like(scores))
        elements: list[PPOExperience] = []
        for part in self.microbatches(PPOExperience(**vars(completion), **unknown, scores=scores)):
            with self.clock("observe"), self.accelerator.autocast():
                out = self.model(part, reference=True, full_kl=self.method.kl_penalty == "full")
            part.old_logprobs, part.ref_logprobs = out.logprobs, out.ref_logprobs
            part.old_values, part.kl = out.heads["value"][:, :-1], self._penalty(out)
            elements += part.to("cpu").split()
        return elements

    def add_experience(self, elements: list[PPOExperience]) -> Metrics:
        """Rewards, advantages and returns of a round over all processes; fills the store."""
        method = self.method
        # A process without any still takes part in the statistics, with one row that is all padding.
        batch = PPOExperience.collate(elements) if elements else _padding()
        mask = batch.mask
        rows = mask.any(dim=1)
        given = self.statistics(batch.scores.sum(dim=1), rows)
        rewards = self._scaled(batch.scores, mask, given)
        if method.kl_in == "reward":
            rewards = rewards - self.kl_coef * batch.kl
        if method.whiten_rewards:
            rewards = self._whitened(rewards, mask, center=False)
        batch.advantages, batch.returns = gae(rewards, batch.old_values, mask, method.gamma, method.lam)
        if method.whiten_advantages:
            batch.advantages = self._whitened(batch.advantages, mask)
        self.push_to_store(batch.split() if elements else [])
        metrics = self._experience_metrics(batch, rewards)
        if method.target is not None:
            kl, responses = metrics["policy/kl"], int(given.count)
            self.kl_coef = adaptive_kl_coef(self.kl_coef, kl, method.target, responses, method.horizon)
        return metrics | {"rollout/score_mean": given.mean, "rollout/score_std": given.std}

    def loss(self, batch: PPOExperience) -> LossOutput:
        method, mask = self.method, batch.mask
        in_loss = method.kl_in == "loss" and self.kl_coef > 0
        out = self.model(batch, entropy=method.ent_coef > 0, full_kl=in_loss and method.kl_penalty == "full")
        out.ref_logprobs = batch.ref_logprobs
        values = out.heads["value"][:, :-1]
        policy_loss = clipped_surrogate(out.logprobs, batch.old_logprobs, batch.advantages, method.cliprange)
        value_loss = clipped_value_loss(values, batch.old_values, batch.returns, method.cliprange_value)
        loss = policy_loss + method.vf_coef * value_loss
        if out.entropy is not None:
            loss = loss - method.ent_coef * out.entropy
        if in_loss:
            loss = loss + self.kl_coef * self._penalty(out)
        ratio = probability_ratio(out.logprobs, batch.old_logprobs)
        metrics = {
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "policy/approx_kl": approx_kl(out.logprobs, batch.old_logprobs),
            "policy/clip_fraction": clip_fraction(out.logprobs, batch.old_logprobs, method.cliprange),
            "policy/ratio": ratio,
            "policy/ratio_deviation": (ratio - 1).abs(),
            "values/mean": values,
            "values/error": (values - batch.returns).square(),
            "returns/mean": batch.returns,
        }
        if method.cliprange_value is not None:
            moved = (values - batch.old_values).abs() > method.cliprange_value
            metrics["values/clip_fraction"] = moved.float()
        return LossOutput(masked_sum(loss, mask), {name: masked_sum(v.detach(), mask) for name, v in metrics.items()})

    def units(self, batch: PPOExperience) -> float:
        return float(batch.mask.sum())

    def accept(self, metrics: Metrics) -> bool:
        """False for a batch that has left the trust region; beyond `target_kl` the round ends as well."""
        super().accept(metrics)
        method = self.method
        too_far = method.target_kl is not None and metrics["policy/approx_kl"] > method.target_kl
        too_steep = method.ratio_threshold is not None and metrics["policy/ratio"] > method.ratio_threshold
        if too_far:
            self.end_round()
        metrics["policy/skipped"] = float(too_far or too_steep)
        return not (too_far or too_steep)

    def step(self, queries: Sequence[Query], responses: Sequence[Tensor], scores: Sequence[float]) -> Metrics:
        """One round on responses made and scored by hand: `ppo_epochs` passes; returns their mean metrics.

        queries: prompts as text or ids [P]. responses: ids [R] as `generate` returns them, sampled by the present
        policy. scores: one a response. With several processes each gives its own share.
        """
        if not len(queries) == len(responses) == len(scores):
            raise DataError(
                f"step: {len(queries)} queries, {len(responses)} responses and {len(scores)} scores must be as many."
            )
        self.store.clear()
        self.model.eval()
        metrics = self.add_experience(self._observe_given(queries, responses, scores) if len(queries) else [])
        self.begin_round()
        steps: list[Metrics] = []
        for batch in self.round_batches():
            steps.append(self.optimize(batch))
            self.progress.position += 1
            self.after_step(steps[-1])
            if not self.progress.in_round:
                break
        self.end_round()
        return metrics | {name: sum(s[name] for s in steps) / len(steps) for name in steps[0]}

    def _observe_given(
        self, queries: Sequence[Query], responses: Sequence[Tensor], scores: Sequence[float]
    ) -> list[PPOExperience]:
        rows: list[Completion] = []
        for query, response in zip(queries, responses, strict=True):
            if not len(response):
                raise DataError(f"step: responses[{len(rows)}] is empty.")
            prompt, ids = torch.tensor(self.query_ids(query)), response.cpu()
            rows.append(Completion(prompt, torch.ones_like(prompt).bool(), ids, torch.ones_like(ids).bool()))
        completion = Completion.collate(rows).to(self.device)
        reasons = self.sampler.finish_reasons(completion, generation_config(self.experience_kwargs, self.tokenizer))
        finished = [reason != "length" for reason in reasons]
        return self.observe(completion, dense([float(score) for score in scores], completion.mask), finished)

    def _penalty(self, out: PolicyOutput) -> Tensor:
        """KL to the reference of each token [B, R], as `method.kl_penalty` estimates it."""
        if out.full_kl is not None:
            return out.full_kl
        assert out.ref_logprobs is not None
        kind = self.method.kl_penalty
        assert kind != "full"
        # In a loss log-ratios do nothing: their gradient is zero on average. Half their square has the gradient of
        # KL(policy || reference); that of k3 would be the gradient of KL(reference || policy).
        in_loss = kind == "kl" and self.method.kl_in == "loss"
        return kl_penalty(out.logprobs, out.ref_logprobs, "mse" if in_loss else kind)

    def _whitened(self, values: Tensor, mask: Tensor, center: bool = True) -> Tensor:
        spread = self.statistics(values, mask)
        return whiten(values, mask, values.new_tensor(spread.mean), values.new_tensor(spread.var), center)

    def _scaled(self, scores: Tensor, mask: Tensor, given: Statistics) -> Tensor:
        """Scores divided by the spread of a sample's whole score, and shifted by its mean if `norm_reward`."""
        kind = self.method.scale_reward
        if kind is None:
            return scores
        if kind == "running":
            self.moments.update(given.count, given.mean, given.m2)
            mean, std = self.moments.mean, self.moments.std
        else:
            self.ref_mean = given.mean if self.ref_mean is None else self.ref_mean
            self.ref_std = given.std if self.ref_std is None else self.ref_std
            mean, std = self.ref_mean, self.ref_std or 1.0
        if self.method.norm_reward:
            last = mask.sum(dim=1, keepdim=True).clamp(min=1) - 1
            scores = scores.scatter_add(1, last, torch.full_like(last, -mean, dtype=scores.dtype))
        return scores / std

    def _experience_metrics(self, batch: PPOExperience, rewards: Tensor) -> Metrics:
        mask, rows = batch.mask, batch.mask.any(dim=1)
        divergence = torch.where(mask, kl_k3(batch.old_logprobs, batch.ref_logprobs), 0)
        per_response = self.statistics(divergence.sum(dim=1), rows).mean
        length = self.statistics(mask.sum(dim=1), rows)
        prompt_length = self.statistics(batch.prompt_mask.sum(dim=1), rows)
        values, returns = self.of_all(batch.old_values[mask]), self.of_all(batch.returns[mask])
        return {
            "rollout/length_mean": length.mean,
            "rollout/length_std": length.std,
            "rollout/prompt_length_mean": prompt_length.mean,
            "rollout/return_mean": self.statistics(rewards.sum(dim=1), rows).mean,
            "policy/kl": per_response,
            "policy/kl_per_token": self.statistics(divergence, mask).mean,
            "policy/sqrt_kl": per_response**0.5,
            "policy/entropy": self.statistics(-batch.old_logprobs, mask).mean,
            "values/explained_variance": float(explained_variance(values, returns, torch.ones_like(values).bool())),
            "values/std": self.statistics(batch.old_values, mask).std,
            "returns/std": self.statistics(batch.returns, mask).std,
            "policy/kl_coef": self.kl_coef,
        }


def _padding() -> PPOExperience:
    """A batch of one row without a real token."""
    ids, mask, zeros = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, 1)
    return PPOExperience(ids, mask, ids, mask, **dict.fromkeys(_OBSERVED, zeros), scores=zeros)
