"""Plant causes of runs that do not learn, and see whether the audit names them first and is quiet in healthy runs.

    python -m benchmarks.diagnosis [--only "learning rate"] [--healthy 20] [--seed 1] [--json out.json]

A run is of a few CPU seconds: a GPT-2 of random weights with two layers of width 32 on a task of characters. Each cause
is one change of a healthy run. A cause counts as named first if what the audit finds first in the run is its name, and
a healthy run counts as a false alarm if the audit finds anything.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import trlx_like
from benchmarks.tasks import POSITIONS, TASKS, random_model
from trlx_like import TRLConfig
from trlx_like.presets import PRESETS
from trlx_like.tracking.audit import audit_run

Reward = Callable[..., list[float]]
RATE = 3e-3
SIZES: dict[str, dict[str, Any]] = {
    "ppo": {"method.num_rollouts": 64, "method.ppo_epochs": 2, "train.batch_size": 32},
    "grpo": {"method.num_prompts": 8, "train.batch_size": 64},
    "rloo": {"method.num_prompts": 8, "train.batch_size": 64},
    "rft": {"method.n_generations_per_prompt": 4, "method.n_improve_steps": 1, "train.batch_size": 32},
    "online_dpo": {"train.batch_size": 32, "method.n_generations_per_prompt": 2},
}
"""Smaller rounds than those of the presets, so that a run has more of them in a few seconds."""
ROUNDS = 14


def constant(outputs: Sequence[str], **_: Any) -> list[float]:
    return [0.0 for _ in outputs]


def rare(outputs: Sequence[str], **_: Any) -> list[float]:
    """One of 48 outputs of random weights has a score."""
    return [float(output.startswith("q")) for output in outputs]


def by_prompt(outputs: Sequence[str], prompts: Sequence[str], **_: Any) -> list[float]:
    return [float(len(prompt)) + ord(prompt[0]) / 100 for prompt in prompts]


def ended(outputs: Sequence[str], output_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Only an output that ends has a score, and only from two characters on."""
    return [float(len(ids) > 2 and ids[-1] == 0) for ids in output_ids]


def hundredfold(reward: Reward) -> Reward:
    return lambda outputs, **columns: [1000 * score + 5000 for score in reward(outputs, **columns)]


@dataclass(frozen=True)
class Plant:
    """Describe a run: a trainer, a task, and for a planted cause what is changed and how the audit calls it."""

    trainer: str
    task: str
    cause: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    reward: Callable[[Reward], Reward] = lambda reward: reward


PLANTS = {
    "a reward that is constant": Plant("ppo", "length", "equal scores", reward=lambda _: constant),
    "a reward of the prompt alone": Plant("grpo", "length", "equal scores", reward=lambda _: by_prompt),
    "pairs that are nearly all ties": Plant("online_dpo", "letters", "equal scores", reward=lambda _: rare),
    "an end that max_new_tokens cuts": Plant(
        "rloo", "length", "responses cut", {"method.gen_kwargs.max_new_tokens": 1}, lambda _: ended
    ),
    "a temperature near 0": Plant("grpo", "letters", "no entropy", {"method.gen_kwargs.temperature": 1e-4}),
    "a learning rate of 1e-7": Plant("ppo", "letters", "too small steps", {"optimizer.kwargs.lr": 1e-7}),
    "a learning rate of 1e-6": Plant("grpo", "length", "too small steps", {"optimizer.kwargs.lr": 1e-6}),
    "a learning rate of .3": Plant("ppo", "length", "too large steps", {"optimizer.kwargs.lr": 0.3}),
    "a learning rate of .1": Plant("grpo", "letters", "too large steps", {"optimizer.kwargs.lr": 0.1}),
    "a KL weight of 30": Plant("ppo", "length", "heavy KL", {"method.init_kl_coef": 30.0}),
    "a KL weight of 10": Plant("rloo", "letters", "heavy KL", {"method.beta": 10.0}),
    "rewards that drown the policy in the value loss": Plant(
        "ppo",
        "letters",
        "blind value function",
        {"method.scale_reward": None, "method.cliprange_reward": None, "method.cliprange_value": None},
        hundredfold,
    ),
    "a policy that is frozen": Plant("ppo", "json", "too small steps", {"model.num_layers_unfrozen": 0}),
    "a clip range of 1e-5": Plant("ppo", "length", "clipped", {"method.cliprange": 1e-5}),
}
HEALTHY = {
    f"{trainer}, {task}": Plant(trainer, task) for task in ("letters", "length", "json", "rhyme") for trainer in SIZES
}


def run(plant: Plant, seed: int) -> dict[str, Any]:
    """Train once; return what the audit found, first things first, and how the score changed."""
    started, task = time.process_time(), TASKS[plant.task]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = PRESETS[plant.trainer]().evolve(
            model={"model_path": str(random_model(folder / "start", seed, width=32))},
            optimizer={"kwargs": {"lr": RATE}},
            method={"gen_kwargs": {"max_new_tokens": 16}},
            train={"seq_length": POSITIONS, "seed": seed, "checkpoint_dir": str(folder / "run"), "epochs": ROUNDS},
        )
        changes = {**SIZES[plant.trainer], "train.eval_interval": 10**6, **plant.changes}
        config = TRLConfig.update(config.to_dict(), {"train.log_samples": 0, **changes})
        made = trlx_like.train(
            config, plant.reward(task.reward(seed)), task.prompts(16, seed), eval_prompts=task.prompts(1, seed)
        )
        audit = audit_run(folder / "run")
    found = sorted(audit.found, key=lambda verdict: verdict.since or 0)
    first, last = audit.history.start("rollout/score_mean"), audit.history.now("rollout/score_mean")
    return {
        "found": [verdict.name for verdict in found],
        "words": found[0].words if found else "",
        "start": first,
        "end": last,
        "rounds": made.progress.round,
        "cpu": time.process_time() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run what has this text in its name")
    parser.add_argument("--healthy", type=int, default=len(HEALTHY), help="number of healthy runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    named, alarms, results = 0, 0, {}
    chosen = {**PLANTS, **dict(list(HEALTHY.items())[: given.healthy])}
    chosen = {name: plant for name, plant in chosen.items() if given.only in name}
    print("| run | score | found, first things first | CPU s |\n|---|---|---|---|")
    for name, plant in chosen.items():
        one = results[name] = run(plant, given.seed)
        named += plant.cause is not None and one["found"][:1] == [plant.cause]
        alarms += plant.cause is None and bool(one["found"])
        found = ", ".join(one["found"]) or "-"
        print(f"| {name} | {one['start']:.3g} to {one['end']:.3g} | {found} | {one['cpu']:.1f} |", flush=True)
    planted = sum(plant.cause is not None for plant in chosen.values())
    print(f"\n{named} of {planted} causes named first; {alarms} false alarms in {len(chosen) - planted} healthy runs.")
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
