"""ILQL first, then PPO: what was learned from random walks alone is where learning by sampling starts.

    python -m examples.randomwalks.ilql_ppo [--seed 1000] [--directory runs/randomwalks/ilql_ppo]

The folder that ILQL exports is PPO's `model.model_path`: PPO starts from the language model, which values no longer
guide. So the values have to be in the language model by then: ILQL's `method.beta` weights what it imitates by
exp(beta A), as in AWAC. The table shows PPO from its step 0 on, at a temperature of .1; with `--seeds 5` both train
five times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.randomwalks.ilql import train_ilql
from examples.randomwalks.ppo import train_ppo
from examples.randomwalks.seeds import Result, Stopwatch, main, measured

# Weights of up to 20 make the imitation term large; at full scale it takes the layers for itself, and Q gets worse.
AWAC = {"beta": 6.0, "awac_clip": 20.0, "awac_scale": 0.2}
ILQL_STEPS = 200
# The start knows the edges. Without the KL penalty a policy may settle on moves that do not exist from some node, and
# with half as many walks in a round on one that is a step too long.
PPO: dict[str, Any] = {"steps": 200, "batch_size": 128, "num_rollouts": 256, "chunk_size": 256, "init_kl_coef": 0.01}
# Evaluated as sharply as ILQL is, whose beta of 100 takes the best action it knows, and as it is trained.
DECODING: dict[str, Any] = {
    "gen_kwargs": {"max_new_tokens": 10, "temperature": [0.1, 1.0]},
    "gen_experience_kwargs": {"max_new_tokens": 10},
}


def run(seed: int, directory: Path) -> Result:
    """Both under one seed (the graph stays the same)."""
    watch = Stopwatch()
    train_ilql(directory / "ilql", seed, ILQL_STEPS, **AWAC).save_pretrained(directory / "ilql" / "hf_model")
    seconds = {"ILQL": watch.lap()}
    train_ppo(directory / "ilql" / "hf_model", directory / "ppo", seed, **PPO, **DECODING)
    curve = measured(directory / "ppo", "metrics/optimality@temperature=0.1")
    return Result(directory / "ppo", curve, {**seconds, "PPO": watch.lap()})


if __name__ == "__main__":
    main(__doc__, run, Path("runs/randomwalks/ilql_ppo"))
