"""The fully observed maze of LMRL-Gym as a language task: an observation is a sentence, a move is a word.

The task is that of Abdulhai et al. 2023, "LMRL Gym: Benchmarks for Multi-Turn Reinforcement Learning with Language
Models", arXiv:2311.18232: a maze of two T-shaped halls whose stems meet above the goal. Each turn the player reads
where the goal is, where it stands and which walls are near, and says a direction. Every turn costs 1, even if the move
hits a wall or the words are not a move; the move that reaches the goal costs nothing. After 100 moves a last reward of
-1 ends the episode. So scores go from -101 to 0. On average over the 25 starts, shortest paths score -6.84 and
uniformly random moves -85.9.

The sentences, the data and this code are our own. LMRL-Gym charges 4 for words that are not a move; its data is unused.

The data (`samples`, `rewards`) are episodes of a policy that takes a step of a shortest path with probability `SKILL`,
and otherwise any of the four moves. A whole episode is one dialogue, with one reward per turn.

A YAML run needs no script: `data.samples: examples/maze/task.py:samples` and likewise `rewards`, `eval_prompts` and
`metric_fn` refer to the functions at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import MistralConfig, PreTrainedTokenizerFast

PLAN = """
#############
#     #     #
### ##### ###
### ##### ###
### ##### ###
###       ###
###### ######
###### ######
######G######
#############
"""
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
WALLS = {"left": "to your left", "right": "to your right", "up": "above", "down": "below"}
LIMIT = 100
EPISODES = 640
SKILL = 0.15
REWARD_UNIT = 10
DATA_SEED = 1
BOS, EOS, PAD, UNKNOWN = "<|bos|>", "<|eos|>", "<|pad|>", "<|unknown|>"

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Maze:
    """Hold the maze as numbered cells: where each move leads, the distance to the goal, and the observations.

    In the lines of a plan "#" is a wall and "G" the goal.
    """

    def __init__(self, plan: str = PLAN) -> None:
        lines = plan.strip("\n").splitlines()
        self.cells = [(r, c) for r, line in enumerate(lines) for c, mark in enumerate(line) if mark != "#"]
        number = {cell: index for index, cell in enumerate(self.cells)}
        self.goal = next(number[cell] for cell in self.cells if lines[cell[0]][cell[1]] == "G")
        self.starts = [cell for cell in range(len(self.cells)) if cell != self.goal]
        self.following: Ints = np.array(
            [
                [number.get((row + down, column + right), here) for down, right in MOVES.values()]
                for here, (row, column) in enumerate(self.cells)
            ]
        )  # [N, 4], the cell after each move, unchanged at a wall
        self.distance = self._distances()  # [N], moves to the goal
        self.observations = [self._describe(cell) for cell in range(len(self.cells))]

    @classmethod
    def drawn(cls, number: int) -> Maze:
        """Return the benchmark's maze for 0, and for any other number a random one without loops, of 29 cells."""
        return cls(random_plan(np.random.default_rng(number))) if number else default_maze()

    def _distances(self) -> Ints:
        distance = np.full(len(self.cells), len(self.cells))
        distance[self.goal] = 0
        for _ in self.cells:
            distance = np.minimum(distance, 1 + distance[self.following].min(axis=1))
        return distance

    def _describe(self, cell: int) -> str:
        row, column = self.cells[cell]
        near = [WALLS[move] for move, after in zip(MOVES, self.following[cell], strict=True) if after == cell]
        goal = "The goal is at {}, {}.".format(*self.cells[self.goal])
        return f"{goal} You are at {row}, {column}. Walls: {', '.join(near) or 'none'}.\n"

    def rewards(self) -> Floats:
        """Return the reward of each move [N, 4]: 0 if it reaches the goal, else -1."""
        return np.where(self.following == self.goal, 0.0, -1.0)

    def policy(self, skill: float) -> Floats:
        """Return probabilities [N, 4]: with probability `skill` a step of a shortest path, else any move."""
        ahead = self.distance[self.following]
        best = ahead == ahead.min(axis=1, keepdims=True)
        policy: Floats = skill * best / best.sum(axis=1, keepdims=True) + (1 - skill) / len(MOVES)
        return policy

    def expected_scores(self, policy: Floats) -> Floats:
        """Compute the exact expected score from each cell under move probabilities: [N, 4] -> [N]. The goal has 0."""
        score = np.where(np.arange(len(self.cells)) == self.goal, 0.0, -1.0)  # too late
        for _ in range(LIMIT):
            score = (policy * (self.rewards() + score[self.following])).sum(axis=1)
            score[self.goal] = 0.0
        return score

    def expected_score(self, policy: Floats) -> float:
        """Compute the mean of `expected_scores` over the starts."""
        return float(self.expected_scores(policy)[self.starts].mean())


def random_plan(rng: np.random.Generator, rows: int = 3, columns: int = 5) -> str:
    """Draw a maze with one way between any two cells: rooms on a grid, joined by a random walk that backtracks."""
    plan = np.full((2 * rows + 1, 2 * columns + 1), "#")
    way = [(0, 0)]
    plan[1, 1] = " "
    while way:
        row, column = way[-1]
        near = [(row + down, column + right) for down, right in MOVES.values()]
        closed = [(r, c) for r, c in near if 0 <= r < rows and 0 <= c < columns and plan[2 * r + 1, 2 * c + 1] == "#"]
        if not closed:
            way.pop()
            continue
        way.append(closed[int(rng.integers(len(closed)))])
        plan[2 * way[-1][0] + 1, 2 * way[-1][1] + 1] = " "
        plan[row + way[-1][0] + 1, column + way[-1][1] + 1] = " "  # the wall between the two
    rooms = np.argwhere(plan == " ")
    plan[tuple(rooms[rng.integers(len(rooms))])] = "G"
    return "\n".join("".join(line) for line in plan)


class Walk:
    """Play one episode from a start cell: an `examples.play.Episode`."""

    def __init__(self, maze: Maze, start: int) -> None:
        self.maze, self.cell = maze, start
        self.turns = [maze.observations[start]]
        self.rewards: list[float] = []
        self.over = False

    @property
    def text(self) -> str:
        return "".join(self.turns)

    @property
    def score(self) -> float:
        return sum(self.rewards)

    def say(self, words: str) -> None:
        """Make a move; other words only count as a turn. The goal, or a turn after the first `LIMIT`, ends the game."""
        move = list(MOVES).index(words.strip()) if words.strip() in MOVES else None
        late = len(self.rewards) == LIMIT
        if move is not None and not late:
            self.cell = int(self.maze.following[self.cell, move])
        arrived = self.cell == self.maze.goal
        self.rewards.append(0.0 if arrived else -1.0)
        self.over = arrived or late
        self.turns += [words] if self.over else [words, self.maze.observations[self.cell]]


@dataclass
class Data:
    """Hold episodes to learn from."""

    walks: list[Walk]

    def __post_init__(self) -> None:
        self.samples = [walk.turns for walk in self.walks]
        self.rewards = [walk.rewards for walk in self.walks]


def wander(maze: Maze, episodes: int = EPISODES, skill: float = SKILL, seed: int = DATA_SEED) -> Data:
    """Play episodes of `Maze.policy(skill)`, from each start in turn."""
    rng = np.random.default_rng(seed)
    policy, words = maze.policy(skill), [f"{move}\n" for move in MOVES]
    walks = [Walk(maze, maze.starts[index % len(maze.starts)]) for index in range(episodes)]
    for walk in walks:
        while not walk.over:
            walk.say(words[rng.choice(len(words), p=policy[walk.cell])])
    return Data(walks)


def tokenizer(maze: Maze | None = None) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per line: observations, 4 moves and special tokens. It pads on the left."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    lines = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens(maze))}, UNKNOWN))
    lines.pre_tokenizer = pre_tokenizers.Split("\n", "merged_with_previous")
    lines.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=lines,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
    )


def tokens(maze: Maze | None = None) -> list[str]:
    """List the vocabulary in the order of its ids."""
    maze = maze or default_maze()
    return [
        *(f"{move}\n" for move in MOVES),
        *(maze.observations[cell] for cell in maze.starts),
        BOS,
        EOS,
        PAD,
        UNKNOWN,
    ]


def model_config(maze: Maze | None = None) -> MistralConfig:
    """Configure 2 layers of width 64, 0.1 million parameters, that read the present observation alone.

    The observation says in which cell the player stands, and the rest of the game depends on nothing else (but for the
    limit of moves). So a token sees itself and no earlier one: a sliding window of one token. Weights begin 50 times as
    large as usual; with small ones the values of all cells move together, and Q of some cells stays wrong.
    """
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


@cache
def default_maze() -> Maze:
    """Return the maze that the functions below share."""
    return Maze()


@cache
def default_data() -> Data:
    """Return the episodes that the functions below share."""
    return wander(default_maze())


def samples() -> list[list[str]]:
    """Return dialogues: observation, move, observation, move, ..."""
    return default_data().samples


def rewards() -> list[list[float]]:
    """Return the reward of each move of each dialogue, divided by ten, so that values lie between -2 and 0.

    With values down to -14, the squared errors of Q would outweigh the language-model loss on the shared weights.
    """
    return scaled_rewards(default_data())


def scaled_rewards(data: Data) -> list[list[float]]:
    """Return the rewards of episodes in units of `REWARD_UNIT` moves."""
    return [[reward / REWARD_UNIT for reward in walk] for walk in data.rewards]


def eval_prompts(maze: Maze | None = None) -> list[str]:
    """Return the first observation from each start."""
    maze = maze or default_maze()
    return [maze.observations[cell] for cell in maze.starts]


def metric_fn(
    prompts: Sequence[str], outputs: Sequence[str], maze: Maze | None = None, **_: object
) -> dict[str, list[float]]:
    """Measure "shortest": 1 for each first move that begins a shortest path, else 0."""
    maze = maze or default_maze()
    good = maze.policy(1.0) > 0
    cells = [maze.observations.index(prompt) for prompt in prompts]
    said = [list(MOVES).index(word.strip()) if word.strip() in MOVES else None for word in outputs]
    return {"shortest": [float(move is not None and good[cell, move]) for cell, move in zip(cells, said, strict=True)]}
