"""Shared by the two examples of DDPO: training the base model, tuning it, and showing the results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import trlx_like
from trlx_like import TRLConfig
from trlx_like.tracking.pictures import grid as joined


def train_denoiser(
    pipeline: Any,
    latents: Tensor,
    encode: Callable[[Tensor], Tensor],
    *,
    steps: int,
    batch_size: int = 64,
    rate: float = 2e-3,
    seen: Callable[[list[float]], None] = lambda losses: None,
) -> list[float]:
    """Train UNet and text encoder to denoise; return the mean squared error of the prediction at each step.

    latents: all pictures [N, *x]. encode: maps rows of pictures [B] to embeddings of their captions [B, T, H]. seen:
    called after every step with the losses so far. rate: the highest learning rate of the one cycle.
    """
    unet, scheduler = pipeline.unet, pipeline.scheduler
    weights = [*unet.parameters(), *pipeline.text_encoder.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    losses: list[float] = []
    for _ in range(steps):
        rows = torch.randint(len(latents), (batch_size,))
        times = torch.randint(scheduler.config.num_train_timesteps, (batch_size,))
        noise = torch.randn(batch_size, *latents.shape[1:])
        noisy = scheduler.add_noise(latents[rows], noise, times)
        output: Tensor = unet(noisy, times, encoder_hidden_states=encode(rows), return_dict=False)[0]
        by_v = scheduler.config.prediction_type == "v_prediction"
        target = scheduler.get_velocity(latents[rows], noise, times) if by_v else noise
        loss = (output - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seen(losses)
    return losses


@dataclass(frozen=True)
class Task:
    """Describe a task for DDPO: its reward, number of rounds and options."""

    name: str
    reward_fn: Any
    rounds: int
    rate: float = 1e-3  # learning rate
    options: dict[str, Any] = field(default_factory=dict)  # options of DDPO


@dataclass
class Result:
    """Hold the metrics of the first and the last evaluation of one run, both from the same noise."""

    task: Task
    before: dict[str, float]
    after: dict[str, float]
    seconds: float  # CPU seconds
    pictures: tuple[list[Image.Image], list[Image.Image]]  # one picture per prompt, before and after


def tune(task: Task, config: TRLConfig, prompts: list[str], metric_fn: Any, repeats: int) -> Result:
    """Run a task. repeats: how many drawings of each prompt are evaluated."""
    began = time.process_time()
    trlx_like.train(config, task.reward_fn, prompts, metric_fn=metric_fn, eval_prompts=prompts * repeats)
    seconds, directory = time.process_time() - began, Path(config.train.checkpoint_dir)
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    found = [_metrics(row) for row in rows if "reward/mean" in row]
    folders = sorted(path for path in (directory / "images").iterdir() if path.is_dir())
    before, after = (
        [Image.open(folder / f"{place:03d}.png").copy() for place in range(len(prompts))]
        for folder in (folders[0], folders[-1])
    )
    return Result(task, found[0], found[-1], seconds, (before, after))


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """Select the metrics of `metric_fn`, under its names."""
    prefix = "metrics/"
    return {name.removeprefix(prefix): float(value) for name, value in row.items() if name.startswith(prefix)}


def table(results: dict[int, list[Result]], samples: int, shown: dict[str, str]) -> str:
    """Make a table with a line per seed and task. samples: drawings per round. shown: metrics and number formats."""
    head = "  ".join(f"{name:>10}" for name in shown)
    lines = [f"{'seed':>4}  {'tuned for':20} {'queries':>7}  {head}  CPU s"]
    for seed, result in ((seed, result) for seed, all_of_it in results.items() for result in all_of_it):
        spans = [f"{result.before[name]:{form}}>{result.after[name]:{form}}" for name, form in shown.items()]
        cells = "  ".join(f"{span:>10}" for span in spans)
        lines.append(
            f"{seed:4}  {result.task.name:20} {result.task.rounds * samples:7}  {cells}  {result.seconds:5.0f}"
        )
    return "\n".join(lines)


def grid(results: Sequence[Result], prompts: Sequence[str], path: Path) -> None:
    """Save a picture: a row of drawings before tuning and a row after each task, all from the same noise."""
    rows = [("before", results[0].pictures[0]), *((result.task.name, result.pictures[1]) for result in results)]
    captions = [f"{prompt}\n{name}" for name, _ in rows for prompt in prompts]
    drawings = [picture for _, row in rows for picture in row]
    path.parent.mkdir(parents=True, exist_ok=True)
    joined(drawings, captions, columns=len(prompts)).save(path)
