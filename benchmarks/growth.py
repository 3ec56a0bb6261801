"""Measure how data grows: CPU seconds to prepare it, memory a row, and milliseconds a batch.

    python -m benchmarks.growth [--rows 1000 10000 100000] [--kinds prompts sft ...] [--form csv] [--json out.json]

Rows are random words in a file of JSON lines, csv or Parquet: prompts of 14, outputs of 30. Each measurement is a
process of its own, which reads the file, makes the trainer and fills its store; the second one finds what the first one
has prepared. "resident" is anonymous memory a row above that of a run on ten rows, rows as Python objects included;
"batch" is the median time to take 32 rows, of 200 times. The model is a GPT-2 of a few thousand weights. DPO and KTO
have a live reference.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, PreTrainedTokenizerFast

from benchmarks.peers.laps import peak_rss_mib
from trlx_like import TRLConfig
from trlx_like.api import make_trainer

KINDS = {
    "prompts": "PPO",
    "sft": "SFT",
    "packed": "SFT",
    "dpo": "DPO",
    "ilql": "ILQL",
    "reward": "Reward",
    "kto": "KTO",
}
COLUMNS: dict[str, tuple[str, ...]] = {"prompts": (), "dpo": ("chosen", "rejected"), "reward": ("chosen", "rejected")}
"""The columns beside the prompt; a kind that is not named has an output."""
BATCH, TIMES = 32, 200


def words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(count))


def rows(kind: str, count: int) -> Iterator[dict[str, Any]]:
    """Make the rows of a data set, the same ones each time."""
    draw = random.Random(0)
    for _ in range(count):
        row: dict[str, Any] = {"prompt": words(draw, 14)}
        row |= {name: f" {words(draw, 30)}" for name in COLUMNS.get(kind, ("output",))}
        score = round(draw.random(), 3) if kind in ("ilql", "kto") else 0.0
        rated: dict[str, dict[str, Any]] = {"ilql": {"reward": score}, "kto": {"label": score > 0.5}}
        yield row | rated.get(kind, {})


def write(file: Path, made: Iterator[dict[str, Any]]) -> None:
    """Write rows in the form that the file's name ends in."""
    if file.suffix == ".parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(list(made)), file)
        return
    with file.open("w", encoding="utf-8", newline="") as out:
        if file.suffix == ".jsonl":
            out.writelines(json.dumps(row) + "\n" for row in made)
            return
        first = next(made)
        table = csv.DictWriter(out, first)
        table.writeheader()
        table.writerows(chain([first], made))


def tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on words, which splits most of them into two or three tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    draw = random.Random(1)
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<eos>"], show_progress=False)
    made.train_from_iterator([words(draw, 100) for _ in range(100)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def config(kind: str, file: Path, folder: Path) -> TRLConfig:
    encoder = tokenizer()
    small: dict[str, Any] = {
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 1,
        "n_positions": 256,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    train = {"trainer": f"{KINDS[kind]}Trainer", "total_steps": 1, "epochs": 1, "seq_length": 256, "batch_size": BATCH}
    method: dict[str, Any] = {"name": f"{KINDS[kind]}Config"}
    if kind == "prompts":
        method["gen_kwargs"] = {"max_new_tokens": 8}
    elif kind == "dpo":
        method["precompute_ref_log_probs"] = False
    elif kind == "packed":
        method["packing"] = True
    source = kind if kind == "prompts" else "preferences" if kind in COLUMNS else "samples"
    return TRLConfig.from_dict(
        {
            "model": {"model_path": GPT2Config(vocab_size=len(encoder), **small)},
            "tokenizer": {"tokenizer_path": encoder},
            "train": {**train, "checkpoint_dir": str(folder)},
            "method": method,
            "data": {source: str(file)},
        }
    )


def anonymous() -> int:
    """Return the bytes of memory of this process that belong to no file."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def measure(kind: str, file: Path) -> dict[str, float]:
    """Measure one run in this process."""
    with tempfile.TemporaryDirectory() as folder:
        made = config(kind, file, Path(folder))
        reward: dict[str, Any] = {"reward_fn": lambda samples, **_: [0.0] * len(samples)} if kind == "prompts" else {}
        started = time.process_time()
        trainer: Any = make_trainer(made, **reward)
        if kind == "prompts":
            batches = iter(lambda: trainer.prompts.take(BATCH), None)
        else:
            trainer.make_experience()
            batches = trainer.store.batches(BATCH, torch.Generator().manual_seed(0), 100_000)
        next(batches)
        seconds = time.process_time() - started
        gc.collect()
        resident, times = anonymous(), []
        for _ in range(TIMES):
            begun = time.process_time()
            next(batches)
            times.append(1000 * (time.process_time() - begun))
    return {"seconds": seconds, "resident": resident, "batch_ms": statistics.median(times), "peak_mib": peak_rss_mib()}


def child(kind: str, file: Path, cache: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.growth", "--measure", kind, str(file)]
    environment = {**os.environ, "TRLX_LIKE_CACHE": str(cache), "TOKENIZERS_PARALLELISM": "false"}
    found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured: dict[str, float] = json.loads(found.splitlines()[-1])
    return measured


def compare(kind: str, form: str, counts: list[int], folder: Path) -> Iterator[dict[str, Any]]:
    """Measure each number of rows twice, beside ten rows."""
    cache, before = folder / "cache", 0.0
    for count in [10, *counts]:
        file = folder / f"{kind}.{form}"
        write(file, rows(kind, count))
        first = child(kind, file, cache)
        if count == 10:
            before = first["resident"]
            continue
        again = child(kind, file, cache)
        yield {
            "kind": kind,
            "form": form,
            "rows": count,
            "first_s": round(first["seconds"], 2),
            "second_s": round(again["seconds"], 2),
            "resident_bytes_a_row": round((again["resident"] - before) / count),
            "batch_ms": round(again["batch_ms"], 3),
            "file_bytes_a_row": round(file.stat().st_size / count),
            "peak_mib": round(first["peak_mib"]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10_000, 100_000], help="numbers of rows")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of data")
    parser.add_argument("--form", choices=["jsonl", "csv", "parquet"], default="jsonl", help="form of the file")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.measure:
        print(json.dumps(measure(given.measure[0], Path(given.measure[1]))))
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in given.kinds:
            for result in compare(kind, given.form, given.rows, Path(folder)):
                results.append(result)
                print("  ".join(f"{name} {value}" for name, value in result.items()), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
