"""Win rate over size: Online DPO on randomwalks with three sizes of model, measured by a judge that did not train.

    python -m examples.randomwalks.win_rates [--seed 1] [--seeds 5] [--problem 44] [--directory runs/randomwalks/sizes]

Each model first imitates random walks. Then Online DPO trains it with a judge that gives the wrong verdict on one pair
in five. The learning rate falls with the number of weights, as `lr: auto` does: with one for all sizes, the largest
model is trained at too large a rate, and wins less often than the middle one. At the end an exact judge, which training
has not seen, compares its walks with those of its start, 25 from each node. It is in small what TRL's page on Online
DPO shows with Pythia 1B, 2.8B and 6.9B.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import trlx_like
import trlx_like.api
from examples import configurations
from examples.problems import Draw, add_options, draws, summary
from examples.randomwalks.seeds import WALKS, Stopwatch
from examples.randomwalks.task import RandomWalks, model_config
from trlx_like.rewards.judges import RewardJudge

SIZES = {"small": (2, 32, 2), "middle": (4, 72, 6), "large": (6, 144, 6)}
"""Layers, width and heads of each model: 30,000, 250,000 and 1.5 million parameters."""
WRONG = 5
"""One verdict in so many is wrong."""
STEPS = 60


class NoisyJudge:
    """Prefer the better of two walks, and the worse one for a fixed fifth of all pairs."""

    def __init__(self, task: RandomWalks) -> None:
        self.task = task

    def compare(self, prompts: list[str], pairs: list[tuple[str, str]]) -> list[int | None]:
        return [self._better(prompt + a, prompt + b) for prompt, (a, b) in zip(prompts, pairs, strict=True)]

    def _better(self, first: str, second: str) -> int | None:
        a, b = self.task.optimality([first, second])
        if a == b:
            return None
        wrong = zlib.crc32(" ".join(sorted((first, second))).encode()) % WRONG == 0
        return int((b > a) != wrong)


def win_rate(draw: Draw, size: str, walks: int = WALKS, **train: Any) -> float:
    """Train a model of a size, and return how often the exact judge prefers its walks to those of its start.

    draw: seed, graph and folder. walks: walks from each node to compare. train: changes of the section `train`.
    """
    task, (layers, width, heads) = RandomWalks(draw.problem), SIZES[size]
    config = model_config()
    config.n_layer, config.n_embd, config.n_head = layers, width, heads
    folder = draw.directory / size
    imitation = configurations.load("sft_randomwalks").evolve(
        model={"model_path": config}, train={"checkpoint_dir": str(folder / "start"), "seed": draw.seed, **train}
    )
    start = trlx_like.train(imitation, samples=task.samples, eval_prompts=task.eval_prompts)
    start.save_pretrained(folder / "model")
    rate = min(6 / sum(weights.numel() for weights in start.model.parameters()) ** 0.75, 7.5e-4)
    tuning = configurations.load("online_dpo_randomwalks").evolve(
        model={"model_path": str(folder / "model")},
        data={"prompts": None, "eval_prompts": None, "reward_fn": None, "metric_fn": None},
        # A judge that ranks says which of two walks is better, and not how good one is: there is no best one so far.
        method={"beta": 0.1, "gen_experience_kwargs": None, "replay_best": False, "n_generations_per_prompt": 4},
        optimizer={"kwargs": {"lr": rate}},
        scheduler={"kwargs": {"total_iters": STEPS, "end_factor": 0.1}},
        train={"checkpoint_dir": str(folder / "tuned"), "seed": draw.seed, "eval_interval": 1000}
        | {"batch_size": 32, "total_steps": STEPS, "epochs": 1000, **train},
    )
    trainer: Any = trlx_like.api.make_trainer(tuning, judge=NoisyJudge(task), prompts=task.prompts)
    prompts = task.eval_prompts * walks
    before = trainer.decode(trainer.generate(prompts))
    trainer.learn()
    after = trainer.decode(trainer.generate(prompts))
    judge = trlx_like.WinRate(RewardJudge(task.reward_fn))
    samples = [prompt + output for prompt, output in zip(prompts, after, strict=True)]
    wins = judge(samples=samples, prompts=prompts, outputs=after, reference=before)["win_rate"]
    return sum(wins) / len(wins)


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each run, and the median and the worst for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 1, Path("runs/randomwalks/sizes"), "graph")
    runs = draws(parser.parse_args(arguments))
    for size in SIZES:
        watch, reached = Stopwatch(), []
        for draw in runs:
            reached.append(win_rate(draw, size))
            print(f"{size}  graph {draw.problem}  seed {draw.seed}  win rate {reached[-1]:.3f}", flush=True)
        print(f"{size}  {summary(runs, reached)}, {watch.lap() / len(runs):.0f} CPU seconds a run", flush=True)


if __name__ == "__main__":
    main()
