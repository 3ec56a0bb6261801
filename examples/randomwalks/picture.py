"""Draw where walks go before and after PPO: the picture at the top of the README.

    python examples/randomwalks/ppo.py --problem 44
    python examples/randomwalks/picture.py runs/randomwalks docs/images/walks.svg

A line is an edge of the graph, as wide as the fraction of the sampled walks that take it. One walk is drawn in orange.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.randomwalks.task import DEFAULT_SEED, GOAL, LETTERS, MAX_LENGTH, RandomWalks

WALKS = 50  # from each node
WIDTH, HEIGHT, TOP, RADIUS = 450, 340, 52, 10
Place = dict[str, tuple[float, float]]


def sampled(folder: Path, task: RandomWalks) -> list[str]:
    """Sample `WALKS` walks from every node at temperature 1.

    Args:
        folder: a transformers model with its tokenizer.
        task: the graph.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(1)
    ids = tokenizer(task.prompts * WALKS, return_tensors="pt").input_ids  # [B, 1]: a prompt is one letter
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": MAX_LENGTH}
    walks = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [str(walk) for walk in tokenizer.batch_decode(walks, skip_special_tokens=True)]


def placed(task: RandomWalks) -> Place:
    """Give each node a place: the goal on the right, every other node as far left of it as it is steps away."""
    place: Place = {}
    for length in sorted(set(task.shortest)):
        nodes = np.flatnonzero(task.shortest == length).tolist()
        nodes.sort(key=lambda node: _height(task, place, node))  # near its successors, for fewer crossings
        for number, node in enumerate(nodes):
            x = WIDTH - 40 - (WIDTH - 80) * (length - 1) / (max(task.shortest) - 1)
            sway = 14 if number % 2 else -14  # so that edges between neighbours can be told apart
            y = TOP + (HEIGHT - TOP) * (number + 0.5) / len(nodes)
            place[LETTERS[node]] = (x + (sway if len(nodes) > 1 else 0), y)
    return place


def _height(task: RandomWalks, place: Place, node: int) -> float:
    next_ones = [LETTERS[other] for other in np.flatnonzero(task.adjacency[node])]
    return float(np.mean([place[letter][1] for letter in next_ones if letter in place] or [0]))


def panel(title: str, walks: list[str], start: str, task: RandomWalks, place: Place) -> str:
    """Draw one graph with the walks through it.

    Args:
        title: the name of the model that sampled the walks.
        walks: all of them.
        start: the first node of the walk that is drawn in orange.
        task: the graph.
        place: where its nodes are.

    Returns:
        The elements of the picture as SVG.
    """
    taken = Counter(edge for walk in walks for edge in pairwise(walk))
    shown = next(walk for walk in walks if walk[0] == start)
    chances = [task.optimality([walk])[0] for walk in walks]
    arrived = np.mean([task.length(walk) is not None for walk in walks])
    parts = [
        f'<text x="20" y="22" font-size="15" font-weight="bold">{title}</text>',
        f'<text x="20" y="41" fill="#555">{arrived:.0%} of {len(walks):,} walks reach the goal; '
        f"optimality {np.mean(chances):.2f}</text>",
    ]
    edges = [(LETTERS[a], LETTERS[b]) for a, b in np.argwhere(task.adjacency)]
    for a, b in edges:
        parts.append(_line(place[a], place[b], "#d9dde2", 1))
    for (a, b), count in taken.items():
        if (a, b) in edges:
            parts.append(_line(place[a], place[b], "#0b6e99", 0.5 + 34 * count / len(walks), 0.45))
    for a, b in pairwise(shown):
        exists = (a, b) in edges
        parts.append(_line(place[a], place[b], "#d9541e", 2.5, arrow=True, dash="" if exists else "4 3"))
    for letter, (x, y) in place.items():
        colour = "#2a7d2e" if letter == LETTERS[GOAL] else "#d9541e" if letter == start else "#ffffff"
        ink = "#333" if colour == "#ffffff" else "white"
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{RADIUS}" fill="{colour}" stroke="#555"/>')
        parts.append(f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle" fill="{ink}">{letter}</text>')
    said = f"from {start}: {shown} ({_verdict(shown, task)})"
    parts.append(f'<text x="20" y="{HEIGHT + 22}" fill="#b5400f">{said}</text>')
    return "\n".join(parts)


def _verdict(walk: str, task: RandomWalks) -> str:
    length, shortest = task.length(walk), int(task.shortest[LETTERS.find(walk[0])])
    if length is None:
        return "does not reach the goal"
    return "a shortest walk" if length == shortest else f"{length} nodes where {shortest} are enough"


def _line(
    a: tuple[float, float], b: tuple[float, float], colour: str, width: float, opacity: float = 1, **more: object
) -> str:
    """Draw an arc from one node to another; opposite directions bend apart."""
    (x, y), (u, v) = a, b
    away = 0.12
    middle = ((x + u) / 2 - away * (v - y), (y + v) / 2 + away * (u - x))
    long = float(np.hypot(u - middle[0], v - middle[1])) or 1.0
    end = (u - RADIUS * (u - middle[0]) / long, v - RADIUS * (v - middle[1]) / long)
    arrow = ' marker-end="url(#arrow)"' if more.get("arrow") else ""
    dash = f' stroke-dasharray="{more["dash"]}"' if more.get("dash") else ""
    return (
        f'<path d="M{x:.1f} {y:.1f} Q{middle[0]:.1f} {middle[1]:.1f} {end[0]:.1f} {end[1]:.1f}" fill="none" '
        f'stroke="{colour}" stroke-width="{width:.1f}" stroke-opacity="{opacity}"{arrow}{dash}/>'
    )


def picture(before: list[str], after: list[str], task: RandomWalks) -> str:
    """Draw both panels side by side, as one SVG.

    Args:
        before: walks of the model that PPO starts from.
        after: walks of the model after PPO.
        task: their graph.
    """
    place = placed(task)
    start = max(task.prompts, key=lambda letter: float(task.shortest[LETTERS.find(letter)]))
    left = panel("Before: imitates random walks", before, start, task, place)
    right = panel("After 100 steps of PPO", after, start, task, place)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT + 36}" font-family="sans-serif" '
        'font-size="13"><defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="4" markerHeight="4" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#d9541e"/></marker></defs>'
        f'<rect width="{2 * WIDTH}" height="{HEIGHT + 36}" fill="white"/>\n'
        f'<g>{left}</g>\n<g transform="translate({WIDTH} 0)">{right}</g></svg>\n'
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the folder of examples.randomwalks.ppo")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--problem", type=int, default=DEFAULT_SEED, help="number of the graph of the runs")
    given = parser.parse_args()
    task = RandomWalks(given.problem)
    before, after = (sampled(given.runs / name, task) for name in ("start/hf_model", "ppo/checkpoint_100/hf_model"))
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    given.picture.write_text(picture(before, after, task), encoding="utf-8")
