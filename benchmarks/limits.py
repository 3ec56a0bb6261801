"""Show how near each phase comes to what the machine can do: the share of the limit of matrix products or of memory.

    python -m benchmarks.limits --write

The limit of a phase is the longer of two times: its matrix products (attention is not counted) at the rate of those of
1024 x 1024, and the bytes that it must read and write at the rate of multiplying numbers in place. Its share is that
time over the measured one. All in CPU seconds of one thread, the least of some repeats. The model is a GPT-2 with
random weights in float32.

Two further tables tell what a forward and a backward pass consist of, and how fast the two libraries of torch multiply
matrices of the sizes that occur there. `--write` puts the rows into docs/speed.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.peers.laps import Counts, by_kind
from benchmarks.ppo import tokenizer
from benchmarks.side_by_side import PAGE, PROMPT, SIZES, commit, machine, put_row, save_model
from trlx_like.config import OptimizerConfig
from trlx_like.data import Completion
from trlx_like.distributed.setup import keep_freed_memory
from trlx_like.models.faster import faster, product
from trlx_like.models.policy import LanguagePolicy
from trlx_like.optim import make_optimizer
from trlx_like.samplers.engines import TransformersEngine
from trlx_like.samplers.recorded import WORTH

ROWS = {"1.8M": 32, "124M": 8}
RESPONSE, DECODED = 48, 16
Phase = tuple[str, float, float, float]
"""Name, CPU seconds, operations, and bytes that have to be read and written."""
PRODUCTS = ((8, 768, 3072), (32, 144, 576), (512, 144, 576), (384, 144, 2000), (512, 768, 3072))
"""Sizes (n, k, m) of products [n, k] @ [k, m] of linear layers."""


def least(run: Callable[[], Any], repeats: int) -> float:
    """Return the least CPU seconds of some calls, after one that is not timed."""
    run()
    found = []
    for _ in range(repeats):
        begun = time.process_time()
        run()
        found.append(time.process_time() - begun)
    return min(found)


def product_rate(repeats: int) -> float:
    """Return the operations per second of a product of large matrices, by the library of torch that is faster."""
    sides = torch.randn(2, 1024, 1024)
    runs = (lambda: torch.mm(sides[0], sides[1])), (lambda: product(sides[0], sides[1]))
    return 2 * 1024**3 / min(least(run, repeats) for run in runs)


def memory_rate(size: float, repeats: int) -> float:
    """Return the bytes per second at which numbers are multiplied in place, which moves so many bytes."""
    held = torch.ones(int(size) // 8)
    return held.numel() * 8 / least(lambda: held.mul_(1.0), 5 * repeats)


def operations(run: Callable[[], Any]) -> float:
    """Count the operations of a call."""
    counts = Counts(layers=1).begin()
    run()
    return 1e9 * counts.end()["GFLOP"]


def generate(engine: TransformersEngine, prompts: Tensor, tokens: int) -> None:
    """Draw `tokens` tokens after each of the prompts [B, P], as trainers do."""
    options = GenerationConfig(do_sample=True, temperature=1.0, max_new_tokens=tokens, pad_token_id=0)
    engine.generate(prompts, torch.ones_like(prompts).bool(), options, [], keys=torch.arange(len(prompts)))


def sampling(lm: Any, rows: int, repeats: int) -> Iterator[Phase]:
    """Measure reading the prompts, and one step of decoding."""
    prompt = torch.randint(lm.config.vocab_size - 1, (rows, PROMPT))
    engine = TransformersEngine(lm, tokenizer(lm.config.vocab_size))
    for _ in range(1 + WORTH // DECODED):
        generate(engine, prompt, 1 + DECODED)  # until its steps are replayed

    weights = 4 * sum(weight.numel() for weight in lm.parameters())
    config = lm.config
    token = 2 * 4 * config.n_layer * config.n_embd * rows  # keys and values of a token of each row
    seconds, done = [], []
    for tokens in (1, 1 + DECODED):
        seconds.append(least(lambda tokens=tokens: generate(engine, prompt, tokens), repeats))  # type: ignore[misc]
        done.append(operations(lambda tokens=tokens: generate(engine, prompt, tokens)))  # type: ignore[misc]
    yield "prefill", seconds[0], done[0], weights + token * PROMPT
    step = (seconds[1] - seconds[0]) / DECODED, (done[1] - done[0]) / DECODED
    yield "decode, a step", *step, weights + token * (PROMPT + DECODED / 2)


def passes(lm: Any, rows: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return two functions: one scores prompts and responses, the other computes the gradients too."""
    policy, ids = LanguagePolicy(lm), torch.randint(lm.config.vocab_size - 1, (rows, PROMPT + RESPONSE))
    mask = torch.ones_like(ids).bool()
    batch = Completion(ids[:, :PROMPT], mask[:, :PROMPT], ids[:, PROMPT:], mask[:, PROMPT:])

    def forward() -> Any:
        return policy(batch).logprobs.sum()

    def both() -> None:
        lm.zero_grad(set_to_none=True)
        forward().backward()

    return forward, both


def learning(lm: Any, rows: int, repeats: int) -> Iterator[Phase]:
    """Measure the forward and the backward pass over prompts and responses, and a step of AdamW."""
    forward, both = passes(lm, rows)
    trained = [weight for weight in lm.parameters() if weight.requires_grad]
    optimizer = make_optimizer(trained, OptimizerConfig(name="adamw", kwargs={"lr": 1e-6}))
    weights = 4 * sum(weight.numel() for weight in trained)
    ahead, whole, done = least(forward, repeats), least(both, repeats), operations(forward)
    yield "forward", ahead, done, weights
    yield "backward", whole - ahead, operations(both) - done, 2 * weights
    # Weight, gradient and two moments are read; weight and moments are written.
    yield "optimizer step", least(optimizer.step, repeats), 0.0, 7 * weights


def kernels(lm: Any, rows: int, repeats: int) -> str:
    """Tell what parts of a forward and a backward pass different operations take, as cells of a table."""
    _, run = passes(lm, rows)
    whole, taken = least(run, repeats), dict[str, float]()
    for _ in range(repeats):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run()
        for event in profiler.key_averages():
            taken[event.key] = min(taken.get(event.key, torch.inf), 1e-6 * event.self_cpu_time_total)
    parts = [part for kind, part in by_kind(taken).items() if kind != "optimizer"]
    cells = [f"{1e3 * whole:,.1f}", *(f"{part / whole:.0%}" for part in (*parts, whole - sum(parts)))]
    return " | ".join([*cells, f"{operations(run) / parts[0] / 1e9:.0f}"]).replace("%", " %")


def libraries(size: tuple[int, int, int], repeats: int) -> str:
    """Tell the billions of operations per second of both libraries, and of oneDNN over MKL, as cells of a table."""
    n, k, m = size
    states, weight, bias = torch.randn(n, k), torch.randn(m, k), torch.randn(m)
    times = max(1, 2**28 // (n * k * m))

    def rate(run: Callable[[], Any]) -> float:
        return 2e-9 * n * k * m * times / least(lambda: [run() for _ in range(times)], 5 * repeats)

    mkl, onednn = rate(lambda: functional.linear(states, weight, bias)), rate(lambda: product(states, weight, bias))
    return f"{mkl:.0f} | {onednn:.0f} | {onednn / mkl:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each phase (default 3)")
    parser.add_argument("--write", action="store_true", help="put the rows into docs/speed.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as trainers do
    products, text = product_rate(10 * given.repeats), PAGE.read_text(encoding="utf-8")
    print(f"{machine()}, {time.strftime('%Y-%m-%d')}, {commit()}: {products / 1e9:.0f} GFLOP/s")
    for size, rows in ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            save_model(size, Path(folder))
            lm = faster(AutoModelForCausalLM.from_pretrained(folder).eval())
        assert lm.config.n_layer == SIZES[size]["layers"]
        for part in (sampling, learning):
            for name, seconds, done, size_of in part(lm, rows, given.repeats):
                limits = {"products": done / products, "memory": size_of / memory_rate(size_of, given.repeats)}
                kind = max(limits, key=limits.__getitem__)
                row = f"| {size}, {name} | {1e3 * seconds:,.1f} | {done / 1e9:,.2f} | {size_of / 1e6:,.0f} "
                row += f"| {kind} | {limits[kind] / seconds:.0%} |".replace("%", " %")
                print(row, flush=True)
                text = put_row(text, "phase", row)
        row = f"| {size}, {rows // 4} rows | {kernels(lm, rows // 4, given.repeats)} |"
        print(row, flush=True)
        text = put_row(text, "a forward and a backward pass", row)
    for n, k, m in PRODUCTS:
        row = f"| {n} x {k} by {k} x {m} | {libraries((n, k, m), given.repeats)} |"
        print(row, flush=True)
        text = put_row(text, "product", row)
    if given.write:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
