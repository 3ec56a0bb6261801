"""Runs of every recipe and variant with divided weights, against the same runs with all weights on every process.

    python -m tests.distributed.matrix                  # all cases, on 2 processes: 4 to 8 minutes
    python -m tests.distributed.matrix --only PPO       # cases whose name contains PPO
    python -m tests.distributed.matrix --processes 4
    python -m tests.distributed.matrix --kind hybrid --processes 4  # as on two machines
    python -m tests.distributed.matrix --kind layers    # fsdp that gathers one block at a time to sample
    python -m tests.distributed.matrix --kind zero3     # DeepSpeed, which has to be installed; zero1 and zero2 too

It prints a table: the largest difference of a weight, of a moment of Adam and of a metric after six steps of AdamW. The
exit code is 1 if a difference is above its bound, or the exports have other files, or anything but the numbers of their
tensors differs in a file.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from tests.contract.recipes import GENERATION, LORA, ONE_PROCESS, PROMPTS, RECIPES, make
from tests.distributed.ranks import on_ranks, on_two_machines, whole
from tests.tiny import saved_tiny
from trlx_like.testing.compare import apart

BOUNDS = {"weights": 2e-6, "moments": 2e-5, "metrics": 1e-5}
"""Metrics are relative to 1 where they are larger. Both runs round differently: sums over processes, and the norm."""
OF_SGD = {"weights": 1e-6}

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"backend.kind": "ddp", "backend.shard": "full"},
    "fsdp": {"backend.kind": "fsdp"},
    "hybrid": {"backend.kind": "fsdp", "backend.shard": "hybrid"},
    "layers": {"backend.kind": "fsdp", "backend.rollout": "layers", "sampler.engine": "transformers"},
    "zero1": {"backend.kind": "deepspeed", "backend.shard": "optimizer"},
    "zero2": {"backend.kind": "deepspeed", "backend.shard": "gradients"},
    "zero3": {
        "backend.kind": "deepspeed",
        # Or DeepSpeed would not divide the weights of small models between their uses.
        "backend.deepspeed_config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    },
}
"""Options of what holds the weights, by the name of its column."""

COARSE = {"DDPOTrainer / sd3": {"metrics": 1e-2}}
"""Its reward is the brightness of images with 8 bits, in which a rounding error can change a pixel by one."""

# The gradient of the bias of attention keys is 0 up to rounding. Adam divides it by its own size, unless eps is larger.
SIX_STEPS: dict[str, Any] = {
    "train.batch_size": 4,
    "train.total_steps": 6,
    "train.epochs": 100,
    "optimizer.kwargs": {"lr": 3e-3, "eps": 1e-6},
}
SGD = {**SIX_STEPS, "optimizer.name": "sgd", "optimizer.kwargs": {"lr": 3e-3, "momentum": 0.9}}
# One weight's first gradient is 2e-6, where those beside it are 1e-2, and it is rounded by 2e-8. In Adam's first step,
# lr g / (|g| + eps), that becomes lr eps / (|g| + eps)^2 times as much: 380 times with the eps above, 30 with this one.
LARGER_EPS = {"RFTTrainer / seq2seq": {"optimizer.kwargs": {"lr": 3e-3, "eps": 1e-4}}}
MORE: dict[str, dict[str, Any]] = {
    "SGD": {},
    "minibatch 1": {"train.minibatch_size": 1},
    "gradient checkpointing": {"backend.gradient_checkpointing": True},
}
SIX_TOKENS = {**GENERATION, "min_new_tokens": GENERATION["max_new_tokens"]}
ALONE: dict[str, dict[str, dict[str, Any]]] = {
    "PPOTrainer": {
        # Of one response: the explained variance divides by the variance of its returns, (.008)^2 for two tokens.
        "an empty rank": {"method.num_rollouts": 1, "eval_prompts": PROMPTS[:1], "method.gen_kwargs": SIX_TOKENS},
        "ragged": {"method.num_rollouts": 3, "train.minibatch_size": 1},
        "gradients": {"backend.shard": "gradients"},
        # Exported alone, in the format of peft, because the model is in a folder.
        "adapter of a folder": {"model.model_path": saved_tiny(), "model.peft_config": LORA},
    }
}
"""Variants of one trainer, for what does not depend on the trainer."""
REFUSED = {
    **{label.replace("-", " / "): reason for label, reason in ONE_PROCESS.items()},
    "DDPOTrainer / sdxl": "its reference takes the places of all weights; with an adapter it does not",
}


def import_deepspeed() -> None:
    """Import DeepSpeed and what it imports when it starts, or skip the test: not in each process, for 10 seconds."""
    pytest.importorskip("deepspeed")
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def cases(only: str = "", kind: str = "fsdp") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield a label, the name of the trainer, and the changes of its recipe."""
    for name, recipe in RECIPES.items():
        variants = {"plain": {}, **recipe.variants, **MORE, **ALONE.get(name, {})}
        for variant, changes in variants.items():
            label = f"{name} / {variant}"
            # The stages of ZeRO are the values of `backend.shard`.
            if (
                only in label
                and label not in REFUSED
                and (kind in ("fsdp", "layers") or "backend.shard" not in changes)
            ):
                steps = SGD if variant == "SGD" else {**SIX_STEPS, **LARGER_EPS.get(label, {})}
                yield label, name, {**changes, **steps}


def learn(rank: int, name: str, changes: Mapping[str, Any], folder: Path) -> Any:
    """Train on one of several processes; the main one returns the state, metrics and exported files."""
    on_two_machines(changes)
    trainer = make(name, folder, **changes)
    trainer.learn()
    assert trainer.run.backend.sharded == (changes["backend.kind"] != "ddp")
    items = trainer.state.items  # a reference that does not move has a fingerprint, which is small
    kept = [item for item in ("model", "optimizer", "reference") if item in items and not items[item].small]
    states = {item: whole(trainer.run.backend, items[item].item.state_dict()) for item in kept}
    metrics = {name: value for name, value in trainer.last_metrics.items() if not name.startswith("time/")}
    return None if rank else {"reference": {}, **states, "metrics": metrics, "exported": exported(folder)}


def exported(folder: Path) -> dict[str, Any]:
    """All files of a run's exports by their names: tensors and metadata of safetensors, and lines of the others."""
    files = sorted(path for path in folder.glob("**/hf_model/**/*") if path.is_file())
    return {str(path.relative_to(folder)): _content(path) for path in files}


def _content(path: Path) -> Any:
    if path.suffix != ".safetensors":
        return path.read_bytes().decode("latin-1").splitlines(keepends=True)
    with safe_open(path, "pt") as opened:
        # safetensors writes the names in any order.
        return {"metadata": dict(sorted((opened.metadata() or {}).items())), "tensors": load_file(path)}


def differences(name: str, changes: Mapping[str, Any], processes: int = 2, kind: str = "fsdp") -> dict[str, float]:
    """Train twice, with all weights on every process and with divided ones, and compare."""
    found = []
    for backend in (KINDS["ddp"], KINDS[kind]):
        with tempfile.TemporaryDirectory() as folder:
            options = {**changes, **backend}
            found.append(on_ranks(learn, name, options, Path(folder), processes=processes, timeout=600)[0])
    plain, divided = found
    return {
        "weights": max(apart(plain[item], divided[item], item) for item in ("model", "reference", "exported")),
        "moments": apart(plain["optimizer"], divided["optimizer"], "optimizer"),
        "metrics": apart(plain["metrics"], divided["metrics"], "metrics"),
    }


def too_large(label: str, found: Mapping[str, float]) -> list[str]:
    """Name the differences of a case that are above their bounds."""
    bounds = {**BOUNDS, **COARSE.get(label, {}), **(OF_SGD if label.endswith("/ SGD") else {})}
    return [column for column, value in found.items() if not value <= bounds[column]]


def main() -> int:
    """Run the cases and print the table; return 1 if one is above a bound or fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kind", default="fsdp", choices=KINDS)
    options = parser.parse_args()
    if KINDS[options.kind]["backend.kind"] == "deepspeed":
        import_deepspeed()
    wrong = 0
    print("| case | weights | moments | metrics |\n|---|---|---|---|")
    for label, name, changes in cases(options.only, options.kind):
        try:
            found = differences(name, changes, options.processes, options.kind)
        except BaseException as error:  # pytest.fail is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong += 1
            print(f"| {label} | {str(error).strip().splitlines()[-1][:200]} | | |", flush=True)
            continue
        above = too_large(label, found)
        wrong += bool(above)
        print(
            f"| {label} | {' | '.join(f'{value:.1e}' for value in found.values())} | {'ABOVE' * bool(above)}",
            flush=True,
        )
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
