"""Change one option of a preset at a time, and see what that costs: how narrow each preset is.

    python -m benchmarks.sensitivity [--trainers ppo] [--tasks letters length] [--axes "learning rate"] [--seconds 12]

The learning rate is divided and multiplied by 3, the size of a round by 2, and the KL weight, where the preset has one,
by 10; the preset itself has three seeds. Runs are those of `benchmarks.first_try`: the preset with a model of random
weights, for as many CPU seconds each. Results go to a file as they come, and runs that are in it are not made again.
The file does not tell an earlier preset from the present one: delete the lines of a trainer when its preset has
changed. At the end each trainer has a table and a picture of all its results in the file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import first_try
from benchmarks.tasks import TASKS, random_model
from trlx_like.config.auto import is_auto, responses_for
from trlx_like.optim import learning_rate_for
from trlx_like.presets import PRESETS

RATE, ROUND, KL = "learning rate", "round size", "KL weight"
FACTORS = {RATE: 3, ROUND: 2, KL: 10}
OPTIONS = {
    "ppo": {RATE: "optimizer.kwargs.lr", ROUND: "method.num_rollouts", KL: "method.init_kl_coef"},
    "grpo": {RATE: "optimizer.kwargs.lr", ROUND: "method.num_prompts", KL: "method.beta"},
    "rloo": {RATE: "optimizer.kwargs.lr", ROUND: "method.num_prompts", KL: "method.beta"},
    "rft": {RATE: "optimizer.kwargs.lr", ROUND: "method.n_generations_per_prompt"},
    "online_dpo": {RATE: "optimizer.kwargs.lr", ROUND: "train.batch_size", KL: "method.beta"},
}
"""The options that are changed. RFT has no KL weight."""
TASKS_TRIED = ("letters", "length", "arithmetic")
SEEDS = (1, 2, 3)
LOST = 0.05
"""A score that is further below the best of its three counts as lost."""
Result = dict[str, Any]
Axis = list[tuple[float, dict[str, Any]]]
"""The values of an option from small to large, each with the changes of the preset; the middle is the preset."""

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 240, 330, 52, 58, 46, 22
COLOURS = ("#0b6e99", "#c2571a", "#4a7a2c", "#7b4aa0", "#a3243b")


def axes(trainer: str) -> dict[str, Axis]:
    """Return the values that are tried of each option of a preset, by the name of the axis."""
    return {name: _axis(PRESETS[trainer]().to_dict(), name, option) for name, option in OPTIONS[trainer].items()}


def _axis(preset: dict[str, Any], name: str, option: str) -> Axis:
    given: Any = preset
    for key in option.split("."):
        given = given[key]
    middle = _rate() if name == RATE else float(responses_for(first_try.PROMPTS) if is_auto(given) else given)
    values = [float(f"{value:.3g}") for value in (middle / FACTORS[name], middle, middle * FACTORS[name])]
    low, middle, high = map(int, values) if name == ROUND else values
    return [(low, {option: low}), (middle, {}), (high, {option: high})]


@cache
def _rate() -> float:
    """Return the rate that the presets have for the model of the tasks."""
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(random_model(Path(folder) / "model"))
    return learning_rate_for(sum(weights.numel() for weights in model.parameters()))


def runs(task: str, trainer: str, seconds: float, chosen: Sequence[str] = tuple(FACTORS)) -> Iterator[list[Any]]:
    """Yield the runs of a trainer on a task along the chosen axes, in the form of `first_try`."""
    yield from ([task, trainer, seed, None, seconds, {}] for seed in SEEDS)
    for axis in (axis for name, axis in axes(trainer).items() if name in chosen):
        yield from ([task, trainer, SEEDS[0], None, seconds, changes] for _, changes in axis if changes)


def table(results: Sequence[Result], trainer: str) -> str:
    """Return the scores of a trainer as a table, a row for each task; bold is what is lost, and empty is not run."""
    tried = axes(trainer)
    cells = [f"{name} {', '.join(f'{value:g}' for value, _ in axis)}" for name, axis in tried.items()]
    head = ["task", "start", "the preset, seeds " + ", ".join(map(str, SEEDS)), *cells]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---|" * (len(head) - 1)]
    for task in dict.fromkeys(row["task"] for row in results):
        rows = [row for row in results if row["task"] == task]
        preset = [row for row in rows if not row["run"][-1]]
        shown = [_shown([row["end"] for row in _along(axis, rows)]) for axis in tried.values()]
        row = [task, f"{preset[0]['start']:.3f}", ", ".join(f"{row['end']:.3f}" for row in preset), *shown]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _shown(ends: Sequence[float]) -> str:
    """Return scores as text, in bold those that are lost."""
    return ", ".join(f"{end:.3f}" if end >= max(ends) - LOST else f"**{end:.3f}**" for end in ends)


def _along(axis: Axis, rows: Sequence[Result]) -> list[Result]:
    """Return the results of the first seed along an axis; none, if one of them was not run."""
    found = [row for _, changes in axis for row in rows if row["run"][2] == SEEDS[0] and row["run"][-1] == changes]
    return found if len(found) == len(axis) else []


def picture(results: Sequence[Result], trainer: str) -> str:
    """Draw the scores of a trainer as SVG, a panel for each option.

    A line is a task with the first seed. Its stripe reaches from the best of its scores to .05 below. Bars are two
    standard errors, and rings are the other seeds.
    """
    tried, tasks = axes(trainer), list(dict.fromkeys(row["task"] for row in results))
    top = max(row["end"] for row in results) + 0.1
    full = LEFT + len(tried) * (WIDTH + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full} {HEIGHT}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{full}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{trainer}: held-out score</text>',
    ]
    for number, task in enumerate(tasks):
        x = full - GAP - 95 * (len(tasks) - number)
        parts.append(f'<line x1="{x}" x2="{x + 18}" y1="16" y2="16" stroke="{COLOURS[number]}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 24}" y="20">{task}</text>')
    for number, (name, axis) in enumerate(tried.items()):
        left = LEFT + number * (WIDTH + GAP)
        parts += _frame(left, name, [value for value, _ in axis], top, labelled=number == 0)
        for task, colour in zip(tasks, COLOURS, strict=False):
            parts += _line(left, axis, [row for row in results if row["task"] == task], top, colour)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(left: float, place: int) -> float:
    return left + WIDTH * (0.14 + 0.36 * place)


def _y(score: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (top - max(score, 0.0)) / top


def _frame(left: float, name: str, values: Sequence[float], top: float, labelled: bool) -> Iterator[str]:
    """Draw the axes of a panel, and mark the preset."""
    for tenth in range(0, int(top * 10) + 1, 1 if top < 0.6 else 2):
        y = _y(tenth / 10, top)
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        if labelled:
            yield f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>'
    x, bottom = _x(left, 1), HEIGHT - BOTTOM
    yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#999" stroke-dasharray="3 3"/>'
    yield f'<text x="{x:.1f}" y="{TOP - 6}" text-anchor="middle" fill="#666">preset</text>'
    for place, value in enumerate(values):
        yield f'<text x="{_x(left, place):.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>'
    yield f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{name}</text>'


def _line(left: float, axis: Axis, rows: Sequence[Result], top: float, colour: str) -> Iterator[str]:
    """Draw the scores of a task in a panel, if all were run."""
    shown = _along(axis, rows)
    if not shown:
        return
    best = max(row["end"] for row in shown)
    y, height = _y(best, top), _y(best - LOST, top) - _y(best, top)
    yield f'<rect x="{left}" y="{y:.1f}" width="{WIDTH}" height="{height:.1f}" fill="{colour}" opacity="0.13"/>'
    places = [(_x(left, place), _y(row["end"], top)) for place, row in enumerate(shown)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (x, y), row in zip(places, shown, strict=True):
        high, low = (_y(row["end"] + sign * 2 * row["end_error"], top) for sign in (1, -1))
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{high:.1f}" y2="{low:.1f}" stroke="{colour}"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    for row in rows:
        if not row["run"][-1] and row["run"][2] != SEEDS[0]:
            x, y = _x(left, 1) + 7, _y(row["end"], top)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="white" stroke="{colour}" stroke-width="1.5"/>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS_TRIED, help="default: %(default)s")
    parser.add_argument("--trainers", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="default: all five")
    parser.add_argument("--axes", nargs="+", choices=FACTORS, default=list(FACTORS), help="default: all three")
    parser.add_argument("--seconds", type=float, default=12.0, help="CPU seconds of training in a run (default 12)")
    parser.add_argument(
        "--results", type=Path, default=Path("docs/images/sensitivity.jsonl"), help="file of the results"
    )
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"), help="folder for the pictures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = first_try.known(given.results)
    for task in given.tasks:
        for trainer in given.trainers:
            for key in runs(task, trainer, given.seconds, given.axes):
                options = {"seconds": given.seconds, "steps": None, "set": list(key[-1].items()), "model": None}
                first_try.result(key, known, argparse.Namespace(results=given.results, **options))
    for trainer in given.trainers:
        rows = [row for row in known.values() if row["run"][1] == trainer and row["run"][4] == given.seconds]
        rows.sort(key=lambda row: (list(TASKS).index(row["run"][0]), row["run"][2]))
        (given.pictures / f"sensitivity_{trainer}.svg").write_text(picture(rows, trainer), encoding="utf-8")
        print(f"\n{trainer}\n\n{table(rows, trainer)}")


if __name__ == "__main__":
    main()
