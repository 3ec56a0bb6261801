"""Evaluation of a text policy: generate, score, show."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trlx_like.config.generation import swept
from trlx_like.rewards import call_metric, call_reward

if TYPE_CHECKING:
    from trlx_like.trainers.text import TextTrainer

Row = dict[str, Any]


def evaluate_text(trainer: TextTrainer[Any], gen_kwargs: Mapping[str, Any]) -> dict[str, float]:
    """Metrics over the evaluation prompts, for every combination of the list-valued `gen_kwargs`.

    `reward/mean`, `reward/std` and `metrics/<name>`, with `@temperature=0.7` behind the name in a sweep. The samples
    go to the trackers as one table.
    """
    metrics: dict[str, float] = {}
    table: list[Row] = []
    if trainer.eval_pipeline is None:
        return metrics
    for suffix, options in combinations(gen_kwargs):
        rows = trainer.group.join(_scored(trainer, options))
        for name in _numbers(rows):
            values = [row[name] for row in rows if row[name] is not None]
            metrics[_metric(name) + suffix] = statistics.fmean(values) if values else float("nan")
            if name == "reward" and values:
                metrics[f"reward/std{suffix}"] = statistics.pstdev(values)
        metrics[f"generation/length{suffix}"] = statistics.fmean(row["length"] for row in rows)
        table += [{"sweep": suffix.lstrip("@"), **row} if suffix else row for row in rows]
    if trainer.tracker is not None and table:
        columns = list({name: None for row in table for name in row})
        cells = [[row.get(name) for name in columns] for row in table]
        trainer.tracker.log_table("samples", columns, cells, trainer.progress.step)
    return metrics


def combinations(gen_kwargs: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """("@temperature=0.7@top_k=5", options) for every combination of the swept options; ("", options) without."""
    sweeps = swept(gen_kwargs)
    for values in itertools.product(*sweeps.values()):
        chosen = dict(zip(sweeps, values, strict=True))
        suffix = "".join(f"@{name}={value}" for name, value in chosen.items())
        yield suffix, {**gen_kwargs, **chosen}


def _scored(trainer: TextTrainer[Any], options: Mapping[str, Any]) -> list[Row]:
    """This process's evaluation prompts with outputs, reward and metrics, a row each."""
    rows: list[Row] = []
    for prompts in trainer.eval_batches():
        with trainer.clock("generate"):
            samples = trainer.sampler.sample(prompts, options)
        texts = {"samples": samples.samples, "prompts": samples.prompts, "outputs": samples.outputs}
        lengths = samples.completion.mask.sum(dim=1).tolist()
        columns: dict[str, list[Any]] = {
            "prompt": samples.prompts,
            "output": samples.outputs,
            "length": lengths,
            "finished": samples.finished,
        }
        if trainer.reward_fn is not None:
            rewards = call_reward(trainer.reward_fn, texts, samples.metadata, trainer.tokenizer, lengths)
            columns["reward"] = [sum(r) if isinstance(r, list) else r for r in rewards]
        if trainer.metric_fn is not None:
            values = call_metric(trainer.metric_fn, texts, samples.metadata, trainer.tokenizer)
            for name, column in values.items():
                columns[f"metrics/{name}"] = column * (len(lengths) if len(column) == 1 else 1)
        rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows


def _numbers(rows: list[Row]) -> list[str]:
    return [name for name in (rows[0] if rows else {}) if name == "reward" or name.startswith("metrics/")]


def _metric(name: str) -> str:
    return "reward/mean" if name == "reward" else name
