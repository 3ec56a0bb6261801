"""The formulas of ILQL once more, in float64 and loops over single numbers, and one example worked by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.unit.functional.reference_numpy import Array, Mask, distribution

NAN = float("nan")
LN2 = math.log(2)


def next_action_values(values: Array, action: Mask) -> tuple[Array, Mask]:
    out, continues = np.zeros(action.shape), np.zeros(action.shape, dtype=bool)
    for row in range(len(action)):
        places = [int(t) for t in np.flatnonzero(action[row])]
        for t, following in zip(places, places[1:], strict=False):
            out[row, t], continues[row, t] = values[row, following], True
    return out, continues


def expectile(target: float, value: float, tau: float) -> float:
    weight = 1 - tau if target < value else tau
    return weight * (target - value) ** 2


def conservative(q: Array, action: int, temperature: float) -> float:
    return -math.log(distribution(q, temperature, None)[action])


def guided(logits: Array, q: Array, value: float, beta: float, top_k: int, temperature: float) -> list[float]:
    """Probabilities of one row."""
    policy = distribution(logits, 1.0, None)
    scores = [math.log(p) + beta * (float(q[v]) - value) for v, p in enumerate(policy)]
    least = sorted(scores, reverse=True)[top_k - 1]
    weights = [math.exp(s / temperature) if s >= least else 0.0 for s in scores]
    return [w / math.fsum(weights) for w in weights]


@dataclass
class Worked:
    """Two dialogues of five and three tokens, both with two spans of actions, and everything ILQL makes of them.

    A dot is a token of the other speaker, a dash padding. gamma 1/2, tau 3/4, AWAC beta ln 2 (weights are powers of 2),
    CQL temperature 2, 5 actions in all. Summed over the actions:

                            row 0: a     .   a     a        row 1: a    .  a  -
      V of the states          1   9   2     3  (7)            0   9  4  -  -     other speakers' do not matter
      r                        0   5   1    -1                 1   5  2  -
      V of the next action     2       3                       4                  0 after the last action
      y = r + V' / 2           1       5/2  -1                 3      2
      Q1(a)                    2       5/2   0                 1      2
      Q2(a)                    1       1/2  -1                 3      4
      (Q1 - y)^2               1       0     1                 4      0           sum 6
      (Q2 - y)^2               0       4     0                 0      4           sum 8, both 14
      min target Q(a)          2       1     3                -1      4
      tQ - V                   1      -1     0                -1      0
      expectile              3/4     1/4     0               1/4      0           sum 5/4
      e^(ln 2 (tQ - V))        2     1/2     1               1/2      1
      -log pi(a) / ln 2        1       2     1                 2      1
      their product            2       1     1                 1      1           sum 6 ln 2
      CQL of Q1 / ln 2         1       2     1                 2      1           sum 7 ln 2
      CQL of Q2 / ln 2         1       1     1                 1      1           sum 5 ln 2, both 12 ln 2
      Monte-Carlo return     1/4     1/2    -1                 2      2

    There are two tokens. With the other token's Q at Q(a) + 2 ln k and temperature 2, the CQL term is
    -ln(1 / (1 + k)): ln 2 for k = 1 and 2 ln 2 for k = 3.
    """

    gamma, tau, beta, cql_temperature = 0.5, 0.75, LN2, 2.0

    def __init__(self) -> None:
        self.action = torch.tensor([[1, 0, 1, 1], [1, 0, 1, 0]]).bool()  # [B, R]
        self.ids = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]])  # [B, R], of 2 tokens
        self.rewards = torch.tensor([[0, 5, 1, -1], [1, 5, 2, NAN]])  # [B, R]
        self.values = torch.tensor([[1, 9, 2, 3, 7], [0, 9, 4, NAN, NAN]])  # [B, R + 1]
        taken = [[[2, NAN, 2.5, 0], [1, NAN, 2, NAN]], [[1, NAN, 0.5, -1], [3, NAN, 4, NAN]]]
        ratios = [[[1, 1, 3, 1], [3, 1, 1, 1]], [[1, 1, 1, 1], [1, 1, 1, 1]]]
        self.q = [self._table(torch.tensor(q), torch.tensor(k)) for q, k in zip(taken, ratios, strict=True)]
        target = [[[3, NAN, 1, 3], [2, NAN, 5, NAN]], [[2, NAN, 4, 5], [-1, NAN, 4, NAN]]]
        self.target_q = [self._table(torch.tensor(q), torch.ones(2, 4)) for q in target]
        self.logprobs = -LN2 * torch.tensor([[1, NAN, 2, 1], [2, NAN, 1, NAN]])  # [B, R]

        self.targets = torch.tensor([[1, 0, 2.5, -1], [3, 0, 2, 0]])  # [B, R], as the next two
        self.weights = torch.tensor([[2, 0, 0.5, 1], [0.5, 0, 1, 0]])
        self.returns = torch.tensor([[0.25, 0, 0.5, -1], [2, 0, 2, 0]])
        self.q_loss, self.v_loss, self.cql_loss, self.awac_loss = 14.0, 1.25, 12 * LN2, 6 * LN2
        self.actions = 5

    def _table(self, taken: Tensor, ratios: Tensor) -> Tensor:
        """[B, R, 2]: Q of the taken token, and of the other one 2 ln k more."""
        other = taken + 2 * ratios.log()
        return torch.where(self.ids[..., None] == torch.arange(2), taken[..., None], other[..., None])
