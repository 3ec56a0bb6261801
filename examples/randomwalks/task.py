"""Shortest paths on a random directed graph, as a language task: a letter is a node, and a string is a walk.

The task is the one of Decision Transformer (Chen et al. 2021, arXiv:2106.01345, sec. 1, "illustrative
example") in the size that trlX uses it: 21 nodes "a" to "u", goal "a", each edge present with probability
.1, walks of at most 10 nodes. A model first imitates 1000 random walks, then has to find the shortest walk
from each node to the goal. "bdca" starts at b and reaches the goal in 4 nodes.

Every node can reach the goal in fewer than `MAX_LENGTH` nodes, whatever the seed: other graphs are drawn again.

A YAML run needs no script: `data.prompts: examples/randomwalks/task.py:prompts` and likewise `eval_prompts`,
`samples`, `rewards`, `reward_fn`, `metric_fn` refer to the functions at the end, which share one graph
(`DEFAULT_SEED`).
Only `tokenizer`, `model_config` and `RandomWalks.logit_mask` import torch or transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trlx_like.errors import DataError

if TYPE_CHECKING:
    import torch
    from transformers import GPT2Config, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstu"
GOAL = 0
EDGE_PROBABILITY = 0.1
MAX_LENGTH = 10
WALKS = 1000
DEFAULT_SEED = 44  # random walks score .32 here; shortest walks have 3.6 nodes on average, 5 at most
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
TOKENS = (*LETTERS, BOS, EOS, PAD)

Adjacency = npt.NDArray[np.bool_]  # [N, N], True if an edge leads from the row's node to the column's


class RandomWalks:
    """Hold one graph with its random walks and its measure of success.

    Args:
        seed: Seed of the edges and of the walks.
        adjacency: A graph to use in place of a random one, [N, N] bool with N <= 21; node 0 is the goal.

    Raises `DataError` if some node does not reach the goal in fewer than `MAX_LENGTH` nodes.
    """

    def __init__(self, seed: int = DEFAULT_SEED, adjacency: Adjacency | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.adjacency = random_digraph(rng) if adjacency is None else adjacency
        self.shortest = shortest_lengths(self.adjacency)  # [N]
        stuck = [LETTERS[node] for node in np.flatnonzero(self.shortest >= MAX_LENGTH)]
        if stuck:
            raise DataError(f"adjacency: {stuck} must reach the goal in fewer than {MAX_LENGTH} nodes.")
        self.samples = self._walks(rng)
        self.prompts = list(LETTERS[GOAL + 1 : len(self.adjacency)])
        self.eval_prompts = self.prompts

    def _walks(self, rng: np.random.Generator) -> list[str]:
        """Draw walks from random nodes along random edges, each to the goal or to `MAX_LENGTH` nodes."""
        successors = [np.flatnonzero(row).tolist() for row in self.adjacency]
        walks = []
        for start in rng.integers(GOAL + 1, len(self.adjacency), WALKS):
            walk = [int(start)]
            while walk[-1] != GOAL and len(walk) < MAX_LENGTH:
                choices = successors[walk[-1]]
                walk.append(choices[int(rng.integers(len(choices)))])
            walks.append("".join(LETTERS[node] for node in walk))
        return walks

    def length(self, walk: str) -> int | None:
        """Count the nodes of a walk, including both ends.

        None if it takes a missing edge, has a letter that is not a node, or does not end when it first reaches
        the goal: a model has to know when to stop.
        """
        nodes = [LETTERS.find(letter) for letter in walk]
        known = all(0 <= node < len(self.adjacency) for node in nodes)
        ends = nodes.count(GOAL) == 1 and nodes[-1] == GOAL
        if ends and known and all(self.adjacency[edge] for edge in pairwise(nodes)):
            return len(nodes)
        return None

    def optimality(self, samples: Sequence[str]) -> list[float]:
        """Score walks: (MAX_LENGTH - length) / (MAX_LENGTH - shortest), or 0 if a walk fails or is too long.

        The score is 1 for a shortest walk, and falls in equal steps with each further node, to 0 at MAX_LENGTH
        nodes. If the shortest walk has 4 nodes: 4 -> 6/6, 5 -> 5/6, 9 -> 1/6, 10 -> 0. The scale is that of
        trlX's "optimality".
        """
        return [self._optimality(walk) for walk in samples]

    def _optimality(self, walk: str) -> float:
        length = self.length(walk)
        if length is None:
            return 0.0
        shortest = self.shortest[LETTERS.find(walk[0])]
        return max(0.0, float((MAX_LENGTH - length) / (MAX_LENGTH - shortest)))

    def reward_fn(self, samples: Sequence[str], **_: object) -> list[float]:
        """Return the optimality of each sample, which is a walk that begins with its prompt."""
        return self.optimality(samples)

    def metric_fn(self, samples: Sequence[str], **_: object) -> dict[str, list[float]]:
        """Return the optimality of each sample as the metric "optimality"."""
        return {"optimality": self.optimality(samples)}

    def logit_mask(self) -> torch.Tensor:
        """Return a table [V, V] bool, True where the token of the column may follow that of the row.

        Allowed are edges of the graph, and EOS after any node; after the goal only EOS is allowed. A text may
        begin at any node except the goal.
        """
        import torch

        nodes, eos, pad = len(self.adjacency), TOKENS.index(EOS), TOKENS.index(PAD)
        mask = torch.zeros(len(TOKENS), len(TOKENS), dtype=torch.bool)
        mask[:nodes, :nodes] = torch.from_numpy(self.adjacency)
        mask[GOAL] = False
        mask[TOKENS.index(BOS), GOAL + 1 : nodes] = True
        mask[:, eos] = True
        mask[[eos, pad], pad] = True
        return mask


def random_digraph(rng: np.random.Generator) -> Adjacency:
    """Draw edges with probability `EDGE_PROBABILITY`, without loops and without edges out of the goal.

    Draws again until all nodes reach the goal in fewer than `MAX_LENGTH` nodes, since optimality divides by the rest.
    """
    while True:
        adjacency: Adjacency = rng.random((len(LETTERS), len(LETTERS))) < EDGE_PROBABILITY
        np.fill_diagonal(adjacency, False)
        adjacency[GOAL] = False
        if shortest_lengths(adjacency).max() < MAX_LENGTH:
            return adjacency


def shortest_lengths(adjacency: Adjacency) -> npt.NDArray[np.float64]:
    """Count the nodes on the shortest walk from each node to the goal, both ends included [N]; inf if there is none."""
    lengths = np.full(len(adjacency), np.inf)
    reached = np.arange(len(adjacency)) == GOAL
    count = 1
    while reached.any():
        lengths[reached] = count
        count += 1
        reached = adjacency[:, reached].any(1) & np.isinf(lengths)
    return lengths


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per letter, 24 with `BOS`, `EOS` and `PAD`. It adds nothing and pads left."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, bos_token=BOS, eos_token=EOS, pad_token=PAD, padding_side="left"
    )


def model_config() -> GPT2Config:
    """Configure a GPT-2 with 6 layers of width 144 (trlX's size), 1.5 million parameters, for `tokenizer`.

    16 positions hold the longest walk and EOS. There is no dropout, because the probability ratio of a policy
    gradient compares two forward passes of one model.
    """
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=len(TOKENS),
        n_positions=16,
        n_embd=144,
        n_layer=6,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=TOKENS.index(BOS),
        eos_token_id=TOKENS.index(EOS),
        pad_token_id=TOKENS.index(PAD),
    )


@cache
def default_task() -> RandomWalks:
    """Return the graph that the functions below share."""
    return RandomWalks()


def prompts() -> list[str]:
    """Return one letter for each start node."""
    return default_task().prompts


def eval_prompts() -> list[str]:
    """Return the same start nodes: the task is to know this graph."""
    return default_task().eval_prompts


def samples() -> list[str]:
    """Return the random walks to imitate first."""
    return default_task().samples


def rewards() -> list[float]:
    """Return the optimality of each random walk, in [0, 1]."""
    return default_task().optimality(samples())


def reward_fn(samples: Sequence[str], **_: object) -> list[float]:
    """Return the optimality of each walk, in [0, 1]."""
    return default_task().reward_fn(samples)


def metric_fn(samples: Sequence[str], **_: object) -> dict[str, list[float]]:
    """Return the optimality of each walk as the metric "optimality"."""
    return default_task().metric_fn(samples)
