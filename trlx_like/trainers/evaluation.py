"""Evaluation: generate, score, show; of a text policy as a whole, of others in parts."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trlx_like.config.generation import swept
from trlx_like.tracking import EVALUATION
from trlx_like.trainers.samples import log_rows, reward_columns
from trlx_like.trainers.scoring import Row, Tally

if TYPE_CHECKING:
    from trlx_like.samplers.text import TextSampler
    from trlx_like.trainers.base import BaseRLTrainer
    from trlx_like.trainers.text import TextTrainer


def evaluate_text(
    trainer: TextTrainer[Any], gen_kwargs: Mapping[str, Any], reference: Mapping[str, Sequence[str]] | None = None
) -> dict[str, float]:
    """Metrics over the evaluation prompts, for every combination of the list-valued `gen_kwargs`.

    `reward/mean`, `reward/std`, `reward/<name>/mean` of each of several functions, and `metrics/<name>`, with
    `@temperature=0.7` behind the name in a sweep. The samples go to the trackers as one table. reference: `texts` of
    another model, to be shown beside the policy's.
    """
    metrics: dict[str, float] = {}
    table: list[Row] = []
    if trainer.eval_pipeline is None:
        return metrics
    trainer.sync_sampler()
    for suffix, options in combinations(gen_kwargs):
        scored = _scored(trainer, options)
        others = (reference or {}).get(suffix, ())
        if len(others) == len(scored):  # else they are of other prompts
            pairs = zip(scored, others, strict=True)
            scored = [{"prompt": row["prompt"], "output": row["output"], "reference": o, **row} for row, o in pairs]
        rows = trainer.world.join(scored)
        metrics |= means(rows, suffix)
        metrics[f"generation/length{suffix}"] = statistics.fmean(row["length"] for row in rows)
        table += [{"sweep": suffix.lstrip("@"), **row} if suffix else row for row in rows]
    log_rows(trainer, EVALUATION, table, trainer.progress.step)
    return metrics


def rate(trainer: BaseRLTrainer[Any], seen: Sequence[Row], shown: Sequence[Row]) -> None:
    """Adds to this process's rows what the reward and metric functions say of what they see of them."""
    if trainer.reward_fn is not None:
        scores = trainer.scoring.score(trainer.reward_fn, seen)
        trainer.scoring.total(Tally().add(scores))
        for place, row in enumerate(shown):
            row |= reward_columns(scores.rewards, scores.components, place)
    if trainer.metric_fn is not None:
        for name, values in trainer.scoring.measure(trainer.metric_fn, seen).items():
            for row, value in zip(shown, values, strict=True):
                row[f"metrics/{name}"] = value


def means(rows: Sequence[Row], suffix: str = "") -> dict[str, float]:
    """Metrics of rated rows; suffix: behind their names."""
    metrics = {}
    names = dict.fromkeys(name for row in rows for name in row)
    for name in [name for name in names if name == "reward" or name.startswith(("reward/", "metrics/"))]:
        values = [row[name] for row in rows if row.get(name) is not None]
        metric = f"{name}/mean" if name.startswith("reward") else name
        metrics[metric + suffix] = statistics.fmean(values) if values else float("nan")
        if name == "reward" and values:
            metrics[f"reward/std{suffix}"] = statistics.pstdev(values)
    return metrics


def texts(trainer: TextTrainer[Any], sampler: TextSampler, gen_kwargs: Mapping[str, Any]) -> dict[str, list[str]]:
    """What a sampler writes to this process's evaluation prompts, for each of `combinations`."""
    return {
        suffix: [text for prompts in trainer.eval_batches() for text in sampler.sample(prompts, options).outputs]
        for suffix, options in combinations(gen_kwargs)
    }


def combinations(gen_kwargs: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """("@temperature=0.7@top_k=5", options) for every combination of the swept options; ("", options) without."""
    sweeps = swept(gen_kwargs)
    for values in itertools.product(*sweeps.values()):
        chosen = dict(zip(sweeps, values, strict=True))
        suffix = "".join(f"@{name}={value}" for name, value in chosen.items())
        yield suffix, {**gen_kwargs, **chosen}


def _scored(trainer: TextTrainer[Any], options: Mapping[str, Any]) -> list[Row]:
    """This process's evaluation prompts with outputs, reward and metrics, a row each."""
    seen: list[Row] = []
    shown: list[Row] = []
    for prompts in trainer.eval_batches():
        with trainer.clock("generate"):
            samples = trainer.sampler.sample(prompts, options)
        for row, reason in zip(samples.rows(), samples.finish_reasons, strict=True):
            seen.append(row)
            texts = {"prompt": row["prompts"], "output": row["outputs"]}
            shown.append({**texts, "length": row["length"], "finish_reason": reason})
    rate(trainer, seen, shown)
    return shown
