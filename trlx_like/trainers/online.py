"""Base of the trainers that learn from text sampled by their own policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor

from trlx_like.config.generation import forbidding
from trlx_like.errors import ConfigError, DataError
from trlx_like.functional.masked import whiten
from trlx_like.functional.policy_gradient import rollout_ratio
from trlx_like.pipelines.prompts import PromptBatch
from trlx_like.rewards.outcome import Reward, whole
from trlx_like.samplers.agreement import sampled_together
from trlx_like.samplers.engines import ENGINES
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.context import ROLLOUTS, Metrics
from trlx_like.trainers.ledger import Use
from trlx_like.trainers.replay import Replay
from trlx_like.trainers.rollouts import dense
from trlx_like.trainers.text import E, TextTrainer

__all__ = ["OnlineTextTrainer", "dense", "whole"]


class OnlineTextTrainer(TextTrainer[E]):
    """Make experience by sampling from the policy and scoring with a reward function."""

    uses = frozenset({"prompts", "eval_prompts"})
    needs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")

    replay: Replay | None = None
    """The best responses so far, with `method.replay_best`."""

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        if getattr(self.method, "replay_best", False):
            self.replay = Replay(self.world, self.rollouts, self.method.group_size, self.sampler.decode)
            self.rollouts.replays = True
            self.state.register("best_responses", self.replay.best)

    def read_inputs(self, tokenizer: Any = None) -> None:
        engine = self.config.sampler.engine
        if self.cuts and not getattr(ENGINES.get(engine), "tells_choices", False):
            name = "gen_kwargs" if self.method.gen_experience_kwargs is None else "gen_experience_kwargs"
            raise ConfigError(
                f"method.{name}.{self.cuts[0]}: sampler.engine ({engine}) does not tell which tokens could be drawn, "
                "so the loss cannot account for it. Use sampler.engine transformers or copy, or set it for evaluation "
                "only (method.gen_kwargs) and leave it out of method.gen_experience_kwargs."
            )
        super().read_inputs(tokenizer)

    def take_prompts(self, count: int) -> PromptBatch:
        """Return this process's share of the next `count` prompts, each as often as it has responses in a group."""
        return super().take_prompts(count).repeated(self.method.group_size)

    @property
    def cuts(self) -> list[str]:
        """Options of rollouts that forbid tokens, if the loss has to know which tokens could be drawn."""
        return forbidding(self.experience_kwargs) if self.method.exact_sampling else []

    @property
    def sampling_temperature(self) -> float:
        """Temperature at which response tokens are sampled."""
        return float(self.experience_kwargs.get("temperature", 1.0))

    @property
    def temperature(self) -> float:
        return self.sampling_temperature

    @property
    def scorer(self) -> Callable[..., Any] | None:
        """Function that scores the rollouts; evaluation always uses `reward_fn`."""
        return self.reward_fn

    def longest(self, rows: int) -> E:
        """Make a micro-batch of prompts and responses that fill `train.seq_length`."""
        prompt = self.max_prompt_length
        return self.experience_class.filled(rows, prompt, self.config.train.seq_length - prompt)

    def scored_samples(
        self, count: int, chunk_size: int, given: Sequence[Use] | None = None
    ) -> Iterator[tuple[TextSamples, list[Reward]]]:
        """Yield the chunks of `all_samples`, without the samples whose reward is None."""
        for samples, rewards in self.all_samples(count, chunk_size, given):
            if kept := [row for row, reward in enumerate(rewards) if reward is not None]:
                yield samples[kept], [rewards[row] for row in kept]

    def all_samples(
        self, count: int, chunk_size: int, given: Sequence[Use] | None = None, *, more: bool = False
    ) -> Iterator[tuple[TextSamples, list[Reward]]]:
        """Sample responses to prompts and score them, chunk by chunk.

        Args:
            count: Number of prompts, over all processes.
            chunk_size: Prompts per chunk and process.
            given: Epochs and numbers of the prompts, the same on all processes; None takes the next prompts of the
                training data.
            more: Add samples to the current round instead of beginning a round.

        Yields:
            For each chunk, the samples of this process and their rewards.

        Raises:
            RewardError: If no sample of the round has a reward.
            SamplerError: If the engine does not sample from the policy that is trained.
        """
        if not more:
            self.rollouts.begin()
            if self.replay is not None:
                self.replay.found.clear()  # of a round that failed
            self.sync_sampler()

        def sample(begin: int, size: int) -> TextSamples | None:
            rows = None if given is None else given[begin : begin + size]
            samples = sampled_together(self.world, lambda: self._sampled(size, rows))
            if begin == 0 and not more:
                with self.clock("canary"):
                    self.agreement.check_round(
                        self.sampler.engine,
                        self.model,
                        samples,
                        temperature=self.sampling_temperature,
                        round_=self.progress.round + 1,
                        version=self.progress.step,
                    )
            return samples

        def scored() -> Iterator[tuple[TextSamples, list[Reward]]]:
            for samples, scores in self.rollouts.chunks(self.scorer, count, chunk_size, sample, TextSamples.rows):
                samples.components = scores.components
                self.rollouts.add_text(samples, scores.rewards)
                yield samples, scores.rewards

        assert self.scorer is not None or "reward_fn" not in self.needs
        yield from scored() if self.replay is None else self.replay.replayed(scored())
        self.rollouts.check(may_be_empty=more)
        if self.replay is not None:
            self.replay.remember()

    def scores_of_others(self, chunks: Sequence[TextSamples], **options: Any) -> list[list[Reward]]:
        """Sample another response to the prompt of each given response, and score it, such as for a baseline.

        Every process calls it once in a round, also without samples. The weights are those that the round began with.

        Args:
            chunks: This process's samples, as `scored_samples` yields them.
            options: Generation options that override those of rollouts, such as `do_sample=False`.

        Returns:
            For each chunk, the reward of the other response to each of its prompts.

        Raises:
            RewardError: On every process, if scoring failed on one.
        """
        stream = self.run.stream(ROLLOUTS, self.progress.round, 1)  # not the one of the first responses

        def others(samples: TextSamples) -> TextSamples:
            completion = samples.completion
            ids = [row[mask].tolist() for row, mask in zip(completion.prompt, completion.prompt_mask, strict=True)]
            prompts = PromptBatch(ids, samples.metadata, numbers=samples.numbers)
            return self.sampler.sample(prompts, {**self.experience_kwargs, **options}, stream)

        with self.clock("generate"):
            sampled = sampled_together(self.world, lambda: [others(samples) for samples in chunks])
        assert self.scorer is not None
        with self.clock("reward"):
            scores = self.scoring.score(self.scorer, [row for samples in sampled for row in samples.rows()])
        rewards = iter(scores.rewards)
        return [[next(rewards) for _ in range(len(samples))] for samples in sampled]

    def push_to_store(self, experience: Sequence[E], *, whole: bool = False) -> None:
        if self.cuts and any(getattr(element, "choices", None) is None for element in experience):
            raise DataError(
                f"method.gen_kwargs.{self.cuts[0]}: the experience does not hold which tokens could be drawn. Make it "
                f"from all fields of a completion, as {self.experience_class.__name__}(**vars(completion), ...) does."
            )
        super().push_to_store(experience, whole=whole)

    def drawn(self, samples: TextSamples) -> Tensor | None:
        """Return the log-probabilities [B, R] to correct the loss with; None without `rollout_correction`.

        Raises:
            ConfigError: If the engine does not report them.
        """
        if self.method.rollout_correction == "none":
            return None
        if samples.sampling_logprobs is None:
            raise ConfigError(
                f"method.rollout_correction ({self.method.rollout_correction!r}) needs the log-probabilities of the "
                f"sampled tokens. sampler.engine ({self.config.sampler.engine}) does not report them, or the responses "
                "were given by the caller."
            )
        return samples.sampling_logprobs

    def corrected(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Weight the advantages of a round by truncated importance sampling, as `rollout_correction` says.

        Every process calls it, even with an empty batch. The clipped loss is proportional to the advantage, so weighted
        advantages are a weighted loss.

        Args:
            batch: Experience with advantages, old_logprobs and sampling_logprobs.

        Returns:
            The advantages [B, R], and the metrics of the ratio.
        """
        level, cap = self.method.rollout_correction, self.method.rollout_correction_cap
        if level == "none":
            return batch.advantages, {}
        sampled = batch.old_logprobs if batch.sampling_logprobs is None else batch.sampling_logprobs
        ratio = rollout_ratio(batch.old_logprobs, sampled, batch.mask, level)
        metrics = {
            "policy/rollout_ratio": self.world.statistics(ratio, batch.mask).mean,
            "policy/rollout_ratio_capped": self.world.statistics((ratio > cap).to(ratio), batch.mask).mean,
        }
        return batch.advantages * ratio.clamp(max=cap), metrics

    def whitened(self, values: Tensor, mask: Tensor, center: bool = True) -> Tensor:
        """Whiten values [B, R] over the masked tokens of all processes; without `center` their mean stays."""
        spread = self.world.statistics(values, mask)
        return whiten(values, mask, values.new_tensor(spread.mean), values.new_tensor(spread.var), center)

    def _sampled(self, size: int, given: Sequence[Use] | None) -> TextSamples | None:
        """Sample responses to this process's share of `size` prompts; None if the share is empty."""
        if given is None:
            prompts = self.take_prompts(size)
        else:
            prompts = self.rollouts.own(self.prompts.pipeline[[row for _, row in given]])
            self.run.ledger.use(self.world.share(list(given)), self.prompts.rows)
        if not len(prompts):
            return None
        with self.clock("generate"):
            stream = self.run.stream(ROLLOUTS, self.progress.round)
            return self.sampler.sample(prompts, self.experience_kwargs, stream, choices=True)
