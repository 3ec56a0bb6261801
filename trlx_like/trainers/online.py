"""What trainers share that learn from text which their own policy samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from trlx_like.data import Experience
from trlx_like.pipelines.prompts import PromptBatch
from trlx_like.rewards.call import Reward
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.rollouts import dense
from trlx_like.trainers.scoring import whole
from trlx_like.trainers.text import TextTrainer

__all__ = ["OnlineTextTrainer", "dense", "whole"]

E = TypeVar("E", bound=Experience)


class OnlineTextTrainer(TextTrainer[E]):
    """A text trainer that makes its experience with its own policy and a reward function."""

    uses = frozenset({"prompts", "eval_prompts"})
    needs = ("reward_fn", "prompts")

    @property
    def experience_kwargs(self) -> dict[str, Any]:
        options: dict[str, Any] = self.method.experience_kwargs
        return options

    @property
    def sampling_temperature(self) -> float:
        """The temperature that tokens are drawn at."""
        return float(self.experience_kwargs.get("temperature", 1.0))

    @property
    def temperature(self) -> float:
        return self.sampling_temperature

    @property
    def scorer(self) -> Callable[..., Any] | None:
        """The reward function of what is trained on."""
        return self.reward_fn

    def scored_samples(
        self, count: int, chunk_size: int, given: PromptBatch | None = None
    ) -> Iterator[tuple[TextSamples, list[Reward]]]:
        """Yield what `all_samples` yields, without the samples that have no reward (None)."""
        for samples, rewards in self.all_samples(count, chunk_size, given):
            kept = [row for row, reward in enumerate(rewards) if reward is not None]
            if kept:
                yield samples[kept], [rewards[row] for row in kept]

    def all_samples(
        self, count: int, chunk_size: int, given: PromptBatch | None = None, *, more: bool = False
    ) -> Iterator[tuple[TextSamples, list[Reward]]]:
        """Sample responses to prompts and score them, chunk by chunk.

        Args:
            count: prompts, over all processes.
            chunk_size: prompts of a chunk, per process.
            given: the prompts, which all processes hold; None: the next ones of the run.
            more: add to a round that has samples already.

        Yields:
            The samples of this process and their rewards.

        Raises:
            RewardError: if no sample of the round has a reward.
            SamplerError: if the engine is not the policy that learns.
        """
        if not more:
            self.rollouts.begin()
            self.sync_sampler()

        def sample(begin: int, size: int) -> TextSamples | None:
            samples = self._sampled(size, None if given is None else given[begin : begin + size])
            if begin == 0 and not more:
                with self.run.forward("canary"):
                    self.agreement.check_round(
                        self.sampler.engine,
                        self.model,
                        samples,
                        temperature=self.sampling_temperature,
                        round_=self.progress.round + 1,
                    )
            return samples

        assert self.scorer is not None
        for samples, scores in self.rollouts.chunks(self.scorer, count, chunk_size, sample, TextSamples.rows):
            samples.components = scores.components
            self.rollouts.add_text(samples, scores.rewards)
            yield samples, scores.rewards
        self.rollouts.check(may_be_empty=more)

    def _sampled(self, size: int, given: PromptBatch | None) -> TextSamples | None:
        """Sample responses to this process's share of `size` prompts; None if the share is empty."""
        prompts = self.take_prompts(size) if given is None else self.share_prompts(given)
        if not len(prompts):
            return None
        with self.clock("generate"):
            return self.sampler.sample(prompts, self.experience_kwargs)
