"""Solve randomwalks exactly: the best policy, the value of any policy token by token, and the fixed point of ILQL.

A state is a walk so far, since a model sees all of it. Only walks along edges, of fewer than `MAX_LENGTH` nodes and not
beyond the goal, can still score; there are a few ten thousand on a graph. Every other token leads to a score of 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from examples.randomwalks.task import EOS, GOAL, LETTERS, MAX_LENGTH, TOKENS, RandomWalks
from examples.values import Floats, expectiles
from trlx_like.pipelines.returns import standardized

END = TOKENS.index(EOS)


class States:
    """All walks of a graph that can still score, with the recursion of values over them.

    Args:
        task: The graph.
        longest: The largest number of nodes.
    """

    def __init__(self, task: RandomWalks, longest: int = MAX_LENGTH - 1) -> None:
        self.task = task
        self.walks = list(task.prompts)
        self.parent = [-1] * len(self.walks)  # the state before the last letter; -1 for a start
        successors = {
            letter: np.flatnonzero(row).tolist() for letter, row in zip(LETTERS, task.adjacency, strict=False)
        }
        for state, walk in enumerate(self.walks):  # the list grows, in order of length
            if len(walk) < longest:
                self.walks += [walk + LETTERS[node] for node in successors[walk[-1]]]
                self.parent += [state] * len(successors[walk[-1]])
        self.number = {walk: state for state, walk in enumerate(self.walks)}
        self.token = np.array([LETTERS.index(walk[-1]) for walk in self.walks])  # [N]
        self.length = np.array([len(walk) for walk in self.walks])  # [N]
        self.scores = np.array(task.optimality(self.walks))  # [N], if the walk ends here
        self.distance = task.shortest[self.token].astype(int) - 1  # [N], moves to the goal
        self.start = self.length == 1
        self.children = np.zeros((len(self.walks), len(TOKENS)), dtype=bool)  # [N, V]
        for state, before in enumerate(self.parent):
            if before >= 0:
                self.children[before, self.token[state]] = True

    def values(self, choose: Callable[[int, Floats], float], ends: Floats | None = None) -> tuple[Floats, Floats]:
        """Compute Q of every token and V of every state, from the longest walks to the shortest.

        Args:
            choose: Gives V of a state from its number and its Q [V].
            ends: The score of ending in each state; by default that of the walk. [N]

        Returns:
            Q [N, V] and V [N].
        """
        q, v = np.zeros(self.children.shape), np.zeros(len(self.walks))
        q[:, END] = self.scores if ends is None else ends
        for state in reversed(range(len(self.walks))):
            v[state] = choose(state, q[state])
            if self.parent[state] >= 0:
                q[self.parent[state], self.token[state]] = v[state]
        return q, v

    def best(self) -> tuple[Floats, Floats]:
        """Compute Q [N, V] and V [N] of the best policy."""
        return self.values(lambda _, q: float(q.max()))

    def of(self, policy: Floats, ends: Floats | None = None) -> tuple[Floats, Floats]:
        """Compute Q [N, V] and V [N] of a policy [N, V], with other scores of ending if `ends` [N] is given."""
        return self.values(lambda state, q: float(policy[state] @ q), ends)

    def visits(self, policy: Floats) -> Floats:
        """Compute how often a walk of a policy [N, V] passes each state, from starts drawn uniformly. [N]"""
        reached = np.where(self.start, 1 / self.start.sum(), 0.0)
        for state, before in enumerate(self.parent):
            if before >= 0:
                reached[state] = reached[before] * policy[before, self.token[state]]
        return reached

    def random_walk(self) -> Floats:
        """Return the policy that made the data: any edge, and the end at the goal. [N, V]"""
        policy = self.children.astype(float)
        policy[self.token == GOAL, END] = 1.0
        policy /= np.maximum(policy.sum(axis=1, keepdims=True), 1.0)
        return policy


def ilql_fixed_point(task: RandomWalks, tau: float, gamma: float) -> tuple[States, Floats, Floats]:
    """Compute what ILQL's Q and V would be with infinite data and no network.

    Args:
        task: The graph. Rewards are standardised over its 1,000 walks, as the trainer does.
        tau: The expectile.
        gamma: The discount of a token.

    Returns:
        The states, among them the walks that end without the goal, Q [N, V] and V [N]. V(s) is the tau-expectile of
        Q(s, a) over the moves of the data; Q(s, a) is gamma V(s'), and the reward at the end.
    """
    states = States(task, MAX_LENGTH)
    rewards = task.optimality(task.samples)
    found = np.array(standardized(rewards), dtype=float)
    low, unit = found.min(), (found.max() - found.min()) / (max(rewards) - min(rewards))
    policy = states.random_walk()
    policy[states.length == MAX_LENGTH, END] = 1.0

    def choose(state: int, q: Floats) -> float:
        taken = policy[state] > 0
        following = np.where(np.arange(len(q)) == END, q, gamma * q)
        return float(expectiles(following[None, taken], policy[state][None, taken], tau)[0])

    q, v = states.values(choose, low + unit * (states.scores - min(rewards)))
    q[:, :END] *= gamma
    return states, q, v


def guided_score(states: States, q: Floats, v: Floats, beta: float) -> float:
    """Compute the expected score of decoding exact values: the data's policy times e^(beta (Q - V)).

    If this is below 1, the fixed point of the losses itself prefers a longer way, and no amount of training mends that.

    Args:
        states: The states of `ilql_fixed_point`.
        q: Q of every token. [N, V]
        v: V of every state. [N]
        beta: The weight of the advantage.
    """
    policy = states.random_walk()
    taken = policy > 0
    logits = np.where(taken, np.log(np.where(taken, policy, 1.0)) + beta * (q - v[:, None]), -np.inf)
    weights = np.where(taken, np.exp(logits - logits.max(axis=1, keepdims=True, where=taken, initial=-1e9)), 0.0)
    _, score = states.of(weights / np.maximum(weights.sum(axis=1, keepdims=True), 1.0))
    return float(score[states.start].mean())
