"""The randomwalks example: optimality by hand, every graph solvable, the letter tokenizer and the mask."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.randomwalks import task
from examples.randomwalks.task import BOS, EOS, LETTERS, MAX_LENGTH, PAD, TOKENS, RandomWalks
from trlx_like.errors import DataError


def graph(edges: str, nodes: int) -> np.ndarray:
    """ "ba cb" is b -> a, c -> b."""
    adjacency = np.zeros((nodes, nodes), dtype=bool)
    for edge in edges.split():
        adjacency[LETTERS.index(edge[0]), LETTERS.index(edge[1])] = True
    return adjacency


@pytest.fixture(scope="module")
def small() -> RandomWalks:
    """a <-> b <-> c, d -> b, d -> c: shortest walks have 1, 2, 3, 3 nodes from a, b, c, d; none leaves a."""
    return RandomWalks(adjacency=graph("ab ba bc cb db dc", nodes=4))


@pytest.mark.parametrize(
    ("walk", "expected"),
    [
        ("ba", 1.0),  # 2 nodes of 2: (10 - 2) / (10 - 2)
        ("dba", 1.0),  # 3 nodes of 3: 7 / 7
        ("dcba", 6 / 7),  # 4 nodes, shortest 3: (10 - 4) / (10 - 3)
        ("bcbcbcba", 0.25),  # 8 nodes, shortest 2: (10 - 8) / (10 - 2)
        ("bcbcbcbcba", 0.0),  # 10 nodes: arrives with the last
        ("bcbcbcbcbcba", 0.0),  # 12 nodes: too long, not negative
        ("a", 1.0),  # at the goal already: 1 node of 1
        ("bab", 0.0),  # does not stop at the goal
        ("baba", 0.0),
        ("ba" + EOS, 0.0),  # the end is no letter; texts come without it
        ("da", 0.0),  # no such edge
        ("dcb", 0.0),  # never arrives
        ("d" + EOS + "ba", 0.0),  # "<" is not a letter of the graph
        ("deba", 0.0),  # a letter of the alphabet, but not of this graph
        ("zba", 0.0),
        ("", 0.0),
    ],
)
def test_optimality_by_hand(small: RandomWalks, walk: str, expected: float) -> None:
    assert small.optimality([walk]) == [pytest.approx(expected)]


def test_reward_and_metric_keep_the_order_of_a_batch(small: RandomWalks) -> None:
    batch, expected = ["da", "ba", "dcba"], [0.0, 1.0, pytest.approx(6 / 7)]
    assert small.reward_fn(samples=batch, prompts=["d", "b", "d"], tokenizer=None) == expected
    assert small.metric_fn(samples=batch, outputs=["a", "a", "cba"]) == {"optimality": expected}


def test_every_node_reaches_the_goal_for_200_seeds() -> None:
    """By powers of the adjacency matrix, which the code does not use. trlX's graphs fail at 1001 and 1003."""
    for seed in [*range(198), 1001, 1003]:
        adjacency = task.random_digraph(np.random.default_rng(seed))
        walks = np.eye(len(LETTERS), dtype=int)  # [i, j] number of walks of `nodes` nodes from i to j
        first = np.zeros(len(LETTERS), dtype=int)
        for nodes in range(1, MAX_LENGTH):
            first[(walks[:, task.GOAL] > 0) & (first == 0)] = nodes
            walks = walks @ adjacency
        assert first.min() == 1, f"seed {seed}: nodes {np.flatnonzero(first == 0)} never arrive"
        assert first.tolist() == task.shortest_lengths(adjacency).tolist()
        assert not adjacency.diagonal().any()
        assert not adjacency[task.GOAL].any()


def test_a_graph_with_a_stuck_node_is_refused() -> None:
    with pytest.raises(DataError, match=r"\['c', 'd'\] must reach the goal"):
        RandomWalks(adjacency=graph("ba cd dc", nodes=4))


def test_samples_are_walks_along_edges_that_stop_at_the_goal() -> None:
    walks = RandomWalks(seed=3)
    assert len(walks.samples) == 1000
    for sample in walks.samples:
        nodes = [LETTERS.index(letter) for letter in sample]
        assert all(walks.adjacency[a, b] for a, b in zip(nodes, nodes[1:], strict=False))
        assert task.GOAL not in nodes[:-1]
        assert nodes[-1] == task.GOAL or len(nodes) == MAX_LENGTH
    assert {sample[0] for sample in walks.samples} == set(walks.prompts) == set(LETTERS[1:])


def test_the_seed_decides_the_task() -> None:
    one, same, other = RandomWalks(5), RandomWalks(5), RandomWalks(6)
    assert one.samples == same.samples
    assert (one.adjacency == same.adjacency).all()
    assert one.samples != other.samples
    assert (one.adjacency != other.adjacency).any()


def test_shortest_walks_through_the_functions_for_yaml_score_one() -> None:
    walks = task.default_task()
    best = [_descend(walks, start) for start in task.prompts()]
    assert task.reward_fn(best, prompts=task.prompts(), outputs=best) == [1.0] * 20
    assert task.metric_fn(best, tokenizer=None) == {"optimality": [1.0] * 20}
    random_walks = float(np.mean(task.reward_fn(task.samples())))
    assert 0.25 < random_walks < 0.4  # where imitation starts, far enough from 1 to learn something


def _descend(walks: RandomWalks, start: str) -> str:
    """From `start` always to a neighbour nearest to the goal."""
    nodes = [LETTERS.index(start)]
    while nodes[-1] != task.GOAL:
        neighbours = np.flatnonzero(walks.adjacency[nodes[-1]])
        nodes.append(int(neighbours[walks.shortest[neighbours].argmin()]))
    return "".join(LETTERS[node] for node in nodes)


def test_the_mask_allows_edges_and_the_end(small: RandomWalks) -> None:
    mask = small.logit_mask()
    allowed = {TOKENS[i]: {TOKENS[j] for j in row.nonzero()[:, 0].tolist()} for i, row in enumerate(mask)}
    assert allowed["a"] == {EOS}
    assert allowed["b"] == {"a", "c", EOS}
    assert allowed["c"] == {"b", EOS}
    assert allowed["d"] == {"b", "c", EOS}
    assert allowed[BOS] == {"b", "c", "d", EOS}
    assert all(PAD not in allowed[letter] for letter in LETTERS)
    assert mask.any(1).all()  # no row forbids everything


def test_one_letter_is_one_token_and_comes_back_without_spaces(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    task.tokenizer().save_pretrained(tmp_path)
    for tokenizer in (task.tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        assert len(tokenizer) == 24
        assert tokenizer.encode("bdca") == [1, 3, 2, 0]
        assert tokenizer.decode([1, 3, 2, 0]) == "bdca"
        assert tokenizer.encode("ba" + EOS) == [1, 0, tokenizer.eos_token_id]
        assert (
            tokenizer.decode([tokenizer.pad_token_id, 1, 0, tokenizer.eos_token_id], skip_special_tokens=True) == "ba"
        )
        assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
        assert tokenizer.padding_side == "left"


def test_the_model_fits_the_tokenizer() -> None:
    config, tokenizer = task.model_config(), task.tokenizer()
    assert (config.n_layer, config.n_embd, config.vocab_size) == (6, 144, len(tokenizer))
    assert config.n_positions > MAX_LENGTH  # a walk and its end
    assert (config.bos_token_id, config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert config.pad_token_id == tokenizer.pad_token_id


def test_the_rewards_need_no_torch() -> None:
    code = "import sys; from examples.randomwalks import task; task.prompts(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
