"""On-policy distillation finds shortest paths without a reward: a model that imitates random walks learns from PPO's.

    python examples/randomwalks/distill.py [reverse_kl | forward_kl | jsd] [--seed 1000]

The teacher is the start model after PPO, and the student is the start model again. The student writes walks and at each
step learns the teacher's distribution of the next node. With `--seeds 10` it trains on ten graphs, with
`--seeds 5 --problem 44` five times on one. The table shows student and teacher.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

from examples.problems import Draw
from examples.randomwalks.ppo import tune
from examples.randomwalks.seeds import Result, Run, Stopwatch, main, measured
from examples.randomwalks.start import start, train_start
from examples.randomwalks.task import RandomWalks, default_task

DIRECTORY = Path("runs/randomwalks/teacher")
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


def teacher() -> str:
    """Return the folder of the teacher, which the first call trains. A YAML file names it as `model.ref_model_path`."""
    model = DIRECTORY / "hf_model"
    if not (model / "model.safetensors").exists():
        tune("ppo", default_task(), Path(start()), DIRECTORY, 1000).save_pretrained(model)
    return str(model)


def run(divergence: str, draw: Draw) -> Result:
    """Train the start model, the teacher by PPO, and the student, on one graph."""
    watch, task, seed = Stopwatch(), RandomWalks(draw.problem), draw.seed
    begin, taught = (draw.directory / name / "hf_model" for name in ("start", "ppo"))
    train_start(draw.directory / "start", task=task, seed=seed).save_pretrained(begin)
    seconds = {"start": watch.lap()}
    tune("ppo", task, begin, draw.directory / "ppo", seed).save_pretrained(taught)
    seconds["ppo"] = watch.lap()
    directory = draw.directory / divergence
    tune("distill", task, begin, directory, seed, reference=taught, divergence=divergence)
    seconds[divergence] = watch.lap()
    return Result(
        directory, measured(directory), seconds, {"the teacher in training": measured(draw.directory / "ppo")}
    )


if __name__ == "__main__":
    runs: dict[str, Run] = {divergence: partial(run, divergence) for divergence in DIVERGENCES}
    main(__doc__, runs, Path("runs/randomwalks"))
