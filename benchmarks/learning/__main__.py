"""Compare how this project and its peers learn: the same graphs, start models, reward, number of walks and evaluation.

    python -m benchmarks.peers make           # once: the environments of the peers
    python -m benchmarks.learning             # all runs on ten graphs that are not finished, one after the other
    python -m benchmarks.learning --draw      # the pictures and the tables of docs/results.md, from the finished runs

A run is a process of one thread that trains from the start model of its graph with at most 4,800 walks. Its model is
evaluated by the same code on all sides. Finished runs are in benchmarks/learning/runs.json and are not made again,
unless their recipe has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import trlx_like
from benchmarks.learning.recipes import RECIPES, Recipe
from benchmarks.learning.record import AT_THE_END, evaluate
from benchmarks.learning.report import draw, table
from benchmarks.peers.__main__ import interpreter
from benchmarks.side_by_side import CALM, ROOT, commit
from examples import configurations
from examples.randomwalks.start import train_start
from examples.randomwalks.task import RandomWalks

RUNS = ROOT / "benchmarks" / "learning" / "runs.json"
GRAPHS = range(5001, 5011)
STEPS = 50
"""Optimizer steps of filtered cloning, from the start."""


class Finished:
    """Hold the runs that are finished, in a file of one line each.

    Args:
        file: The file, which need not exist.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []

    def has(self, graph: int, name: str, options: Any) -> bool:
        """Return whether there is a run of these options."""
        key = {"graph": graph, "recipe": name, "options": options}
        return any(key.items() <= run.items() for run in self.runs)

    def add(self, run: dict[str, Any]) -> None:
        """Put a run in place of that of the same graph and recipe, and write the file."""
        key = (run["graph"], run["recipe"])
        others = [other for other in self.runs if (other["graph"], other["recipe"]) != key]
        self.runs = sorted([*others, run], key=lambda each: (each["graph"], each["recipe"]))
        lines = ",\n".join(json.dumps(each) for each in self.runs)
        beside = self.file.with_suffix(".new")
        beside.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        os.replace(beside, self.file)


def start(graph: int, folder: Path) -> Path:
    """Return the folder of a model that imitates the random walks of a graph, which the first call trains."""
    model = folder / "start" / "hf_model"
    if not (model / "model.safetensors").exists():
        train_start(folder / "start", task=RandomWalks(graph), seed=graph).save_pretrained(model)
    return model


def best_walks(task: RandomWalks) -> list[str]:
    """Return the walks of the data that score more than 0, and of those from one node only the best."""
    scores = task.optimality(task.samples)
    best: dict[str, float] = {}
    for text, score in zip(task.samples, scores, strict=True):
        best[text[0]] = max(best.get(text[0], 0.0), score)
    return [text for text, score in zip(task.samples, scores, strict=True) if score == best[text[0]] > 0]


def filtered(graph: int, model: Path, folder: Path) -> Path:
    """Train the start further on the best walks of the data alone, and return the folder of the result."""
    task, cloned = RandomWalks(graph), folder / "filtered" / "hf_model"
    config = configurations.load("sft_randomwalks")
    config = config.evolve(
        model={"model_path": str(model)},
        scheduler={"kwargs": {**config.scheduler.kwargs, "total_iters": STEPS}},
        train={"checkpoint_dir": str(folder / "filtered"), "seed": graph, "total_steps": STEPS, "epochs": STEPS},
    )
    trainer = trlx_like.train(config, samples=best_walks(task), eval_prompts=task.prompts[:1], metric_fn=task.metric_fn)
    trainer.save_pretrained(cloned)
    return cloned


def reference(graph: int, model: Path) -> dict[str, Any]:
    """Return what there is to say of a model that made no walks."""
    lm = AutoModelForCausalLM.from_pretrained(model)
    return {"points": [{"walks": 0, "optimality": round(evaluate(lm, RandomWalks(graph), AT_THE_END), 4)}]}


def train(graph: int, recipe: Recipe, model: Path) -> dict[str, Any]:
    """Run a recipe in a process of its own, and return what it recorded."""
    asked = {"graph": graph, "seed": graph, "method": recipe.method, "options": recipe.options, "model": str(model)}
    python = sys.executable if recipe.environment is None else str(interpreter(recipe.environment))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
        command = [python, "-m", f"benchmarks.learning.{recipe.program}", "asked.json", "found.json"]
        ended = subprocess.run(command, cwd=folder, env={**os.environ, **CALM}, capture_output=True, text=True)
        if not (folder / "found.json").exists():
            raise SystemExit(f"{recipe.label} has failed on graph {graph}. Its last words:\n{ended.stderr[-3000:]}")
        found: dict[str, Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return {**found, "load": round(os.getloadavg()[0], 1), "commit": commit()}


def make(finished: Finished, graphs: Sequence[int], names: Sequence[str], folder: Path) -> None:
    """Make the runs that are not finished, graph by graph."""
    for graph in graphs:
        place = (folder / str(graph)).absolute()
        model = start(graph, place)
        for name in ("start", "filtered"):
            if not finished.has(graph, name, {}):
                made = model if name == "start" else filtered(graph, model, place)
                finished.add({"graph": graph, "recipe": name, "options": {}, **reference(graph, made)})
        for name in names:
            recipe = RECIPES[name]
            if not finished.has(graph, name, recipe.options):
                found = train(graph, recipe, model)
                finished.add({"graph": graph, "recipe": name, "options": recipe.options, **found})
                curve = " ".join(f"{point['optimality']:.3f}" for point in found["points"])
                seconds = found["points"][-1]["seconds"]
                print(f"{graph}  {name:<20} {curve}  {seconds:.1f} CPU s  {found['counts']}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, nargs="+", default=list(GRAPHS), help="numbers of the graphs")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="of the start models")
    parser.add_argument("--json", type=Path, default=RUNS, help="file of the finished runs")
    parser.add_argument("--draw", action="store_true", help="make no run; write the pictures and docs/results.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    finished = Finished(given.json)
    if given.draw:
        draw(finished.runs)
    else:
        make(finished, given.graphs, given.recipes, given.folder)
    print(table([run for run in finished.runs if run["graph"] in given.graphs]))


if __name__ == "__main__":
    main()
