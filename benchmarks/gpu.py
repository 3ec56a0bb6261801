"""Run on one GPU what the tests run on a CPU only, and check what the documentation promises about it.

    python -m benchmarks.gpu                      # a GPU with 16 GiB; under ten minutes
    python -m benchmarks.gpu --device cpu         # the same checks with tiny models, to test this program
    python -m benchmarks.gpu --only resume

It prints a table in Markdown. The exit code is 1 if a promise does not hold: a run that does not end with finite losses
or with the canary's consent, a resumed run that is another one, memory that is not within 10 % of `trlx-like estimate`,
or an option that is neither followed nor refused by name. Left out: several GPUs, for which `fsdp` on one is `ddp`, and
speed, which is reported and not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from benchmarks.ddpo_memory import stable_diffusion
from tests.contract.recipes import ingredients, make
from tests.contract.runs import StopAfter, assert_same, run_until_stopped, state_of
from tests.tiny import tiny_config
from trlx_like.errors import ConfigError
from trlx_like.estimate import estimate
from trlx_like.pipelines.prompts import PromptPipeline
from trlx_like.samplers.engines import TransformersEngine
from trlx_like.samplers.text import TextSampler

Check = Callable[[Path, bool], str]
"""Runs in an empty folder, on a GPU or not, and returns what it found; AssertionError breaks a promise."""

TRAINERS = ("PPOTrainer", "GRPOTrainer", "ILQLTrainer", "DPOTrainer", "DDPOTrainer")
STEPS = {"train.total_steps": 4, "train.epochs": 100, "train.batch_size": 4, "train.eval_interval": 1000}
WITHIN = 0.1
"""How far allocated memory may be from the estimate, as a share of it."""


def on(gpu: bool) -> dict[str, Any]:
    """Return the options of a run: on a GPU with a model of the size of GPT-2, else with a tiny one."""
    if not gpu:
        return {**STEPS, "backend.device": "cpu"}
    model = tiny_config(n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=1024)
    return {**STEPS, "model.model_path": model}


def options_of(trainer: str, gpu: bool) -> dict[str, Any]:
    """Return the options of a trainer's run. DDPO brings its own tiny pipeline."""
    return {name: value for name, value in on(gpu).items() if trainer != "DDPOTrainer" or "model_path" not in name}


def trained(trainer: Any) -> Any:
    """Train, and check that all losses were finite."""
    trainer.learn()
    losses = {name: value for name, value in trainer.last_metrics.items() if name.startswith("losses/")}
    assert losses and all(map(math.isfinite, losses.values())), losses
    assert trainer.progress.step == STEPS["train.total_steps"] and not trainer.progress.nonfinite_steps, losses
    return trainer


def runs(name: str, kind: str, precision: str, folder: Path, gpu: bool) -> str:
    """Train a few steps in a number format."""
    options = {**options_of(name, gpu), "backend.kind": kind, "backend.mixed_precision": precision}
    if kind == "fsdp" and precision == "fp16":
        try:
            make(name, folder, **options)
        except ConfigError as error:
            assert "use bf16" in str(error), error
            return "refused by name"
        raise AssertionError("fp16 under fsdp is neither followed nor refused")
    begun = time.perf_counter()
    loss = trained(make(name, folder, **options)).last_metrics["losses/total_loss"]
    return f"loss {loss:.3g}, {(time.perf_counter() - begun) / STEPS['train.total_steps']:.2f} s a step"


def canary(folder: Path, gpu: bool) -> str:
    """Sample from a copy in bfloat16, which the canary compares with the policy in every round."""
    # Steps that move nothing leave what the number format alone does to the ratio.
    still = {"optimizer.kwargs": {"lr": 1e-12}}
    options = {**on(gpu), **still, "sampler.engine": "copy", "sampler.kwargs": {"dtype": "bfloat16"}}
    metrics = trained(make("PPOTrainer", folder, **options)).last_metrics
    found = {name: value for name, value in metrics.items() if name.startswith("policy/ratio")}
    assert found and all(map(math.isfinite, found.values())), found
    return ", ".join(f"{name} {value:.3g}" for name, value in found.items())


def resume(folder: Path, gpu: bool) -> str:
    """Stop a run in its second step, continue it, and compare with one that was not stopped."""
    run_until_stopped(make("PPOTrainer", folder / "stopped", **on(gpu), callbacks=[StopAfter(2)]))
    reset()
    again = {**on(gpu), "train.resume_from_checkpoint": "auto"}
    states = [state_of(trained(make("PPOTrainer", folder / name, **again))) for name in ("stopped", "through")]
    for item in ("model", "optimizer"):
        assert_same(states[0][item], states[1][item])
    return "weights and moments are equal bit by bit"


def memory(folder: Path, gpu: bool) -> str:
    """Compare the allocator's peak with the estimate."""
    config, _ = ingredients("PPOTrainer", folder, **on(gpu))
    expected = estimate(config).peak / 2**20
    if not gpu:
        trained(make("PPOTrainer", folder, **on(gpu)))
        return f"estimate {expected:.1f} MiB; no allocator to compare with"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trained(make("PPOTrainer", folder, **on(gpu)))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    assert abs(peak - expected) <= WITHIN * expected, f"estimate {expected:.0f} MiB, allocator {peak:.0f} MiB"
    return f"estimate {expected:.0f} MiB, allocator {peak:.0f} MiB"


def decode(folder: Path, gpu: bool) -> str:
    """Report what a step of decoding takes beside one read of all weights."""
    trainer = make("PPOTrainer", folder, **on(gpu))
    lm, device, words = trainer.model.lm.eval(), trainer.run.device, trainer.tokenizer
    rows, new = 8, 64 if gpu else 8
    prompts = PromptPipeline(["ab"] * rows, 8, words)[range(rows)]
    sampler = TextSampler(TransformersEngine(lm, words), words, device=device)
    options = {"max_new_tokens": new, "eos_token_id": None}
    size = sum(weight.numel() * weight.element_size() for weight in lm.parameters())
    block = torch.empty(2**31 if gpu else 2**22, dtype=torch.uint8, device=device)

    def seconds(run: Callable[[], Any]) -> float:
        run()
        wait: Callable[[], None] = torch.cuda.synchronize if gpu else lambda: None
        times = []
        for _ in range(3):
            wait()
            begun = time.perf_counter()
            run()
            wait()
            times.append(time.perf_counter() - begun)
        return min(times)

    bandwidth = 2 * block.numel() / seconds(block.clone)  # read and written
    ways = {"by the modules": {}, "with a static cache": {"cache_implementation": "static"}}
    taken = {way: seconds(partial(sampler.sample, prompts, {**options, **more}, 1)) for way, more in ways.items()}
    steps = ", ".join(f"{1e3 * spent / new:.2f} ms {way}" for way, spent in taken.items())
    return f"a step of {rows} rows: {steps}; to read all weights: {1e3 * size / bandwidth:.2f} ms"


def lora(folder: Path, gpu: bool) -> str:
    """Train a LoRA of a pipeline of the size of Stable Diffusion 1.5, or of the tiny one."""
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}
    options = {**options_of("DDPOTrainer", gpu), "model.peft_config": adapter, "train.minibatch_size": 1}
    if gpu:
        options |= {"model.model_path": stable_diffusion(), "backend.mixed_precision": "bf16"}
        options |= {"backend.gradient_checkpointing": True}
    trained(make("DDPOTrainer", folder, **options))
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if gpu else "tiny pipeline"


def checks() -> Iterator[tuple[str, Check]]:
    """Yield the name of each check, and what it runs."""
    for name in TRAINERS:
        for kind in ("ddp", "fsdp"):
            for precision in ("bf16", "fp16"):
                yield f"{name} / {kind} / {precision}", partial(runs, name, kind, precision)
    for check in (canary, resume, memory, decode, lora):
        yield check.__name__, check


def reset() -> None:
    """Forget the number format and the device of the run before, and free its memory."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    """Run the checks and print the table; return 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="checks whose name contains this")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    if gpu and not torch.cuda.is_available():
        parser.error("there is no GPU: use --device cpu to try the program out")
    print(f"{torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}\n")
    print("| check | holds | found |\n|---|---|---|")
    broken = 0
    for name, check in checks():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # the table stands alone
                    found, holds = check(Path(folder), gpu), True
            except Exception as error:  # a check that fails must not hide the others
                found, holds = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", False
        broken += not holds
        print(f"| {name} | {'yes' if holds else '**no**'} | {found} |", flush=True)
        reset()
    print(f"\n{broken} broken")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
