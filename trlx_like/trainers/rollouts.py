"""One round of samples: made and scored chunk by chunk, written to a file, and counted.

The statistics of a round are defined here, once for all online trainers. They are taken over all samples of all
processes, whether the trainer learns from them or not. Those that it learns from have names of their own,
`rollout/kept/...`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from trlx_like.errors import RewardError
from trlx_like.rewards.call import Reward
from trlx_like.rewards.runner import Scores
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.context import Metrics, Row, Run
from trlx_like.trainers.scoring import Batch, Scoring, after_faults, whole

T = TypeVar("T")

FEWEST_PROMPTS = 4
"""With fewer different prompts in a round, a common output says little: each prompt may have its own."""


@dataclass
class Sample:
    """What the statistics need of one sample, without its text: processes send these to each other."""

    score: float | None  # from the reward function; None: it abstained
    components: dict[str, float | None]  # scores of several reward functions, by name
    kept: bool  # whether the trainer learns from it
    prompt: str = ""  # digest of the text; empty for images
    output: str = ""
    prompt_length: int | None = None  # in tokens; None for images
    length: int | None = None
    finished: bool | None = None  # whether it ended by itself, not at max_new_tokens


@dataclass
class Rollouts:
    """The samples of the present round, those of this process.

    Args:
        run: the run.
        scoring: calls the reward function.
    """

    run: Run
    scoring: Scoring
    samples: list[Sample] = field(default_factory=list)
    faults: int = 0  # calls of reward functions that failed in this round

    def begin(self) -> None:
        """Start a round: forget the samples of the last one."""
        self.samples, self.faults = [], 0

    def chunks(
        self,
        function: Callable[..., object],
        count: int,
        size: int,
        make: Callable[[int, int], T | None],
        rows: Callable[[T], list[Row]],
    ) -> Iterator[tuple[T, Scores]]:
        """Sample chunk by chunk, and score each chunk while the next ones are made if the reward has workers.

        Args:
            function: the reward function.
            count: prompts of the round, over all processes.
            size: prompts of a chunk, per process.
            make: samples this process's share of a chunk, given the number of its first prompt and of its prompts over
                all processes; returns None if the share is empty. It has to draw all random numbers of its chunk,
                since the caller may use a chunk before or after the next one is made.
            rows: what functions may see of each sample of a chunk.

        Yields:
            Each chunk of this process and its scores, in order.
        """
        run, left = self.run, count
        waiting: deque[tuple[T | None, Batch]] = deque()
        try:
            while left > 0 or waiting:
                if left > 0:
                    run.check_stop()
                    taken = min(left, size * run.world.size)
                    made = make(count - left, taken)
                    with run.clock("reward"):
                        batch = self.scoring.submit(function, [] if made is None else rows(made))
                    waiting.append((made, batch))
                    left -= taken
                if left > 0 and len(waiting) <= run.config.reward.workers:
                    continue
                made, batch = waiting.popleft()
                with run.clock("reward"):
                    scores = self.scoring.result(batch)
                self.faults += scores.faults
                if made is not None:
                    yield made, scores
        finally:
            if waiting:  # the caller wants no more
                self.scoring.close()

    def add_text(self, samples: TextSamples, rewards: Sequence[Reward]) -> None:
        """Count responses, and write them to the round's file. Those with a reward are kept until `keep` is called."""
        completion = samples.completion
        columns = (
            *(map(_digest, texts) for texts in (samples.prompts, samples.outputs)),
            *(mask.sum(dim=1).tolist() for mask in (completion.prompt_mask, completion.mask)),
            samples.finished,
        )
        for place, row in enumerate(zip(*columns, strict=True)):
            self._add(rewards, samples.components, place, *row)
        self._write(samples, rewards)

    def add_images(self, scores: Scores) -> None:
        """Count images, which have no length. Those with a reward are kept until `keep` is called."""
        for place in range(len(scores.rewards)):
            self._add(scores.rewards, scores.components, place)

    def _add(
        self, rewards: Sequence[Reward], components: Mapping[str, Sequence[Reward]], place: int, *about: object
    ) -> None:
        score = whole(rewards[place])
        parts = {name: whole(column[place]) for name, column in components.items()}
        self.samples.append(Sample(score, parts, score is not None, *about))  # type: ignore[arg-type]

    def keep(self, kept: Sequence[bool]) -> None:
        """Say for each of this process's samples, in the order in which they were added, whether it is learned from."""
        for sample, keep in zip(self.samples, kept, strict=True):
            sample.kept = keep

    def check(self, *, may_be_empty: bool = False) -> None:
        """Check that there is something to learn from. Every process calls it.

        Args:
            may_be_empty: accept that no sample has a reward.

        Raises:
            RewardError: if no sample has a reward, or fewer than `reward.max_abstained` demands.
        """
        abstained = sum(sample.score is None for sample in self.samples)
        total, without, faults = self.run.world.sum([len(self.samples), abstained, self.faults])
        self.scoring.check(total, without, faults)
        if without == total and not may_be_empty:
            what = f"reward_fn abstained (None) from all {total:g} samples{after_faults(faults)}"
            raise RewardError(f"{what}; there is nothing to train on.")

    def metrics(self) -> Metrics:
        """Return the statistics of the round, over all processes; nothing before a sample was added."""
        everything = self.run.world.gather(self.samples)
        if not everything:
            return {}
        (faults,) = self.run.world.sum([self.faults])
        return round_metrics(everything) | {"rollout/reward_faults": faults}

    def _file(self) -> Path | None:
        """Where the samples of this round and process are written, if they are."""
        folder = self.run.config.train.rollout_logging_dir
        name = f"rollouts_{self.run.progress.round + 1:06d}_rank{self.run.world.rank}.jsonl"
        return None if folder is None else Path(folder) / name

    def _write(self, samples: TextSamples, rewards: Sequence[Reward]) -> None:
        file = self._file()
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        first = len(self.samples) == len(rewards)  # a resumed run makes its round again
        with file.open("w" if first else "a", encoding="utf-8") as lines:
            for row, reward in enumerate(rewards):
                parts = {f"reward/{name}": column[row] for name, column in samples.components.items()}
                line = {"prompt": samples.prompts[row], "output": samples.outputs[row], "reward": reward, **parts}
                lines.write(json.dumps(line) + "\n")


def round_metrics(samples: Sequence[Sample]) -> Metrics:
    """Compute the statistics of a round from all of its samples; docs/metrics.md has one row for each.

    Means of scores are over the samples that have one. Metrics that are undefined for a round are left out: lengths of
    images, the share of the commonest output with fewer than `FEWEST_PROMPTS` prompts, a correlation where all lengths
    or all scores are equal, and `rollout/kept/...` where everything was kept.
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
    """Moments of scores and lengths, and the share of responses that ended by themselves."""
    mean, std = _moments([sample.score for sample in samples if sample.score is not None])
    metrics = {f"{prefix}score_mean": mean, f"{prefix}score_std": std}
    if samples[0].length is not None:
        mean, std = _moments([sample.length for sample in samples])
        metrics |= {f"{prefix}length_mean": mean, f"{prefix}length_std": std}
        metrics[f"{prefix}finished_fraction"] = sum(bool(sample.finished) for sample in samples) / len(samples)
    return metrics


def _text_metrics(samples: Sequence[Sample]) -> Metrics:
    """How often outputs are the same, and whether the score goes by length."""
    texts = Counter(sample.output for sample in samples)
    metrics = {
        "rollout/prompt_length_mean": _moments([sample.prompt_length for sample in samples])[0],
        "rollout/duplicate_fraction": 1 - len(texts) / len(samples),
    }
    if len({sample.prompt for sample in samples}) >= FEWEST_PROMPTS:
        metrics["rollout/top_output_fraction"] = max(texts.values()) / len(samples)
    scored = [(sample.length, sample.score) for sample in samples if sample.score is not None]
    table = torch.tensor(scored, dtype=torch.float64).T.reshape(2, -1)  # lengths, scores
    if table.shape[1] > 1 and bool((table.amax(dim=1) > table.amin(dim=1)).all()):
        metrics["rollout/length_reward_correlation"] = float(torch.corrcoef(table)[0, 1])
    return metrics


def _moments(values: Sequence[float | None]) -> tuple[float, float]:
    """Mean and standard deviation with n - 1; the deviation of one value is 0, and the mean of none NaN."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return float(numbers.mean()), float(numbers.std()) if len(values) > 1 else 0.0


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def dense(rewards: Sequence[Reward], mask: Tensor) -> Tensor:
    """Place rewards on tokens: a scalar on the last response token, a list from the first token on.

    Args:
        rewards: one a response; None leaves zeros.
        mask: real response tokens [B, R] bool.

    Returns:
        Rewards [B, R] float, on the device of the mask.
    """
    scores = torch.zeros(mask.shape)
    last = mask.sum(dim=1).tolist()
    for row, reward in enumerate(rewards):
        if isinstance(reward, list):
            scores[row, : len(reward)] = torch.tensor(reward)
        elif reward is not None:
            scores[row, last[row] - 1] = reward
    return scores.to(mask.device)
