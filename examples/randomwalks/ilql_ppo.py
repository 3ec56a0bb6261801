"""ILQL first, then PPO: what was learned from random walks alone is where learning by sampling starts.

    python -m examples.randomwalks.ilql_ppo [--seed 1000] [--directory runs/randomwalks/ilql_ppo]

The folder that ILQL exports is PPO's `model.model_path`. ILQL's `beta` makes its language model, which is what PPO
starts from, imitate good moves more than bad ones: without values to guide it, it scores about .65 then. The table
shows PPO from its step 0 on; with `--seeds 5` both train five times.
"""

from __future__ import annotations

from pathlib import Path

from examples.randomwalks.ilql import train_ilql
from examples.randomwalks.ppo import train_ppo
from examples.randomwalks.seeds import Result, Stopwatch, main, measured


def run(seed: int, directory: Path) -> Result:
    """Both under one seed (the graph stays the same)."""
    watch = Stopwatch()
    train_ilql(directory / "ilql", seed, beta=3.0, awac_clip=20.0).save_pretrained(directory / "ilql" / "hf_model")
    seconds = {"ILQL": watch.lap()}
    train_ppo(directory / "ilql" / "hf_model", directory / "ppo", seed)
    return Result(directory / "ppo", measured(directory / "ppo"), {**seconds, "PPO": watch.lap()})


if __name__ == "__main__":
    main(__doc__, run, Path("runs/randomwalks/ilql_ppo"))
