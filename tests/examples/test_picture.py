"""The picture at the top of the README: what it counts, and what it draws."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from transformers import AutoModelForCausalLM

from examples.randomwalks.picture import RADIUS, WALKS, picture, placed, sampled
from examples.randomwalks.task import GOAL, LETTERS, default_task, model_config, tokenizer

SVG = "{http://www.w3.org/2000/svg}"


def shortest_walk(start: str) -> str:
    """A walk whose every move comes one node nearer to the goal."""
    task, walk = default_task(), start
    while walk[-1] != LETTERS[GOAL]:
        node = LETTERS.find(walk[-1])
        near = [other for other in np.flatnonzero(task.adjacency[node]) if task.shortest[other] < task.shortest[node]]
        walk += LETTERS[int(near[0])]
    return walk


def test_both_panels_count_their_walks() -> None:
    task = default_task()
    best = [shortest_walk(start) for start in task.prompts]
    assert task.optimality(best) == [1.0] * len(best)
    lost = [walk[:-1] for walk in best]  # they stop before the goal
    root = ElementTree.fromstring(picture(best[:1] * 3 + lost, best, task))
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    lines = [text for text in texts if "reach the goal;" in text]
    mean = 3 / (len(lost) + 3)
    assert lines[0].startswith(f"{mean:.0%} of {len(lost) + 3} walks") and lines[1].startswith(f"100% of {len(best)} ")
    assert lines[1].endswith("optimality 1.00") and f"optimality {mean:.2f}" in lines[0]
    far = max(task.prompts, key=lambda letter: float(task.shortest[LETTERS.find(letter)]))
    assert f"from {far}: {shortest_walk(far)} (a shortest walk)" in texts
    assert any(re.match(rf"from {far}: .*\(does not reach the goal\)", text) for text in texts)


def test_every_node_and_edge_is_drawn_once_a_panel_and_no_two_nodes_overlap() -> None:
    task = default_task()
    best = [shortest_walk(start) for start in task.prompts]
    root = ElementTree.fromstring(picture(best, best, task))
    assert len(list(root.iter(f"{SVG}circle"))) == 2 * len(LETTERS[: len(task.adjacency)])
    taken = {edge for walk in best for edge in pairwise(walk)}
    far = max(best, key=len)
    shown = int(task.adjacency.sum()) + len(taken) + len(far) - 1
    assert len([path for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]) == 2 * shown
    places = np.array(list(placed(task).values()))
    apart = np.linalg.norm(places[:, None] - places[None], axis=-1) + 1e9 * np.eye(len(places))
    assert apart.min() > 2 * RADIUS


def test_walks_of_a_model_start_at_every_node(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(model_config()).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    walks = sampled(tmp_path, default_task())
    starts = [walk[0] for walk in walks]
    assert {start: starts.count(start) for start in starts} == dict.fromkeys(default_task().prompts, WALKS)
