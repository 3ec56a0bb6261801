"""What both sides of a comparison share: the task, the laps, and the counts of what was computed.

A program is started with the file of its task and the number of a pipe. It says in lines of JSON on the pipe that it is
ready, and then what each lap took; it begins a lap when it reads a line from its standard input. So two programs take
turns, and only one of them computes. This file runs in the environments of the peers too, and imports torch alone.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, register_flop_formula


@register_flop_formula(torch.ops.mkldnn._linear_pointwise)
def _linear(rows: Sequence[int], weight: Sequence[int], *_: Any, **more: Any) -> int:
    """Count the operations of a product by oneDNN, given the shapes [N, in] and [out, in]."""
    return 2 * rows[0] * rows[1] * weight[0]


KERNELS = {
    "products": (
        "mkldnn::_linear_pointwise",
        *(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mkldnn_convolution", "convolution_backward")),
    ),
    "attention": ("aten::_scaled_dot_product",),
    "activations": tuple(
        f"aten::{name}" for name in ("gelu", "sigmoid", "addcmul", "mul", "silu")
    ),  # the first four are GELU
    "softmax": ("aten::_log_softmax", "aten::_softmax"),
    "norms": ("aten::native_layer_norm", "aten::native_group_norm"),
    "optimizer": ("aten::_fused_adam", "aten::linalg_vector_norm"),
    "copies and sums": tuple(f"aten::{name}" for name in ("copy_", "cat", "add", "sum", "fill_", "div")),
}
"""Beginnings of the names of operations, by what they are. The first that fits counts: `addmm` is no `add`."""
WARM_UP, COUNTED = 0, 1
"""The first two turns of each case. Neither is timed; counting takes longer."""


def reward(texts: Sequence[str]) -> list[float]:
    """Return a reward per text: a number between 0 and 1 that costs nothing and is the same on both sides."""
    return [zlib.crc32(text.encode()) / 2**32 for text in texts]


def peak_rss_mib() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    try:  # of this program alone, where ru_maxrss begins with that of the program that started it
        return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 2**10
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)


def seconds_so_far(device: str) -> float:
    """Return the CPU seconds of this process; on a GPU those of the clock, after all that was started there."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_mib(device: str) -> float:
    """Return the largest memory of this process so far in MiB: resident, or of tensors on a GPU."""
    return peak_rss_mib() if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20


def by_kind(taken: Mapping[str, float]) -> dict[str, float]:
    """Add up the seconds of operations, by name, for each of `KERNELS`."""
    found = dict.fromkeys(KERNELS, 0.0)
    for name, spent in taken.items():
        if kind := next((kind for kind, names in KERNELS.items() if name.startswith(names)), None):
            found[kind] += spent
    return found


def tokens(states: torch.Tensor) -> int:
    """Count the tokens of states [B, T, H], or the latents [B, C, H, W]."""
    return states.shape[0] * (states.shape[1] if states.dim() == 3 else 1)


class Work:
    """Count the passes, tokens and optimizer steps of GPT-2, or a UNet, while it is on, whoever makes them.

    Tokens are those of whole passes: a pass through 2 of 12 blocks counts a sixth of them. A UNet has one block, whose
    tokens are the latents of images.

    Args:
        layers: Blocks of the model.
    """

    def __init__(self, layers: int) -> None:
        self.layers, self.found = layers, Counter[str]()
        self.trained = 0

    def begin(self) -> Self:
        """Switch the counting on."""
        self.hooks = [
            torch.nn.modules.module.register_module_forward_hook(self._forward),
            register_optimizer_step_post_hook(self._step),
        ]
        return self

    def end(self) -> dict[str, float]:
        """Switch the counting off, and return what was found by name."""
        for hook in self.hooks:
            hook.remove()
        return {
            "forward passes": self.found["forward passes"],
            "tokens forward": round(self.found["block tokens"] / self.layers, 1),
            "tokens backward": round(self.found["block tokens back"] / self.layers, 1),
            "optimizer steps": self.found["optimizer steps"],
            "trained weights": self.trained,
        }

    def _forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        name = type(module).__name__
        if name in ("GPT2Model", "UNet2DConditionModel"):
            self.found["forward passes"] += 1
        if name in ("GPT2Block", "UNet2DConditionModel"):
            states = output[0] if isinstance(output, tuple | dict) else output  # [B, T, H] or [B, C, H, W]
            self.found["block tokens"] += tokens(states)
            if states.requires_grad:
                states.register_hook(self._backward)

    def _backward(self, gradient: torch.Tensor) -> None:
        self.found["block tokens back"] += tokens(gradient)

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.found["optimizer steps"] += 1
        groups = optimizer.param_groups
        self.trained = sum(p.numel() for group in groups for p in group["params"] if p.grad is not None)


class Counts(TorchDispatchMode):
    """Count `Work` and the operations of matrix products, convolutions and attention.

    Operations are by the formulas of `torch.utils.flop_counter`.

    Args:
        layers: Blocks of the model.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work, self.operations = Work(layers), 0

    def begin(self) -> Counts:
        """Switch the mode on."""
        self.work.begin()
        self.__enter__()  # type: ignore[no-untyped-call]
        return self

    def end(self) -> dict[str, float]:
        """Switch the mode off, and return what was found by name."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        found = self.work.end()
        trained = found.pop("trained weights")
        return {**found, "GFLOP": round(self.operations / 1e9, 3), "trained weights": trained}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:  # a composite operation arrives whole in inference mode
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
        result = func(*args, **kwargs)
        if formula is not None:
            self.operations += formula(*args, **kwargs, out_val=result)
        return result


class Operations:
    """Measure with torch's profiler how many seconds each kind of `KERNELS` takes while it is on."""

    def begin(self) -> Self:
        """Switch the profiler on."""
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profiler.__enter__()
        return self

    def end(self) -> dict[str, float]:
        """Switch the profiler off, and return the seconds."""
        self.profiler.__exit__(None, None, None)
        return by_kind({event.key: 1e-6 * event.self_cpu_time_total for event in self.profiler.key_averages()})


class Laps:
    """Run a program lap by lap, in turns with another one.

    A turn is one lap, or several of a case, of which the last is reported. The second turn is counted, or every other
    one is profiled if the task says so.

    Args:
        phases: Returns the CPU seconds that each phase has taken so far, if the program knows.
    """

    def __init__(self, phases: Callable[[], Mapping[str, float]] = dict) -> None:
        self.task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        self.replies = os.fdopen(int(sys.argv[2]), "w")
        self.phases = phases
        self.number, self.cases = -1, len(self.task.get("cases", [None]))
        self.total = self.cases * self.task["laps"]
        self.device: str = self.task["device"]
        self.counts: Counts | Operations | None = None
        self.begun, self.before = 0.0, dict[str, float]()
        torch.set_num_threads(1)
        torch.manual_seed(0)

    def next(self) -> None:
        """Report the lap that ends, wait until the next may begin, and begin it. After the last one, end."""
        seconds = seconds_so_far(self.device)
        if self.number < 0:
            self._say({"ready": True})
        else:
            report: dict[str, Any] = {"seconds": seconds - self.begun, "phases": self._spent()}
            if self.counts is not None:
                report["counts"] = self.counts.end()
            self._say({**report, "rss": peak_mib(self.device)})
        self.number += 1
        if self.number == self.total:
            os._exit(0)  # at once: what a trainer saves at its end is not compared
        sys.stdin.readline()
        self.counts = None
        turn = self.number // (self.cases * self.task["turn"])
        if self.task.get("profiled"):
            self.counts = Operations().begin() if turn % 2 else None
        elif turn == COUNTED:
            self.counts = Counts(self.task["layers"]).begin()
        self.before, self.begun = dict(self.phases()), seconds_so_far(self.device)

    def in_turns(self) -> list[dict[str, Any]]:
        """Return the case of each lap, until all cases had their turn."""
        return [case for case in self.task["cases"] for _ in range(self.task["turn"])]

    def _spent(self) -> dict[str, float]:
        if self.device != "cpu":
            return {}  # phases are known in CPU seconds
        return {name: seconds - self.before.get(name, 0.0) for name, seconds in self.phases().items()}

    def _say(self, words: dict[str, Any]) -> None:
        print(json.dumps(words), file=self.replies, flush=True)
