"""What trainers share that learn from text they sample themselves: chunks, scores, statistics over processes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trlx_like.data import Experience, Sampled
from trlx_like.errors import SamplerError
from trlx_like.functional.masked import combine_stats, masked_stats, unbiased_variance
from trlx_like.functional.policy_gradient import probability_ratio
from trlx_like.pipelines.prompts import PromptBatch
from trlx_like.rewards.call import Reward
from trlx_like.samplers.canary import Canary, some_of, tolerance
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.base import Metrics
from trlx_like.trainers.outputs import Output, output_metrics, outputs_of
from trlx_like.trainers.scoring import Tally
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

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        self.canary = Canary()
        self.outputs: list[Output] = []  # of this round

    @property
    def experience_kwargs(self) -> dict[str, Any]:
        options: dict[str, Any] = self.method.experience_kwargs
        return options

    @property
    def drawn_at(self) -> float:
        """The temperature at which tokens are drawn."""
        return float(self.experience_kwargs.get("temperature", 1.0))

    @property
    def temperature(self) -> float:
        return self.drawn_at

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
            self.sync_sampler()
            self.outputs = []

        def sample(begin: int, size: int) -> TextSamples | None:
            samples = self._sampled(size, None if given is None else given[begin : begin + size])
            if begin == 0 and not more:
                self.check_sampler(samples)
            return samples

        assert self.scorer is not None
        for samples, scores in self.scoring.chunks(self.scorer, count, chunk_size, sample, TextSamples.rows):
            samples.components = scores.components
            self._write_rollouts(samples, scores.rewards)
            wholes = [None if reward is None else whole(reward) for reward in scores.rewards]
            self.outputs += outputs_of(samples, wholes)
            yield samples, scores.rewards
        metrics = self.scoring.round_metrics(may_be_empty=more)
        self._pending |= metrics | output_metrics(self.world.gather(self.outputs))

    def _sampled(self, size: int, given: PromptBatch | None) -> TextSamples | None:
        """Samples to this process's share of `size` prompts, if it has one."""
        prompts = self.take_prompts(size) if given is None else self.share_prompts(given)
        if not len(prompts):
            return None
        with self.clock("generate"):
            return self.sampler.sample(prompts, self.experience_kwargs)

    @property
    def scorer(self) -> Callable[..., Any] | None:
        """The reward function of what is trained on."""
        return self.reward_fn

    # What samples is what learns.

    @torch.no_grad()
    def check_sampler(self, samples: TextSamples | None) -> None:
        """The canary: the sampler's weights, and its ratio to the learner on what it has just sampled.

        Called on all processes, of which some may have no samples. SamplerError on all of them.
        """
        engine = self.sampler.engine
        with self.clock("canary"):
            fault = self.canary.weights(self.model.lm, engine)
            apart, tokens = (
                (0.0, 0) if samples is None else self._apart(some_of(samples.completion, samples.sampling_logprobs))
            )
            seen = self.world.gather([(fault, apart, tokens)])
        for rank, (found, *_) in enumerate(seen):
            if found is not None:
                where = f" on process {rank}" if self.world.size > 1 else ""
                self._refuse(f"does not hold the weights that are trained{where}: {found}")
        deviation = sum(apart for _, apart, _ in seen) / max(1, sum(tokens for *_, tokens in seen))
        if not deviation <= (limit := self._tolerance(engine.dtype)):  # NaN is not
            self._refuse(
                "and the learner disagree about what was sampled: the ratio of a token's probabilities is "
                f"{deviation:.2g} from 1 on average, above {limit:g}, although their weights are the same"
            )

    def _apart(self, few: Sampled) -> tuple[float, int]:
        """The sum of abs(ratio of learner to sampler - 1) over tokens, and how many these are."""
        if few.sampling_logprobs is None:  # RFT may sample in ways that its loss need not know of, such as top-k
            return 0.0, 0
        # Or at another temperature than the one that its loss scores at.
        own, self.model.temperature = self.model.temperature, self.drawn_at
        try:
            with self.accelerator.autocast():
                learner = self.model(few, heads=False).logprobs
        finally:
            self.model.temperature = own
        ratio = probability_ratio(learner, few.sampling_logprobs)
        return float((ratio - 1).abs()[few.mask].sum()), int(few.mask.sum())

    def accept(self, metrics: Metrics) -> bool:
        """On fresh experience the policy that learns must be the policy that was observed: every ratio is 1."""
        deviation, limit = metrics.get("policy/ratio_deviation", 0.0), self._tolerance(None)
        fresh = self.progress.in_round and self.progress.position == 0
        if fresh and not deviation <= limit:  # NaN is not
            if self.progress.step:
                self.save()
            raise SamplerError(
                f"policy/ratio_deviation is {deviation:.2g} on fresh experience, above {limit:g}: the loss computes "
                "other log-probabilities than those that the samples were observed with (dropout, another temperature, "
                "a model that changes between two forwards). No step was made on this experience; see docs/audit.md."
            )
        return True

    def _tolerance(self, sampler: torch.dtype | None) -> float:
        """How far a ratio may be from 1, by the coarsest numbers it is computed with."""
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.backend.mixed_precision)
        own = {parameter.dtype for parameter in self.model.lm.parameters()}
        return tolerance({*own, *(dtype for dtype in (mixed, sampler) if dtype is not None)})

    def _refuse(self, what: str) -> None:
        name = self.config.sampler.engine
        advice = (
            "sampler.engine: transformers generates with the trained model itself"
            if name != "transformers"
            else "something has changed the model between sampling and scoring"
        )
        raise SamplerError(
            f"sampler.engine ({name}) {what}. Nothing of round {self.progress.round + 1} was learned from. "
            f"{advice[0].upper()}{advice[1:]}; see docs/audit.md."
        )

    def statistics(self, values: Tensor, mask: Tensor) -> Statistics:
        """Of the values under the mask, over all processes."""
        own = torch.stack(masked_stats(values.double(), mask)).tolist()
        merged = combine_stats(torch.tensor(self.world.gather([own]), dtype=torch.float64))
        return Statistics(*(float(value) for value in merged))

    def of_all(self, values: Tensor) -> Tensor:
        """Numbers [n] of this process and of all others, one after the other. [N]"""
        return torch.cat(self.world.gather([values]))

    def _rollouts(self) -> Path | None:
        """Where this round's samples are written as text, if they are."""
        folder = self.config.train.rollout_logging_dir
        name = f"rollouts_{self.progress.round + 1:06d}_rank{self.world.rank}.jsonl"
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
