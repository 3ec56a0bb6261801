"""Give twelve small tasks to each preset as it is, and see whether it learns: what a user meets at the first try.

    python -m benchmarks.first_try [--tasks letters json] [--trainers ppo grpo] [--seeds 1] [--write docs/results.md]

A run is `default_<trainer>_config()` with a model, prompts, a reward function, and an end:
--steps, or --seconds of CPU time for a run. It counts as learned if the score of 256 held-out outputs is above that of
the start by at least two standard errors of the difference. The results go to a file as they come (--results), and runs
that are in it are not made again. `--set optimizer.kwargs.lr=1e-4` changes an option, and is noted with the result.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import trlx_like
from benchmarks.tasks import TASKS, Task, random_model
from examples.assets import stories8m
from trlx_like import Callback, TRLConfig
from trlx_like.presets import PRESETS
from trlx_like.tracking.audit import audit_run

TRAINERS = ("ppo", "grpo", "rloo", "rft", "online_dpo")
PROMPTS, HELD_OUT, KEPT = 64, 256, 64
"""Numbers of training prompts, of evaluated outputs, and of outputs that KL and perplexity are measured on."""
MARKS = "<!-- first try -->", "<!-- end of first try -->"


class Limit(Callback):
    """End training after so many CPU seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.process_time() + seconds

    def on_step(self, trainer: Any, metrics: Any) -> bool:
        return time.process_time() < self.end


class Measured:
    """Score what evaluations write, without the noise of the reward, and keep the scores of each."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seen: list[list[float]] = []

    def __call__(self, outputs: Sequence[str], **columns: Any) -> dict[str, list[float]]:
        self.seen.append(self.task.scores(outputs, **columns))
        return {"score": self.seen[-1]}


def run(name: str, trainer: str, seed: int, model: Path, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return what the table shows."""
    task, started = TASKS[name], time.process_time()
    train = {"seed": seed, "checkpoint_dir": str(folder), "total_steps": given.steps or 10**6}
    config = PRESETS[trainer]().evolve(model={"model_path": str(model)}, train=train)
    config = TRLConfig.update(config.to_dict(), dict(given.set))
    measured = Measured(task)
    made = trlx_like.train(
        config,
        task.reward(seed),
        task.prompts(PROMPTS, seed),
        eval_prompts=task.prompts(HELD_OUT, seed + 10**6),
        metric_fn=measured,
        callbacks=[Limit(given.seconds)],
    )
    spent = time.process_time() - started
    start, end = measured.seen[0], measured.seen[-1]
    error = math.sqrt((statistics.variance(start) + statistics.variance(end)) / HELD_OUT)
    end_error = math.sqrt(statistics.variance(end) / HELD_OUT)
    kl, perplexity = drift(made, model, task.prompts(KEPT, seed + 10**6))
    audit = audit_run(folder)
    return {
        "start": statistics.fmean(start),
        "end": statistics.fmean(end),
        "error": error,
        "end_error": end_error,
        "kl": kl,
        "perplexity": perplexity,
        "cpu": spent,
        "steps": made.progress.step,
        "rounds": made.progress.round,
        "audit": {verdict.name: verdict.since for verdict in audit.found},
    }


@torch.no_grad()
def drift(trainer: Any, model: Path, rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the KL to the start model in nats per response, and the perplexity of new outputs under it."""
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    trained, prompts = trainer.model.lm.eval(), [row["prompt"] for row in rows]
    outputs = trainer.generate(prompts, do_sample=True, temperature=1.0)
    joined = [(trainer.by_hand.ids(prompt), output.tolist()) for prompt, output in zip(prompts, outputs, strict=True)]
    ids = pad_sequence([torch.tensor(prompt + output) for prompt, output in joined], batch_first=True)
    places = torch.arange(ids.shape[1] - 1)
    begin = torch.tensor([len(prompt) - 1 for prompt, _ in joined])[:, None]
    mask = (places >= begin) & (places < begin + torch.tensor([len(output) for _, output in joined])[:, None])
    new, old = (lm(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] for lm in (trained, start))
    kl = float(((new - old) * mask).sum() / len(rows))
    return kl, math.exp(-float((old * mask).sum() / mask.sum()))


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as a table, a row for each task and trainer, with a sentence that counts them."""
    lines = ["| task | trainer | start | end | gain / error | KL | perplexity | CPU s | audit |", "|---|" + "---|" * 8]
    for one in results:
        ratio = (one["end"] - one["start"]) / (one["error"] or math.inf)
        gain = f"{ratio:+.1f}" if ratio >= 2 else f"**{ratio:+.1f}**"
        audit = ", ".join(f"{name} ({since})" for name, since in one["audit"].items()) or "-"
        cells = (f"{one['start']:.3f}", f"{one['end']:.3f}", gain, f"{one['kl']:.1f}", f"{one['perplexity']:.3g}")
        lines.append(f"| {one['task']} | {one['trainer']} | {' | '.join(cells)} | {one['cpu']:.0f} | {audit} |")
    learned = sum(one["end"] - one["start"] >= 2 * one["error"] for one in results)
    quiet = sum(not one["audit"] for one in results)
    lines += ["", f"{learned} of {len(results)} runs improved by two standard errors; the audit was quiet in {quiet}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all twelve")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS), help="default: all five")
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs of each (default 1)")
    parser.add_argument("--seconds", type=float, default=150.0, help="CPU seconds of training in a run (default 150)")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run; default: as many as --seconds allow")
    parser.add_argument("--model", type=Path, help="folder of the storyteller (default: stories8M)")
    parser.add_argument(
        "--set", action="append", default=[], type=_option, metavar="KEY=VALUE", help="change an option"
    )
    parser.add_argument("--results", type=Path, default=Path("runs/first_try.jsonl"), help="file of the results")
    parser.add_argument(
        "--write", type=Path, help="page whose table is replaced by one of all results with these options"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    made, wanted = known(given.results), []
    for name in given.tasks:
        for trainer in given.trainers:
            for seed in range(given.seed, given.seed + given.seeds):
                key = [name, trainer, seed, given.steps, given.seconds, dict(given.set)]
                wanted.append(result(key, made, given))
    print(table(wanted))
    if given.write is not None:
        page = given.write.read_text(encoding="utf-8")
        before, rest = page.split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        rows = [row for row in made.values() if row["run"][-1] == dict(given.set)]
        rows.sort(key=lambda row: (list(TASKS).index(row["task"]), TRAINERS.index(row["trainer"])))
        given.write.write_text(f"{before}{MARKS[0]}\n{table(rows)}\n{MARKS[1]}{after}", encoding="utf-8")


def known(results: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a file, each by its run as JSON."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    return {json.dumps(row["run"]): row for row in map(json.loads, lines)}


def result(key: list[Any], made: dict[str, dict[str, Any]], given: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run. If it is not among those that were made, make it and add it to them."""
    name = json.dumps(key)
    if name not in made:
        made[name] = done(key, given)
    return made[name]


def done(key: list[Any], given: argparse.Namespace) -> dict[str, Any]:
    """Make one run, and append its result to the file."""
    name, trainer, seed = key[:3]
    with tempfile.TemporaryDirectory() as folder:
        model = (given.model or stories8m()) if TASKS[name].stories else random_model(Path(folder) / "start", seed)
        result = {"run": key, "task": name, "trainer": trainer, "seed": seed}
        result |= run(name, trainer, seed, model, Path(folder) / "run", given)
    given.results.parent.mkdir(parents=True, exist_ok=True)
    with given.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    return result


def _option(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, yaml.safe_load(value)


if __name__ == "__main__":
    main()
