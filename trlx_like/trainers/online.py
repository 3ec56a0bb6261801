"""What trainers share that learn from text they sample themselves: chunks, scores, statistics over processes."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trlx_like.data import Experience
from trlx_like.errors import RewardError
from trlx_like.functional.masked import combine_stats, masked_stats, unbiased_variance
from trlx_like.pipelines.prompts import PromptBatch
from trlx_like.rewards.call import Reward
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.base import Metrics
from trlx_like.trainers.scoring import Batch, Tally
from trlx_like.trainers.text import TextTrainer

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Experience)


@dataclass
class Statistics:
    """Of numbers over all processes."""

    count: float
    mean: float
    m2: float  # sum of squared distances from the mean

    @property
    def std(self) -> float:
        """Unbiased; 0 for fewer than two numbers."""
        return float(self.var**0.5)

    @property
    def var(self) -> float:
        return float(unbiased_variance(torch.tensor(self.count), torch.tensor(self.m2)))


class OnlineTextTrainer(TextTrainer[E]):
    """A text trainer that makes its experience with its own policy and a reward function."""

    uses = frozenset({"prompts", "eval_prompts"})
    needs = ("reward_fn", "prompts")

    @property
    def experience_kwargs(self) -> dict[str, Any]:
        options: dict[str, Any] = self.method.experience_kwargs
        return options

    @property
    def temperature(self) -> float:
        return float(self.experience_kwargs.get("temperature", 1.0))

    def scored_samples(
        self, count: int, chunk_size: int, given: PromptBatch | None = None
    ) -> Iterator[tuple[TextSamples, list[Reward]]]:
        """As `all_samples`, without the samples whose reward is None."""
        for samples, rewards in self.all_samples(count, chunk_size, given):
            kept = [row for row, reward in enumerate(rewards) if reward is not None]
            if kept:
                yield samples[kept], [rewards[row] for row in kept]

    def all_samples(
        self, count: int, chunk_size: int, given: PromptBatch | None = None, *, more: bool = False
    ) -> Iterator[tuple[TextSamples, list[Reward]]]:
        """Samples to `count` prompts over all processes with their rewards, this process's share, chunk by chunk.

        chunk_size: prompts of a chunk and process. given: the `count` prompts of all processes; None: the next of the
        run's own. more: these are added to a round that has samples with rewards. RewardError when no
        sample of the round has a reward.
        """
        if not more:
            self._start_rollouts()
            self.scoring.tally = Tally()
        left = count
        waiting: deque[tuple[TextSamples | None, Batch]] = deque()
        try:
            while left > 0 or waiting:
                if left > 0:
                    self.check_stop()
                    size = min(left, chunk_size * self.group.size)
                    begin = count - left
                    samples = self._sampled(size, None if given is None else given[begin : begin + size])
                    waiting.append((samples, self._submitted(samples)))
                    left -= size
                # Where the reward runs in workers, the next chunks are generated meanwhile.
                if left > 0 and len(waiting) <= self.config.reward.workers:
                    continue
                samples, batch = waiting.popleft()
                with self.clock("reward"):
                    scores = self.scoring.result(batch)
                self.scoring.tally.add(scores)
                if samples is not None:
                    samples.components = scores.components
                    self._write_rollouts(samples, scores.rewards)
                    yield samples, scores.rewards
        finally:
            if waiting:  # nobody wants these any more
                self.scoring.close()
        tally = self.scoring.total(self.scoring.tally)
        if tally.all_abstained and not more:
            raise RewardError(
                f"reward_fn abstained (None) from all {tally.samples:g} samples; there is nothing to train on."
            )
        self._pending |= tally.metrics()

    def _sampled(self, size: int, given: PromptBatch | None) -> TextSamples | None:
        """Samples to this process's share of `size` prompts, if it has one."""
        prompts = self.take_prompts(size) if given is None else self.share_prompts(given)
        if not len(prompts):
            return None
        with self.clock("generate"):
            return self.sampler.sample(prompts, self.experience_kwargs)

    def _submitted(self, samples: TextSamples | None) -> Batch:
        scorer = self.scorer
        assert scorer is not None
        with self.clock("reward"):
            return self.scoring.submit(scorer, [] if samples is None else samples.rows())

    @property
    def scorer(self) -> Callable[..., Any] | None:
        """The reward function of what is trained on."""
        return self.reward_fn

    def check_ratio(self, metrics: Metrics) -> None:
        """On fresh experience the policy that learns must be the policy that sampled: every ratio is 1."""
        tolerance = 1e-3 if self.config.backend.mixed_precision == "no" else 0.1
        if self.progress.position == 1 and metrics["policy/ratio_deviation"] > tolerance:
            logger.warning(
                "policy/ratio_deviation is %.2g on fresh experience, where it should be 0: the sampler and the "
                "learner disagree about log-probabilities.",
                metrics["policy/ratio_deviation"],
            )

    def statistics(self, values: Tensor, mask: Tensor) -> Statistics:
        """Of the values under the mask, over all processes."""
        own = torch.stack(masked_stats(values.double(), mask)).tolist()
        merged = combine_stats(torch.tensor(self.group.gather([own]), dtype=torch.float64))
        return Statistics(*(float(value) for value in merged))

    def of_all(self, values: Tensor) -> Tensor:
        """Numbers [n] of this process and of all others, one after the other. [N]"""
        return torch.cat(self.group.gather([values]))

    def _rollouts(self) -> Path | None:
        """Where this round's samples are written as text, if they are."""
        folder = self.config.train.rollout_logging_dir
        name = f"rollouts_{self.progress.round + 1:06d}_rank{self.group.rank}.jsonl"
        return None if folder is None else Path(folder) / name

    def _start_rollouts(self) -> None:
        file = self._rollouts()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")  # a resumed run makes its round again

    def _write_rollouts(self, samples: TextSamples, rewards: list[Reward]) -> None:
        file = self._rollouts()
        if file is None:
            return
        with file.open("a", encoding="utf-8") as lines:
            for row, reward in enumerate(rewards):
                parts = {f"reward/{name}": column[row] for name, column in samples.components.items()}
                line = {"prompt": samples.prompts[row], "output": samples.outputs[row], "reward": reward, **parts}
                lines.write(json.dumps(line) + "\n")


def dense(rewards: list[Reward], mask: Tensor) -> Tensor:
    """Rewards of tokens [B, R]: a scalar at the last response token, a list from the first one on."""
    scores = torch.zeros(mask.shape)
    last = mask.sum(dim=1).tolist()
    for row, reward in enumerate(rewards):
        if isinstance(reward, list):
            scores[row, : len(reward)] = torch.tensor(reward)
        elif reward is not None:
            scores[row, last[row] - 1] = reward
    return scores.to(mask.device)


def whole(reward: Reward) -> float:
    """The reward of a response: the sum of its tokens' rewards, 0 without one."""
    return sum(reward) if isinstance(reward, list) else reward or 0.0
