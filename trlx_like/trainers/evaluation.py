"""Evaluation of a text policy: generate, score and log. `means` is also used for images."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from trlx_like.config.generation import swept
from trlx_like.pipelines.prompts import PromptBatch
from trlx_like.samplers.agreement import sampled_together
from trlx_like.samplers.text import TextSampler
from trlx_like.tracking import EVALUATION
from trlx_like.trainers.context import EVALUATION as DRAWS, Metrics, Row, Run


def evaluate_text(
    run: Run,
    rate: Callable[[Sequence[Row], Sequence[Row]], None],
    sampler: TextSampler,
    batches: Sequence[PromptBatch],
    gen_kwargs: Mapping[str, Any],
    *,
    reference: Mapping[str, Sequence[str]],
    sets: Sequence[str],
) -> Metrics:
    """Generate responses to the evaluation prompts, score them, and log the samples as one table.

    Args:
        run: The run.
        rate: `Scoring.rate` with the functions of the run: scores samples, and adds the results to their table.
        sampler: Generates the responses.
        batches: This process's share of the prompts, as `World.share` returns it.
        gen_kwargs: Generation options. Each combination of list-valued options is evaluated separately.
        reference: Responses of another model, as `texts` returns them, to show in the same table; may be empty.
        sets: The name of the evaluation set that each prompt is in, if there are several.

    Returns:
        `reward/mean`, `reward/std`, `reward/<name>/mean` for each of several reward functions, `metrics/<name>` and
        `generation/length`. In a sweep each name ends in the options, such as `@temperature=0.7`. With several sets
        these are over all of them, and for each set there are the same names with its own behind them: `@<set>`.
    """
    metrics: Metrics = {}
    table: list[Row] = []
    for number, (suffix, options) in enumerate(combinations(gen_kwargs)):
        stream = run.stream(DRAWS, run.progress.step, number)
        seen, shown = sampled_together(run.world, partial(_sampled, run, sampler, batches, options, stream))
        rate(seen, shown)
        others = run.world.share(list(reference.get(suffix, ())))
        if len(others) == len(shown):  # else they are of other prompts
            pairs = zip(shown, others, strict=True)
            shown = [{"prompt": row["prompt"], "output": row["output"], "reference": o, **row} for row, o in pairs]
        if sets:
            shown = [{"set": name, **row} for name, row in zip(sets, shown, strict=True)]
        rows = run.world.join(shown)
        metrics |= means(rows, suffix)
        for name in dict.fromkeys(row["set"] for row in rows if "set" in row):
            metrics |= means([row for row in rows if row["set"] == name], f"@{name}{suffix}")
        table += [{"sweep": suffix.lstrip("@"), **row} if suffix else row for row in rows]
    run.log_table(EVALUATION, table, run.progress.step)
    return metrics


def means(rows: Sequence[Row], suffix: str = "") -> Metrics:
    """Average the rewards, metrics and lengths of samples; samples without a value are left out of its mean.

    Args:
        rows: The scored samples.
        suffix: Appended to the name of each metric.
    """
    metrics = {}
    names = dict.fromkeys(name for row in rows for name in row)
    if "length" in names:
        metrics[f"generation/length{suffix}"] = statistics.fmean(row["length"] for row in rows)
    for name in [name for name in names if name == "reward" or name.startswith(("reward/", "metrics/"))]:
        values = [row[name] for row in rows if row.get(name) is not None]
        metric = f"{name}/mean" if name.startswith("reward") else name
        metrics[metric + suffix] = statistics.fmean(values) if values else float("nan")
        if name == "reward" and values:
            metrics[f"reward/std{suffix}"] = statistics.pstdev(values)
    return metrics


def texts(
    run: Run, sampler: TextSampler, batches: Sequence[PromptBatch], gen_kwargs: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Generate responses to the evaluation prompts of all processes; return their texts by suffix of `combinations`.

    The arguments are those of `evaluate_text`, which draws the same random numbers.
    """
    found = {}
    for number, (suffix, options) in enumerate(combinations(gen_kwargs)):
        stream = run.stream(DRAWS, run.progress.step, number)
        shown = sampled_together(run.world, partial(_sampled, run, sampler, batches, options, stream))[1]
        found[suffix] = run.world.join([row["output"] for row in shown])
    return found


def combinations(gen_kwargs: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each combination of the list-valued (swept) generation options.

    Args:
        gen_kwargs: Generation options. Without list-valued ones there is one combination.

    Yields:
        A suffix for names, such as "@temperature=0.7@top_k=5" (empty without a sweep), and the options.
    """
    sweeps = swept(gen_kwargs)
    for values in itertools.product(*sweeps.values()):
        chosen = dict(zip(sweeps, values, strict=True))
        suffix = "".join(f"@{name}={value}" for name, value in chosen.items())
        yield suffix, {**gen_kwargs, **chosen}


def _sampled(
    run: Run, sampler: TextSampler, batches: Sequence[PromptBatch], options: Mapping[str, Any], stream: int
) -> tuple[list[Row], list[Row]]:
    """Generate; return the arguments of a reward function for each sample, and its row in the table."""
    seen: list[Row] = []
    for prompts in batches:
        with run.clock("generate"):
            seen += sampler.sample(prompts, options, stream).rows()
    names = {"prompt": "prompts", "output": "outputs", "length": "length", "finish_reason": "finish_reasons"}
    return seen, [{column: row[name] for column, name in names.items()} for row in seen]
