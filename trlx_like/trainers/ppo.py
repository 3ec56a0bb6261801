"""Proximal Policy Optimization for language models (Schulman et al. 2017, arXiv:1707.06347; Ziegler et al. 2019,
arXiv:1909.08593).

A round samples responses, scores them, subtracts a KL penalty to the reference from the reward of each token, and
estimates advantages. Then it makes `ppo_epochs` passes of clipped updates. Documented in docs/algorithms/ppo.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trlx_like.checkpoint import fields
from trlx_like.config.methods.ppo import PPOConfig
from trlx_like.data import Completion, padded
from trlx_like.errors import ConfigError, DataError
from trlx_like.functional.kl import adaptive_kl_coef, full_kl, kl_k3, kl_penalty
from trlx_like.functional.masked import masked_sum
from trlx_like.functional.policy_gradient import (
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    ratio_metrics,
)
from trlx_like.functional.returns import gae
from trlx_like.functional.reward_scaling import RewardScaling
from trlx_like.models.heads import ValueHead
from trlx_like.models.policy import PolicyOutput
from trlx_like.rewards.call import Reward
from trlx_like.samplers.generation import generation_config
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.by_hand import Query, own_tokens
from trlx_like.trainers.online import OnlineTextTrainer, dense
from trlx_like.trainers.rollouts import last_tokens
from trlx_like.trainers.rounds import RoundsByHand
from trlx_like.trainers.samples import ShownSamples


@dataclass
class PPOExperience(Completion):
    """Hold responses with the policy's, value head's and reference's numbers at sampling time. All [B, R] float."""

    old_logprobs: Tensor = padded()
    old_values: Tensor = padded()  # of the state before each token
    ref_logprobs: Tensor = padded()
    kl: Tensor = padded()  # estimate of the KL to the reference, as `kl_penalty` says
    scores: Tensor = padded()  # from the reward function, after `missing_eos_penalty` and `cliprange_reward`
    advantages: Tensor = padded()
    returns: Tensor = padded()
    sampling_logprobs: Tensor | None = padded(default=None)  # None without `rollout_correction`
    own: Tensor | None = padded(value=False, default=None)  # [B, R] bool: the policy's tokens, not those of a tool

    @property
    def scored(self) -> Tensor:
        """Mask of the response tokens that the policy has sampled. [B, R] bool"""
        return self.mask if self.own is None else self.own


_COMPUTED = ("old_logprobs", "old_values", "ref_logprobs", "kl", "advantages", "returns")


class PPOTrainer(RoundsByHand[PPOExperience], OnlineTextTrainer[PPOExperience]):
    """Train with PPO: a value head on the policy, and a KL penalty to the reference."""

    method_class = PPOConfig
    experience_class = PPOExperience
    method: PPOConfig

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        self.by_hand.temperature = self.temperature
        self.add_reference()
        method = self.method
        self.kl_coef = method.init_kl_coef
        self.scaling = RewardScaling(
            method.scale_reward, center=method.norm_reward, ref_mean=method.ref_mean, ref_std=method.ref_std
        )
        self.state.register("ppo", fields(self, "kl_coef"))
        self.state.register("reward_scaling", self.scaling)

    def heads(self, hidden_size: int, vocabulary: int) -> dict[str, nn.Module]:
        return {"value": ValueHead(hidden_size)}

    def head_blocks(self) -> dict[str, int]:
        return {"value": self.method.num_value_layers_unfrozen}

    observes = True

    @property
    def passes(self) -> int:
        return self.method.ppo_epochs

    # A round.

    def make_experience(self) -> Metrics:
        return self._experience_of(self.scored_samples(self.method.num_rollouts, self.method.chunk_size))

    def _experience_of(self, chunks: Iterable[tuple[TextSamples, list[Reward]]], own: Tensor | None = None) -> Metrics:
        """Fill the store with samples and their rewards. own: as in `PPOExperience`, of a single chunk."""
        elements: list[PPOExperience] = []
        shown = ShownSamples(self.run)
        for samples, rewards in chunks:
            shown.add(samples, rewards)
            mask = samples.completion.mask if own is None else own
            scores, drawn = dense(rewards, mask), self.drawn(samples)
            elements += self.record(samples.completion, scores, samples.finished, drawn, own)
        metrics = self.add_experience(elements)
        stored = self.store.elements[: len(shown.rows)]
        divergence = [float(kl_k3(element.old_logprobs, element.ref_logprobs).sum()) for element in stored]
        shown.log(advantage=[float(element.advantages.mean()) for element in stored], kl=divergence)
        return metrics

    def record(
        self,
        completion: Completion,
        scores: Tensor,
        finished: Sequence[bool],
        drawn: Tensor | None = None,
        own: Tensor | None = None,
    ) -> list[PPOExperience]:
        """Compute log-probabilities, values and reference log-probabilities of responses.

        Args:
            completion: The responses.
            scores: Reward of each token. [B, R]
            finished: Whether each response ended by itself, not at `max_new_tokens`.
            drawn: Log-probabilities that the engine sampled with, for `rollout_correction`. [B, R]
            own: True on the tokens that the policy has sampled; None: on all of the responses. [B, R] bool

        Returns:
            The elements, in the order of the rows and on the CPU, without advantages yet.
        """
        if self.method.missing_eos_penalty is not None:
            last = last_tokens(completion.mask if own is None else own)[:, None]
            missing = torch.tensor([not ended for ended in finished], device=scores.device)[:, None]
            scores = scores.scatter_add(1, last, -self.method.missing_eos_penalty * missing.to(scores))
        if self.method.cliprange_reward is not None:
            scores = scores.clamp(-self.method.cliprange_reward, self.method.cliprange_reward)
        unknown = dict.fromkeys(_COMPUTED, torch.zeros_like(scores))
        batch = PPOExperience(**vars(completion), **unknown, scores=scores, sampling_logprobs=drawn, own=own)
        recorded: dict[int, PPOExperience] = {}
        divergence = full_kl if self.method.kl_penalty == "full" else None
        for rows, part, out in self.score_batch(batch, self.run.microbatch_size, reference=True, divergence=divergence):
            assert out.ref_logprobs is not None
            part.old_logprobs, part.ref_logprobs = out.logprobs, out.ref_logprobs
            part.old_values, part.kl = out.heads["value"][:, :-1], self._penalty(out)
            recorded.update(zip(rows.tolist(), part.to("cpu").split(), strict=True))
        return [recorded[row] for row in range(len(recorded))]

    def add_experience(self, elements: list[PPOExperience]) -> Metrics:
        """Compute rewards, advantages and returns of a round, and fill the store. Every process calls it.

        Args:
            elements: This process's responses of the round, as `record` returns them.

        Returns:
            The metrics of the round, over all processes.
        """
        method, world = self.method, self.world
        # A process without any still takes part in the statistics.
        batch = PPOExperience.collate(elements) if elements else PPOExperience.filled(0, 1, 1)
        mask = batch.scored
        given = world.statistics(batch.scores.sum(dim=1), mask.any(dim=1))
        moments = {"count": given.count, "mean": given.mean, "m2": given.m2, "std": given.std}
        rewards = self.scaling(batch.scores, mask, **moments)
        if method.kl_in == "reward":
            rewards = rewards - self.kl_coef * batch.kl
        if method.whiten_rewards:
            rewards = self.whitened(rewards, mask, center=False)
        batch.advantages, batch.returns = gae(rewards, batch.old_values, mask, method.gamma, method.lam)
        if method.whiten_advantages:
            batch.advantages = self.whitened(batch.advantages, mask)
        batch.advantages, correction = self.corrected(batch)
        self.push_to_store(batch.split())
        metrics = {**self._experience_metrics(batch, rewards), **correction}
        if method.target is not None:
            kl, responses = metrics["policy/kl"], int(given.count)
            self.kl_coef = adaptive_kl_coef(self.kl_coef, kl, method.target, responses, method.horizon)
        return metrics

    def loss(self, batch: PPOExperience) -> LossOutput:
        method, mask = self.method, batch.scored
        in_loss = method.kl_in == "loss" and self.kl_coef > 0
        divergence = full_kl if in_loss and method.kl_penalty == "full" else None
        out = self.model(batch, entropy=method.ent_coef > 0, divergence=divergence)
        out.ref_logprobs = batch.ref_logprobs
        values = out.heads["value"][:, :-1]
        policy_loss = clipped_surrogate(out.logprobs, batch.old_logprobs, batch.advantages, method.cliprange)
        value_loss = clipped_value_loss(values, batch.old_values, batch.returns, method.cliprange_value)
        loss = policy_loss + method.vf_coef * value_loss
        if out.entropy is not None:
            loss = loss - method.ent_coef * out.entropy
        if in_loss:
            loss = loss + self.kl_coef * self._penalty(out)
        metrics = {
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            **ratio_metrics(out.logprobs, batch.old_logprobs, method.cliprange),
            "values/mean": values,
            "values/error": (values - batch.returns).square(),
            "returns/mean": batch.returns,
        }
        if method.cliprange_value is not None:
            moved = (values - batch.old_values).abs() > method.cliprange_value
            metrics["values/clip_fraction"] = moved.float()
        return LossOutput(masked_sum(loss, mask), {name: masked_sum(v.detach(), mask) for name, v in metrics.items()})

    def units(self, batch: PPOExperience) -> float:
        return float(batch.scored.sum())

    def accept(self, metrics: Metrics) -> bool:
        """Drop a step whose batch has left the trust region; above `target_kl`, end the round as well."""
        super().accept(metrics)
        method = self.method
        too_far = method.target_kl is not None and metrics["policy/approx_kl"] > method.target_kl
        too_steep = method.ratio_threshold is not None and metrics["policy/ratio"] > method.ratio_threshold
        if too_far:
            self.end_round()
        metrics["policy/skipped"] = float(too_far or too_steep)
        return not (too_far or too_steep)

    def step(
        self,
        queries: Sequence[Query],
        responses: Sequence[Tensor],
        scores: Sequence[float],
        response_masks: Sequence[Tensor] | None = None,
    ) -> Metrics:
        """Train for one round (`ppo_epochs` passes) on responses that the caller sampled and scored.

        Every process calls it with its own share of the samples. The run folder gets what `learn` writes.

        Args:
            queries: Prompts as text, chat messages, or token ids [P].
            responses: Token ids [R] as `generate` returns them, sampled from the current policy.
            scores: The score of each response.
            response_masks: For each response [R], 1 at the tokens that the policy has sampled, 0 at those of others,
                such as the answer of a tool, which are read but not trained on. None: the policy has sampled all.

        Returns:
            The metrics of the round, and the metrics of its steps averaged over the steps.

        Raises:
            DataError: If the numbers of queries, responses and scores differ, a response is empty, a score is not
                finite, or a mask does not fit.
            ConfigError: If training is complete: `train.total_steps` or `train.epochs` (rounds) is reached. Or
                `method.replay_best` is set, which needs to know the row of the data that a query is.
        """
        if self.replay is not None:
            raise ConfigError("method.replay_best: step cannot tell which row of the data a query is; set it to false.")
        if not len(queries) == len(responses) == len(scores):
            raise DataError(
                f"step: {len(queries)} queries, {len(responses)} responses and {len(scores)} scores must be as many."
            )
        rewards = [float(score) for score in scores]
        if (at := next((at for at, reward in enumerate(rewards) if not math.isfinite(reward)), None)) is not None:
            raise DataError(f"step: scores[{at}] is {rewards[at]}; a score must be finite.")
        return self.round_of(lambda: self._given(queries, responses, [*rewards], response_masks))

    def _given(
        self,
        queries: Sequence[Query],
        responses: Sequence[Tensor],
        rewards: list[Reward],
        masks: Sequence[Tensor] | None,
    ) -> Metrics:
        """Convert responses that the caller sampled to experience, and count them in the round's statistics."""
        if not rewards:
            return self.add_experience([])
        completion = self.by_hand.completions(queries, responses, cut=bool(self.cuts)).to(self.device)
        own = None if masks is None else own_tokens(masks, completion.mask)
        reasons = self.sampler.finish_reasons(completion, generation_config(self.experience_kwargs, self.tokenizer))
        samples = TextSamples(completion, *self.sampler.decode(completion), reasons, [{} for _ in rewards])
        self.rollouts.add_text(samples, rewards)
        return self._experience_of([(samples, rewards)], own)

    def _penalty(self, out: PolicyOutput) -> Tensor:
        """Estimate the KL to the reference at each token with the estimator `method.kl_penalty`. [B, R]"""
        if out.divergence is not None:
            return out.divergence
        assert out.ref_logprobs is not None
        kind = self.method.kl_penalty
        assert kind != "full"
        # As a loss, a log-ratio does nothing: its gradient is zero on average. Half its square has the gradient of
        # KL(policy || reference); that of k3 would be the gradient of KL(reference || policy).
        in_loss = kind == "kl" and self.method.kl_in == "loss"
        return kl_penalty(out.logprobs, out.ref_logprobs, "mse" if in_loss else kind)

    def _experience_metrics(self, batch: PPOExperience, rewards: Tensor) -> Metrics:
        """Compute the metrics of the responses that are trained on, over all processes."""
        mask, rows, statistics = batch.scored, batch.mask.any(dim=1), self.world.statistics
        divergence = torch.where(mask, kl_k3(batch.old_logprobs, batch.ref_logprobs), 0)
        per_response = statistics(divergence.sum(dim=1), rows).mean
        values, returns = (torch.cat(self.world.gather([x[mask]])) for x in (batch.old_values, batch.returns))
        return {
            "rollout/return_mean": statistics(rewards.sum(dim=1), rows).mean,
            "policy/kl": per_response,
            "policy/kl_per_token": statistics(divergence, mask).mean,
            "policy/sqrt_kl": per_response**0.5,
            "policy/entropy": statistics(-batch.old_logprobs, mask).mean,
            "values/explained_variance": float(explained_variance(values, returns, torch.ones_like(values).bool())),
            "values/std": statistics(batch.old_values, mask).std,
            "returns/std": statistics(batch.returns, mask).std,
            "policy/kl_coef": self.kl_coef,
        }
