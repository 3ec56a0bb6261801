"""Measure CPU seconds per phase, throughput and memory of one training run. Wall time would vary on shared machines."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.peers.laps import peak_rss_mib
from trlx_like.data import Experience
from trlx_like.trainers.callbacks import Callback


class Counter(Callback):
    """Count the sequences and response tokens that went through the store, once per round."""

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0

    def on_experience(self, trainer: Any, metrics: Any) -> None:
        self.sequences += len(trainer.store)
        self.tokens += sum(_learned(element) for element in trainer.store.elements)


def _learned(element: Experience) -> int:
    """Count the real tokens of an element without its prompt."""
    masks = {column.metadata["mask"] for column in fields(element) if "mask" in column.metadata} - {"prompt_mask"}
    held = [getattr(element, mask) for mask in masks]
    return sum(int(mask.sum()) for mask in held if mask is not None and mask.dtype == torch.bool)


def measure(run: Callable[[Path, list[Callback]], Any]) -> dict[str, Any]:
    """Train once in a temporary folder. `run(folder, callbacks)` must train and return the trainer."""
    counter = Counter()
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer = run(Path(folder), [counter])
    total = time.process_time() - started
    phases = {name: round(seconds, 3) for name, seconds in sorted(trainer.clock.cpu.items())}
    steps = trainer.progress.step
    return {
        "cpu_seconds": round(total, 3),
        "cpu_seconds_per_step": round(total / steps, 4),
        "phases": {**phases, "rest": round(total - sum(phases.values()), 3)},
        "steps": steps,
        "samples_per_cpu_second": round(counter.sequences / total, 2),
        "tokens_per_cpu_second": round(counter.tokens / total, 1),
        "peak_rss_mib": round(peak_rss_mib(), 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def show(results: dict[str, Any], json_file: Path | None) -> None:
    """Print the results, and write them as JSON if a file is given."""
    for name, seconds in results.get("phases", {}).items():
        print(f"  {name:<12}{seconds:9.2f} CPU s {100 * seconds / results['cpu_seconds']:5.1f} %")
    for name, value in results.items():
        if name != "phases":
            print(f"{name:<24}{value}")
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1), encoding="utf-8")


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the arguments of all benchmarks, parse the command line, and set the number of threads."""
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    return given
