"""The samples of one round: generated and scored chunk by chunk, written to a file, and summarised.

The statistics of a round are defined here, once for all online trainers. They are taken over all samples of all
processes, whether the trainer learns from them or not. `rollout/kept/...` are the statistics of the samples that it
learns from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from trlx_like.errors import RewardError, writing
from trlx_like.functional.reward_range import dominant
from trlx_like.pipelines.rows import PromptColumns
from trlx_like.rewards.outcome import Reward, whole
from trlx_like.rewards.runner import Scores
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.context import Metrics, Row, Run
from trlx_like.trainers.ledger import Use
from trlx_like.trainers.scoring import Scoring, after_faults

logger = logging.getLogger(__name__)

T = TypeVar("T")
Columns = TypeVar("Columns", bound=PromptColumns)

FEWEST_PROMPTS = 4
"""Fewest different prompts in a round for which the share of the commonest output is logged.

With fewer prompts a common output does not show a collapsed policy.
"""


OF_SCORES = {f"rollout/{name}" for name in ("score_mean", "score_std", "abstained_fraction", "reward_faults")}
"""The metrics of a round that are left out without a reward function."""


@dataclass
class Sample:
    """Hold what the statistics need to know of one sample. Processes exchange these, so the text is left out."""

    score: float | None  # from the reward function; None: it abstained
    components: dict[str, float | None]  # scores of several reward functions, by name
    kept: bool  # whether the trainer learns from it
    prompt: str = ""  # digest of the text; empty for images
    output: str = ""
    prompt_length: int | None = None  # in tokens; None for images
    length: int | None = None
    finished: bool | None = None  # whether it ended by itself, not at max_new_tokens
    replaced: bool = False  # whether the trainer gets an earlier response in its place


@dataclass
class Rollouts:
    """Make, score and count this process's samples of the current round.

    Args:
        run: The run.
        scoring: Calls the reward function.
        samples: The samples of the round so far.
        prompts: Prompts taken for the round so far, over all processes.
        taken: Epoch and row of each of these, if they were taken from the training data.
        faults: Calls of reward functions that failed in this round.
        scored: Whether there is a reward function.
        replays: Whether responses may be replaced by earlier ones.
    """

    run: Run
    scoring: Scoring
    samples: list[Sample] = field(default_factory=list)
    prompts: int = 0
    taken: list[Use] = field(default_factory=list)
    faults: int = 0  # calls of reward functions that failed in this round
    extreme: tuple[float, str] = (0.0, "")  # largest absolute score of this process, and its sample as words
    warned: bool = False  # of an outlier
    scored: bool = True
    replays: bool = False

    def begin(self) -> None:
        """Start a round, and drop the samples of the last one."""
        self.samples, self.prompts, self.taken, self.faults, self.extreme = [], 0, [], 0, (0.0, "")
        self.run.ledger.begin()

    def own(self, prompts: Columns) -> Columns:
        """Number prompts in the round, and return this process's share of them.

        Args:
            prompts: The next prompts of the round, the same on all processes.
        """
        rows = list(range(len(prompts)))
        numbered = prompts.numbered([self.prompts + row for row in rows])
        self.prompts += len(rows)
        return numbered[self.run.world.share(rows)]

    def chunks(
        self,
        function: Callable[..., object] | None,
        count: int,
        size: int,
        make: Callable[[int, int], T | None],
        rows: Callable[[T], list[Row]],
    ) -> Iterator[tuple[T, Scores]]:
        """Make and score samples chunk by chunk.

        With `reward.workers`, a chunk is scored while the next ones are made.

        Args:
            function: The reward function; None: no sample gets a score.
            count: Number of prompts of the round, over all processes.
            size: Prompts per chunk and process.
            make: Called as `make(begin, count)`; makes this process's share of a chunk. `begin` is the number of the
                chunk's first prompt in the round, and `count` the chunk's prompts over all processes. It returns None
                if the share is empty. It must draw all random numbers of the chunk, because the next chunk may be
                made before this one is used.
            rows: Returns the arguments of the reward function for each sample of a chunk.

        Yields:
            Each chunk of this process and its scores, in order.
        """
        run, left, self.scored = self.run, count, function is not None
        waiting: deque[tuple[T | None, Callable[[], Scores]]] = deque()
        try:
            while left > 0 or waiting:
                if left > 0:
                    run.check_stop()
                    taken = min(left, size * run.world.size)
                    made = make(count - left, taken)
                    own = [] if made is None else rows(made)
                    with run.clock("reward"):
                        none = partial(Scores, [None] * len(own))
                        waiting.append((made, none if function is None else self.scoring.submit(function, own)))
                    left -= taken
                if left > 0 and len(waiting) <= run.config.reward.workers:
                    continue
                made, result = waiting.popleft()
                with run.clock("reward"):
                    scores = result()
                self.faults += scores.faults
                if made is not None:
                    yield made, scores
        finally:
            if waiting:  # the caller wants no more
                self.scoring.close()

    def add_text(self, samples: TextSamples, rewards: Sequence[Reward]) -> None:
        """Add responses to the round's statistics, and write them to the round's file.

        Responses with a reward count as kept, unless `keep` says otherwise.

        Args:
            samples: The responses of a chunk.
            rewards: The reward of each; None if the reward function gave none.
        """
        completion = samples.completion
        prompt_lengths, lengths = (mask.sum(dim=1).tolist() for mask in (completion.prompt_mask, completion.mask))
        for place, sample in enumerate(self._add(rewards, samples.components)):
            sample.prompt, sample.output = _digest(samples.prompts[place]), _digest(samples.outputs[place])
            sample.prompt_length, sample.length = prompt_lengths[place], lengths[place]
            sample.finished = samples.finished[place]
        self._find_extreme(rewards, samples.prompts, samples.outputs)
        self._write(samples, rewards)

    def add_images(self, scores: Scores, prompts: Sequence[str]) -> None:
        """Add images to the round's statistics. Images with a reward count as kept, unless `keep` says otherwise.

        Args:
            scores: The scores of a chunk.
            prompts: The prompt of each image.
        """
        self._find_extreme(scores.rewards, prompts)
        self._add(scores.rewards, scores.components)

    def _add(self, rewards: Sequence[Reward], components: Mapping[str, Sequence[Reward]]) -> list[Sample]:
        """Add one sample for each reward, and return the new samples."""
        added = []
        for place, score in enumerate(map(whole, rewards)):
            parts = {name: whole(column[place]) for name, column in components.items()}
            added.append(Sample(score, parts, score is not None or not self.scored))
        self.samples += added
        return added

    def keep(self, kept: Sequence[bool]) -> None:
        """Set for each of this process's samples, in the order they were added, whether the trainer learns from it.

        It learns from none that an earlier response has replaced.
        """
        for sample, keep in zip(self.samples, kept, strict=True):
            sample.kept = keep and not sample.replaced

    def check(self, *, may_be_empty: bool = False) -> None:
        """Check that enough samples of the round have a reward. Every process calls it.

        Args:
            may_be_empty: Accept that no sample has a reward.

        Raises:
            RewardError: If no sample has a reward, or a larger fraction than `reward.max_abstained` has none.
        """
        if not self.scored:
            return
        abstained = sum(sample.score is None for sample in self.samples)
        total, without, faults = self.run.world.sum([len(self.samples), abstained, self.faults])
        self.scoring.check(total, without, faults)
        if without == total and not may_be_empty:
            what = f"reward_fn abstained (None) from all {total:g} samples{after_faults(faults)}"
            raise RewardError(f"{what}; there is nothing to train on.")

    def metrics(self) -> Metrics:
        """Compute the statistics of the round over all processes. Empty if no sample was added."""
        everything = self.run.world.gather(self.samples)
        if not everything:
            return {}
        self._warn_of_outlier([sample.score for sample in everything if sample.score is not None])
        (faults,) = self.run.world.sum([self.faults])
        metrics = round_metrics(everything) | {"rollout/reward_faults": float(faults)}
        if self.replays:
            metrics["rollout/replayed"] = float(sum(sample.replaced for sample in everything))
        return {name: value for name, value in metrics.items() if self.scored or name not in OF_SCORES}

    def _find_extreme(self, rewards: Sequence[Reward], *texts: Sequence[str]) -> None:
        """Remember the sample with the largest absolute score, to name it if it is an outlier."""
        for place, reward in enumerate(rewards):
            score = abs(whole(reward) or 0.0)
            if score > self.extreme[0]:
                self.extreme = score, " -> ".join(repr(column[place][:80]) for column in texts)

    def _warn_of_outlier(self, scores: Sequence[float]) -> None:
        """Warn once in a run of a score that makes the differences of all others vanish. Every process calls it."""
        place = None if self.warned else dominant(scores)
        if place is not None:
            texts = [text for score, text in self.run.world.gather([self.extreme]) if score == abs(scores[place])]
            self.warned = True
            if self.run.world.main:
                logger.warning(
                    f"The reward {scores[place]:.4g} of the sample {texts[0]} is so far from the others that it can "
                    "hide all differences between them. Bound what the reward function returns."
                )

    def _write(self, samples: TextSamples, rewards: Sequence[Reward]) -> None:
        """Append samples to the round's file, one JSON object per line, if `train.rollout_logging_dir` is set."""
        folder = self.run.config.train.rollout_logging_dir
        if folder is None:
            return
        name = f"rollouts_{self.run.progress.round + 1:06d}_rank{self.run.world.rank}.jsonl"
        file = Path(os.path.expanduser(folder), name)
        file.parent.mkdir(parents=True, exist_ok=True)
        first = len(self.samples) == len(rewards)  # a resumed run makes its round again
        with writing(file), file.open("w" if first else "a", encoding="utf-8") as lines:
            for row, reward in enumerate(rewards):
                parts = {f"reward/{name}": column[row] for name, column in samples.components.items()}
                line = {"prompt": samples.prompts[row], "output": samples.outputs[row], "reward": reward, **parts}
                lines.write(json.dumps(line) + "\n")


def round_metrics(samples: Sequence[Sample]) -> Metrics:
    """Compute the statistics of a round from all of its samples; docs/metrics.md has one row for each.

    Statistics of scores are over the samples that have one. Metrics that are undefined for a round are left out:
    the lengths of images; the share of the commonest output with fewer than `FEWEST_PROMPTS` prompts; a correlation if
    all lengths or all scores are equal; `rollout/kept/...` if all samples were kept, or none.
    """
    kept = [sample for sample in samples if sample.kept]
    metrics = {"rollout/samples": float(len(samples)), **_means(samples, "rollout/")}
    metrics["rollout/abstained_fraction"] = sum(sample.score is None for sample in samples) / len(samples)
    metrics["rollout/kept/fraction"] = len(kept) / len(samples)
    if 0 < len(kept) < len(samples):
        metrics |= _means(kept, "rollout/kept/")
    for name in dict.fromkeys(name for sample in samples for name in sample.components):
        values = [sample.components[name] for sample in samples if sample.components.get(name) is not None]
        metrics[f"rollout/reward/{name}/mean"] = _moments(values)[0]
    if samples[0].length is not None:
        metrics |= _text_metrics(samples)
    return metrics


def _means(samples: Sequence[Sample], prefix: str) -> Metrics:
    """Compute mean and deviation of scores and lengths, and the fraction of responses that ended by themselves."""
    mean, std = _moments([sample.score for sample in samples if sample.score is not None])
    metrics = {f"{prefix}score_mean": mean, f"{prefix}score_std": std}
    if samples[0].length is not None:
        mean, std = _moments([sample.length for sample in samples])
        metrics |= {f"{prefix}length_mean": mean, f"{prefix}length_std": std}
        metrics[f"{prefix}finished_fraction"] = sum(bool(sample.finished) for sample in samples) / len(samples)
    return metrics


def _text_metrics(samples: Sequence[Sample]) -> Metrics:
    """Compute how often outputs repeat, and the correlation of score and length."""
    texts = Counter(sample.output for sample in samples)
    metrics = {
        "rollout/prompt_length_mean": _moments([sample.prompt_length for sample in samples])[0],
        "rollout/duplicate_fraction": 1 - len(texts) / len(samples),
    }
    if len({sample.prompt for sample in samples}) >= FEWEST_PROMPTS:
        metrics["rollout/top_output_fraction"] = max(texts.values()) / len(samples)
    scored = [(sample.length, sample.score) for sample in samples if sample.score is not None]
    table = torch.tensor(scored, dtype=torch.float64).reshape(-1, 2).T  # lengths, scores
    if table.shape[1] > 1 and bool((table.amax(dim=1) > table.amin(dim=1)).all()):
        metrics["rollout/length_reward_correlation"] = float(torch.corrcoef(table)[0, 1])
    return metrics


def _moments(values: Sequence[float | None]) -> tuple[float, float]:
    """Return the mean (NaN of no values) and the standard deviation with n - 1 (0 of fewer than two values)."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return float(numbers.mean()), float(numbers.std()) if len(values) > 1 else 0.0


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def dense(rewards: Sequence[Reward], mask: Tensor) -> Tensor:
    """Assign rewards to tokens: a number to the last response token, a list to the tokens from the first on.

    Args:
        rewards: The reward of each response; None gives zeros.
        mask: True on the response tokens that are trained on. [B, R] bool

    Returns:
        The reward of each token, on the device of the mask. [B, R] float
    """
    scores = torch.zeros(mask.shape)
    last = last_tokens(mask).tolist()
    for row, reward in enumerate(rewards):
        if isinstance(reward, list):
            scores[row, : len(reward)] = torch.tensor(reward)
        elif reward is not None:
            scores[row, last[row]] = reward
    return scores.to(mask.device)


def last_tokens(mask: Tensor) -> Tensor:
    """Return the place of the last True of each row. [B, R] -> [B]"""
    return mask.shape[1] - 1 - mask.flip(1).long().argmax(dim=1)
