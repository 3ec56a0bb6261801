"""A comparison of learning: what is counted, evaluated and finished, and what the page and the pictures say."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from benchmarks.learning import report
from benchmarks.learning.__main__ import Finished, best_walks
from benchmarks.learning.recipes import RECIPES
from benchmarks.learning.record import Recorder, evaluate, walk
from examples.randomwalks.task import LETTERS, TOKENS, RandomWalks, model_config

END, PAD = 22, 23


def random_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = model_config()
    config.n_layer, config.n_embd, config.n_head = 2, 8, 2
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize(
    ("ids", "text"), [([1, 3, 2, 0, END, 5], "bdca"), ([1, 21, 0, PAD], "ba"), ([4, 5, 6], "efg"), ([2, END], "c")]
)
def test_a_walk_ends_at_eos_and_has_no_special_tokens(ids: list[int], text: str) -> None:
    assert (TOKENS[END], len(LETTERS)) == ("<|eos|>", 21)
    assert walk(ids) == text


def test_an_evaluation_is_repeatable_and_leaves_the_random_state() -> None:
    """A model that never stops saying the goal scores 0."""
    model, task = random_model(), RandomWalks(44)
    state = torch.get_rng_state()
    assert evaluate(model, task, 2) == evaluate(model, task, 2)
    assert torch.equal(state, torch.get_rng_state())
    head = torch.nn.Linear(8, len(TOKENS))
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-1e4)
        head.bias[0] = 1e4  # "a" at every place: a walk that does not end at the goal
    model.lm_head = head
    assert evaluate(model, task, 1) == 0.0


def test_the_best_walks_of_each_node() -> None:
    """Edges b -> a, c -> b, c -> d, d -> b: from c, "cba" is better than "cdba", and "dd" does not arrive."""
    adjacency = np.zeros((4, 4), dtype=bool)
    for tail, head in ((1, 0), (2, 1), (2, 3), (3, 1)):
        adjacency[tail, head] = True
    task = RandomWalks(0, adjacency)
    task.samples = ["ba", "cdba", "cba", "dd", "cba"]
    assert best_walks(task) == ["ba", "cba", "cba"]


def test_a_recorder_counts_rounds_and_not_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, found = tmp_path / "asked.json", tmp_path / "found.json"
    asked.write_text(json.dumps({"graph": 44, "seed": 1, "options": {}, "model": "nowhere"}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["program", str(asked), str(found)])
    monkeypatch.setattr("benchmarks.learning.record.WALKS", 12)
    threads = torch.get_num_threads()
    recorder, model = Recorder(), random_model()
    torch.set_num_threads(threads)
    recorder.work.layers = 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recorder.begin(model)
    for number in range(3):
        # Without the first node: b c d and EOS, "a" and EOS, and ten nodes of which the last is not the end.
        walks = ["ebcd", "ba", "b" * 11, "ba"]
        assert recorder.reward(walks) == RandomWalks(44).optimality(walks)
        model(torch.zeros(3, 5, dtype=torch.long)).logits.sum().backward()
        optimizer.step()
        (recorder.end if number == 2 else recorder.round)(model)
    said: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    assert [point["walks"] for point in said["points"]] == [0, 4, 8, 12]
    assert [point["seconds"] for point in said["points"]] == sorted(point["seconds"] for point in said["points"])
    counts = said["counts"]
    assert (counts["walks"], counts["walk tokens"]) == (12, 3 * (4 + 2 + 10 + 2))
    assert (counts["forward passes"], counts["optimizer steps"]) == (3, 3)
    assert (counts["tokens forward"], counts["tokens backward"]) == (45, 45)


def test_finished_runs_are_kept_unless_their_recipe_changed(tmp_path: Path) -> None:
    finished = Finished(tmp_path / "runs.json")
    finished.add({"graph": 2, "recipe": "ppo", "options": {"a": 1}, "points": [1]})
    finished.add({"graph": 1, "recipe": "ppo", "options": {"a": 1}, "points": [2]})
    again = Finished(tmp_path / "runs.json")
    assert [run["graph"] for run in again.runs] == [1, 2]
    assert again.has(2, "ppo", {"a": 1}) and not again.has(2, "ppo", {"a": 2}) and not again.has(3, "ppo", {"a": 1})
    again.add({"graph": 2, "recipe": "ppo", "options": {"a": 2}, "points": [3]})
    assert [run["points"] for run in Finished(tmp_path / "runs.json").runs] == [[2], [3]]


def runs() -> list[dict[str, Any]]:
    """Two graphs with the start, our PPO, and TRL's."""
    counts = {"walks": 4800, "walk tokens": 9000, "optimizer steps": 100, "tokens forward": 1.0, "tokens backward": 2.0}
    made = []
    for graph, ends in ((1, (0.2, 0.97, 0.5)), (2, (0.1, 0.93, 0.7))):
        for name, end in zip(("start", "ppo", "ppo trl"), ends, strict=True):
            points = [{"walks": 0, "optimality": ends[0], "seconds": 0.0}, {"walks": 4800, "optimality": end}]
            points[1]["seconds"] = 20.0 + graph
            run: dict[str, Any] = {"graph": graph, "recipe": name, "points": points, "counts": counts}
            made.append({**run, "points": points[:1]} if name == "start" else run)
            if name == "start":
                del made[-1]["counts"], points[0]["seconds"]
    return made


def test_the_table_has_the_median_the_worst_and_the_work() -> None:
    lines = report.table(runs()).splitlines()
    assert "| the start: cloning of random walks | 2 | **0.150** | 0.100 | 0 of 2 |  |" in lines
    assert "| PPO, trlx_like | 2 | **0.950** | 0.930 | 1 of 2 | 21 to 22 |" in lines
    assert "| PPO, TRL 0.11.4, our values | 4,800 | 9,000 | 100 | 1 | 2 |" in lines


@pytest.mark.parametrize("axis", ["walks", "seconds"])
def test_a_picture_has_a_line_and_a_band_for_each_recipe(axis: str) -> None:
    made = ElementTree.fromstring(report.picture(runs(), axis, "title"))
    space = "{http://www.w3.org/2000/svg}"
    bands, lines = made.findall(f".//{space}polygon"), made.findall(f".//{space}polyline")
    assert len(bands) == len(lines) == 2
    # The median of the start at the left edge and of our line at the right: 0.15 and 0.95 of 1.02.
    places = [[float(each) for each in point.split(",")] for point in lines[1].attrib["points"].split()]
    height = [report.TOP + report.HEIGHT * (1.02 - value) / 1.02 for value in (0.15, 0.95)]
    assert [y for _, y in places] == pytest.approx(height, abs=0.06)
    assert [x for x, _ in places] == pytest.approx([report.LEFT, report.WIDTH], abs=0.06)


def test_every_recipe_of_a_peer_has_its_environment_and_the_page_has_the_marks() -> None:
    for name, recipe in RECIPES.items():
        assert (recipe.environment is None) == (recipe.library == "trlx_like"), name
    text = report.PAGE.read_text(encoding="utf-8")
    assert text.index(report.BEGIN) < text.index(report.END)
