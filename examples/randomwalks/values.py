"""Say where a run on randomwalks loses its score, and whether its values are to blame.

A policy's expected score, the value of each walk so far and the advantage of each token are computed by dynamic
programming, without sampling. What the policy misses to the best score is the sum, over all tokens that it may say, of
probability times regret (Kakade and Langford 2002, lemma 6.1); the first table divides it by the moves that are left to
the goal and by mistake.

For ILQL (with `--beta`) V and Q are compared with the fixed point of its losses, with infinite data and no network. The
score of that fixed point tells a `--tau` that is too low from training that is too short.
For PPO V is compared with the values of the policy itself, and the estimates of advantages with the exact ones.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from examples.play import table
from examples.randomwalks.exact import END, States, guided_score, ilql_fixed_point
from examples.randomwalks.task import DEFAULT_SEED, GOAL, TOKENS, RandomWalks
from examples.values import Floats, Panel, correlation, model_folder
from trlx_like import AutoModelForCausalLMWithValueHead
from trlx_like.functional.q_learning import guided_logits
from trlx_like.models.saved_heads import HEADS_FILE
from trlx_like.samplers.guided import load_ilql_heads

TOP_K = 10  # of configs/ilql_randomwalks.yml
DRAWN = 300  # states in a picture, those that are visited most


@dataclass
class Learned:
    """Hold what a model says in each state: its policy [N, V], and V [N] and Q [N, V] if it has heads for them."""

    policy: Floats
    values: Floats | None = None
    q: Floats | None = None


@torch.no_grad()
def learned(folder: Path, states: States, beta: float) -> Learned:
    """Run an exported model in every state. With ILQL's heads the policy is the one guided with `beta`."""
    heads = load_ilql_heads(folder)
    kind = AutoModelForCausalLMWithValueHead if heads is None else AutoModelForCausalLM
    lm: Any = kind.from_pretrained(folder)
    lm.eval()
    policy = np.zeros(states.children.shape)
    v, q = np.zeros(len(states.walks)), np.zeros(states.children.shape)
    for length in range(1, states.length.max() + 1):
        for part in np.array_split(np.flatnonzero(states.length == length), 1 + (states.length == length).sum() // 512):
            ids = torch.tensor([[TOKENS.index(letter) for letter in states.walks[state]] for state in part])
            if heads is None:
                logits, _, values = lm(ids, torch.ones_like(ids))
                logits, values = logits[:, -1], values[:, -1]
            else:
                out = lm(ids, output_hidden_states=True)
                hidden = out.hidden_states[-1][:, -1]
                values, target_q = heads.value(hidden), heads.target_q(hidden)
                logits = guided_logits(out.logits[:, -1], target_q, values, beta)
                kept = logits.topk(TOP_K).values[:, -1:]
                logits = logits.masked_fill(logits < kept, -torch.inf)
                q[part] = target_q.numpy()
            policy[part], v[part] = logits.softmax(dim=-1).numpy(), values.numpy()
    valued = (folder / HEADS_FILE).is_file()
    return Learned(policy, v if valued else None, q if heads is not None else None)


def losses(states: States, policy: Floats) -> tuple[float, float, dict[int, dict[str, float]]]:
    """Compute a policy's expected score, the best, and what is lost by moves left to the goal and by mistake."""
    best_q, best_v = states.best()
    _, v = states.of(policy)
    regret = states.visits(policy)[:, None] * policy * (best_v[:, None] - best_q)  # [N, V]
    ends = np.arange(len(TOKENS)) == END
    at_goal = (states.token == GOAL)[:, None]
    kinds = {
        "longer way": states.children,
        "edge that is not there": ~states.children & ~ends & ~at_goal,
        "end before the goal": ends & ~at_goal,
        "no end at the goal": ~ends & at_goal,
    }
    lost = {
        int(moves): {
            name: float(regret[states.distance == moves][kind[states.distance == moves]].sum())
            for name, kind in kinds.items()
        }
        for moves in np.unique(states.distance)
    }
    return float(v[states.start].mean()), float(best_v[states.start].mean()), lost


def advantage_estimates(states: States, model: Learned) -> dict[str, float]:
    """Compute the correlation of estimated and exact advantages over the policy's own tokens, by estimator.

    One sample of "score - V" is the advantage of lambda 1; its noise is the variance of the score after the token.
    "V' - V" is lambda 0, with the score in place of V' where the walk ends or can no longer score.
    """
    assert model.values is not None
    policy, given = model.policy, model.values
    q, v = states.of(policy)
    squares, _ = states.of(policy, states.scores**2)
    weights = states.visits(policy)[:, None] * policy  # [N, V]
    exact = q - v[:, None]
    after = q.copy()  # V' of the model where the walk goes on
    for state, before in enumerate(states.parent):
        if before >= 0:
            after[before, states.token[state]] = given[state]

    def with_noise(values: Floats) -> float:
        signal = q - values[:, None]
        clean = correlation(signal, exact, weights)
        spread = np.average((signal - np.average(signal, weights=weights)) ** 2, weights=weights)
        noise = np.average(squares - q**2, weights=weights)
        return float(clean * (spread / (spread + noise)) ** 0.5) if spread + noise > 0 else 0.0

    return {
        "score alone": with_noise(np.zeros_like(v)),
        "score - V, learned V (lambda 1)": with_noise(given),
        "score - V, exact V": with_noise(v),
        "V' - V, learned V (lambda 0)": correlation(after - given[:, None], exact, weights),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this game."""
    parser.add_argument("--problem", type=int, default=DEFAULT_SEED, help="number of the graph")
    parser.add_argument("--beta", type=float, default=100, help="weight of the advantage in ILQL's decoding")
    parser.add_argument("--tau", type=float, default=0.8, help="ILQL's expectile")
    parser.add_argument("--gamma", type=float, default=0.99, help="ILQL's discount")


def diagnose(given: argparse.Namespace) -> list[Panel]:
    """Print what a run loses and how its values compare, and return them for the picture."""
    task = RandomWalks(given.problem)
    states = States(task)
    model = learned(model_folder(given.run), states, given.beta)
    score, best, lost = losses(states, model.policy)
    visits = states.visits(model.policy)
    print(f"expected score {score:.4f}, best {best:.4f}; lost, by the moves that are left and by mistake:\n")
    kinds = list(next(iter(lost.values())))
    rows = [[str(moves), *(f"{row[kind]:.4f}" for kind in kinds)] for moves, row in lost.items()]
    total = [f"{sum(row[kind] for row in lost.values()):.4f}" for kind in kinds]
    print(table(["moves left", *kinds], [*rows, ["all", *total]]))
    if model.q is not None and model.values is not None:
        fixed = ilql_fixed_point(task, given.tau, given.gamma)
        at_best = guided_score(*fixed, given.beta)
        print(f"\nthe fixed point of the losses with tau {given.tau:g} scores {at_best:.4f}")
        return ilql(states, model, fixed)
    if model.values is None:
        return []
    _, v = states.of(model.policy)
    error = np.average((v - model.values) ** 2, weights=visits)
    spread = np.average((v - np.average(v, weights=visits)) ** 2, weights=visits)
    print(f"\nV explains {1 - error / spread if spread else 0:.2f} of the variance of the exact V over its walks")
    for name, value in advantage_estimates(states, model).items():
        print(f"correlation with the exact advantage {value:5.2f}  {name}")
    often = np.argsort(-visits)[:DRAWN]
    return [Panel("V of the policy", v[often], model.values[often], states.distance[often], "{} moves")]


def ilql(states: States, model: Learned, fixed: tuple[States, Floats, Floats]) -> list[Panel]:
    """Print learned and exact V, and how often the best move has the largest Q, over walks of the data."""
    assert model.values is not None and model.q is not None
    all_states, exact_q, exact_v = fixed
    place = np.array([all_states.number[walk] for walk in states.walks])
    q, v = exact_q[place], exact_v[place]
    data = states.visits(states.random_walk())
    inner = states.token != GOAL
    best_q, best_v = states.best()
    q_of_edges = np.where(states.children, model.q, -np.inf)
    right = np.take_along_axis(best_q, q_of_edges.argmax(axis=1)[:, None], axis=1)[:, 0] >= best_v - 1e-9
    missing = np.where(states.children, -np.inf, model.q)[:, :END].max(axis=1) - q_of_edges.max(axis=1)
    rows = []
    for moves in np.unique(states.distance[inner]):
        here = inner & (states.distance == moves) & (best_v > 0)
        weights = data[here]
        exact, found = np.average(v[here], weights=weights), np.average(model.values[here], weights=weights)
        share = np.average(right[here], weights=weights)
        over = np.average(missing[here] > 0, weights=weights)
        rows.append([str(moves), f"{exact:.2f}", f"{found:.2f}", f"{share:.2f}", f"{over:.2f}"])
    head = ["moves left", "V exact", "V learned", "best move has the largest Q", "a missing edge has a larger Q"]
    print("\nover the walks of the data that can still score:\n\n" + table(head, rows))
    often = np.argsort(-data * inner)[:DRAWN]
    state, token = np.nonzero(states.children[often])
    edges = often[state], token
    return [
        Panel("V", v[often], model.values[often], states.distance[often], "{} moves"),
        Panel("Q of edges", q[edges], model.q[edges], states.distance[often[state]], "{} moves"),
    ]
