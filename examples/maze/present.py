"""ILQL on the maze with a model that reads the present observation alone, as in the data of LMRL-Gym.

    python examples/maze/present.py [--seed 1] [--seeds 3] [--problem 0] [--directory runs/maze_present]

It is the ILQL of `examples/maze`, on the same data, with three changes. Each token sees itself and no earlier one (a
sliding window of one token), since where the player stands is all that counts. Weights begin 20 times as large, so that
the cells stay apart while the layers learn, and the learning rate is twice as high. Mazes 21 and 25 chose them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

from examples import configurations
from examples.maze.__main__ import BETA, bounds, episodes
from examples.maze.task import (
    BOS,
    EOS,
    LIMIT,
    PAD,
    Maze,
    eval_prompts,
    metric_fn,
    scaled_rewards,
    tokenizer,
    tokens,
    wander,
)
from examples.play import Result, main, play_trained
from examples.problems import Draw

if TYPE_CHECKING:
    from transformers import MistralConfig


def model_config(maze: Maze) -> MistralConfig:
    """Configure 2 layers of width 64 that see one token at a time."""
    from transformers import MistralConfig

    ids = tokens(maze)
    return MistralConfig(
        vocab_size=len(ids),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * (LIMIT + 1) + 2,
        sliding_window=1,
        initializer_range=1.0,
        bos_token_id=ids.index(BOS),
        eos_token_id=ids.index(EOS),
        pad_token_id=ids.index(PAD),
    )


def run(draw: Draw) -> list[Result]:
    """Run ILQL on one maze."""
    maze = Maze.drawn(draw.problem)
    data = wander(maze)
    config = configurations.load("ilql_maze").evolve(
        optimizer={"kwargs": {"lr": 6e-3, "betas": [0.9, 0.95]}},
        train={"seed": draw.seed, "checkpoint_dir": str(draw.directory), "resume_from_checkpoint": None},
    )
    parts = {"model_path": model_config(maze), "tokenizer": tokenizer(maze)}
    watched = {"eval_prompts": eval_prompts(maze), "metric_fn": partial(metric_fn, maze=maze)}
    games, ways = partial(episodes, maze), {f"ILQL, beta {BETA}": {"beta": BETA}}
    return play_trained(config, data.samples, scaled_rewards(data), games, ways, **parts, **watched)


if __name__ == "__main__":
    main(__doc__, run, bounds, Path("runs/maze_present"), "maze")
