"""What all sides of a run share: the graph, the reward, the evaluation, the clock and the counts.

A program of a side is started with the file that says what to run and the file for what came of it. This file runs in
the environments of the peers too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.recipes import LONGEST, WALKS
from benchmarks.peers.laps import Work, peak_rss_mib
from examples.randomwalks.task import EOS, GOAL, LETTERS, TOKENS, RandomWalks

POINTS = 6
"""Evaluations after the first one."""
BETWEEN, AT_THE_END = 10, 25
"""Walks from each of the 20 nodes in an evaluation."""
END = TOKENS.index(EOS)


def evaluate(model: Any, task: RandomWalks, each: int, seed: int = 0) -> float:
    """Return the mean optimality of walks that are sampled at temperature 1.

    All walks begin with one token, so nothing is padded and no side's own sampler is needed.

    Args:
        model: A causal language model of transformers.
        task: The graph.
        each: Walks from each node.
        seed: Of the sampling, which leaves the random state of training as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(GOAL + 1, len(task.adjacency)).repeat(each)[:, None]  # [B, 1]
    with torch.no_grad():
        for _ in range(LONGEST):
            probabilities = model(input_ids=ids).logits[:, -1].float().softmax(-1)  # [B, V]
            ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], 1)
    walks = [walk(row) for row in ids.tolist()]
    scores = task.optimality(walks)
    return sum(scores) / len(scores)


def walk(ids: Sequence[int]) -> str:
    """Return the text of tokens up to EOS, without the other special tokens."""
    before = ids[: list(ids).index(END)] if END in ids else ids
    return "".join(TOKENS[token] for token in before if token < len(LETTERS))


class Recorder:
    """Score the walks of a trainer, and evaluate its model after rounds of about equal numbers of walks.

    Evaluations are in none of the CPU seconds and counts.
    """

    def __init__(self) -> None:
        self.asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        self.options: dict[str, Any] = self.asked["options"]
        self.task = RandomWalks(self.asked["graph"])
        self.walks = self.tokens = 0
        self.points: list[dict[str, float]] = []
        self.work = Work(layers=6)
        self.spent = 0.0
        torch.set_num_threads(1)
        torch.manual_seed(self.asked["seed"])

    @property
    def model(self) -> str:
        """The folder of the start."""
        return str(self.asked["model"])

    def reward(self, walks: Sequence[str]) -> list[float]:
        """Return the optimality of walks that were sampled for training, and count them."""
        self.walks += len(walks)
        self.tokens += sum(min(len(text), LONGEST) for text in walks)  # the nodes after the first, and EOS if there
        return self.task.reward_fn(walks)

    def begin(self, model: Any) -> None:
        """Evaluate the start, and begin to count."""
        self.walks = self.tokens = 0
        self._point(model, BETWEEN)

    def round(self, model: Any) -> None:
        """Evaluate if it is time to, after a round from which the model has learned."""
        if self.walks >= WALKS * len(self.points) / POINTS and len(self.points) < POINTS:
            self._stop()
            self._point(model, BETWEEN)

    def end(self, model: Any) -> None:
        """Evaluate the result on more walks, and write everything to the file."""
        self._stop()
        self._point(model, AT_THE_END)
        self._stop()
        counts = {"walks": self.walks, "walk tokens": self.tokens, **self.counts}
        found = {"points": self.points, "counts": counts, "rss": round(peak_rss_mib(), 1)}
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")

    def _point(self, model: Any, each: int) -> None:
        optimality = evaluate(model, self.task, each)
        self.points.append({"walks": self.walks, "seconds": round(self.spent, 3), "optimality": round(optimality, 4)})
        self.work.begin()
        self.began = time.process_time()

    def _stop(self) -> None:
        self.spent += time.process_time() - self.began
        self.counts = self.work.end()
