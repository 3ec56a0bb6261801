"""ILQL first, then PPO: PPO starts from a model that ILQL trained on random walks alone.

    python examples/randomwalks/ilql_ppo.py [--seed 1000] [--directory runs/randomwalks/ilql_ppo]

PPO can load the folder that ILQL exports as its `model.model_path`, but it samples from the language model alone,
without ILQL's values. So the language model first imitates, by SFT, walks that the export itself generated guided by
its values. PPO starts from the result. The table shows PPO from its step 0 on, and guided ILQL, at temperatures .1 and
1. `alone` instead runs PPO from random walks for as many CPU seconds; `--seeds 10` trains
on ten graphs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

from examples.problems import Draw
from examples.randomwalks.ilql import BETA, train_ilql
from examples.randomwalks.ppo import tune
from examples.randomwalks.seeds import WALKS, Result, Stopwatch, main, measured
from examples.randomwalks.start import train_start
from examples.randomwalks.task import RandomWalks

# Weights of up to 20 make the imitation term large. At full scale it dominates the shared layers, and Q gets worse.
AWAC = {"beta": 6.0, "awac_clip": 20.0, "awac_scale": 0.2}
ILQL_STEPS = 200
# Softer than in evaluations: if two moves have similar values, PPO sees both and can choose.
GUIDANCE = 10.0
# The start model knows the edges. Without the KL penalty the policy may settle on moves that do not exist from some
# node; with half as many walks per round it may settle on a path that is one step too long.
PPO: dict[str, Any] = {
    **{"batch_size": 128, "num_rollouts": 256, "chunk_size": 256},
    **{"init_kl_coef": 0.01, "whiten_advantages": True, "replay_best": False},
}
PPO_STEPS, ALONE_STEPS = 200, 280
# The temperature of training, and one as sharp as ILQL decodes: beta 100 takes the best action that it knows.
TEMPERATURES = [0.1, 1.0]


def run(draw: Draw) -> Result:
    """Run ILQL, imitation of its guided walks, and PPO on one graph."""
    watch = Stopwatch()
    task, directory, seed = RandomWalks(draw.problem), draw.directory, draw.seed
    exported, imitated = directory / "ilql" / "hf_model", directory / "sft" / "hf_model"
    decoding = {"max_new_tokens": 10, "top_k": 10, "beta": BETA, "temperature": TEMPERATURES}
    ilql = train_ilql(task, directory / "ilql", seed, ILQL_STEPS, **AWAC, gen_kwargs=decoding)
    ilql.save_pretrained(exported)
    seconds = {"ILQL": watch.lap()}
    train_start(directory / "sft", guided_walks(ilql, task), exported, task, seed=seed).save_pretrained(imitated)
    seconds["SFT"] = watch.lap()
    curves = ppo_curves(task, imitated, directory / "ppo", seed, PPO_STEPS)
    seconds["PPO"] = watch.lap()
    guided = {f"ILQL guided, {name}": curve for name, curve in curves_of(directory / "ilql").items()}
    return Result(directory / "ppo", curves.pop("temperature 0.1"), seconds, curves | guided)


def guided_walks(ilql: Any, task: RandomWalks) -> list[tuple[str, str]]:
    """Sample (node, rest of the walk) guided by the values of a trained `ILQLTrainer`, equally often from each node."""
    starts = task.prompts * WALKS
    return list(zip(starts, ilql.decode(ilql.generate_eval(starts, beta=GUIDANCE, temperature=1.0)), strict=True))


def alone(draw: Draw) -> Result:
    """Run the same PPO from a model that imitates random walks, for as many CPU seconds as `run`."""
    watch = Stopwatch()
    task, directory, seed = RandomWalks(draw.problem), draw.directory, draw.seed
    start = directory / "start" / "hf_model"
    train_start(directory / "start", task=task, seed=seed).save_pretrained(start)
    seconds = {"SFT": watch.lap()}
    curves = ppo_curves(task, start, directory / "alone", seed, ALONE_STEPS)
    return Result(directory / "alone", curves.pop("temperature 0.1"), {**seconds, "PPO": watch.lap()}, curves)


def ppo_curves(task: RandomWalks, model: Path, directory: Path, seed: int, steps: int) -> dict[str, list[float]]:
    """Train PPO from the model in a folder; return the optimality at each evaluation, by temperature."""
    decoding = {"max_new_tokens": 10, "temperature": TEMPERATURES}
    options = {**PPO, "gen_kwargs": decoding, "gen_experience_kwargs": {"max_new_tokens": 10}}
    tune("ppo", task, model, directory, seed, steps, **options)
    return curves_of(directory)


def curves_of(directory: Path) -> dict[str, list[float]]:
    """Return the optimality at each evaluation of the run in a folder, by temperature."""
    return {f"temperature {t}": measured(directory, f"metrics/optimality@temperature={t}") for t in TEMPERATURES}


if __name__ == "__main__":
    main(__doc__, {"both": run, "alone": alone}, Path("runs/randomwalks/ilql_ppo"))
