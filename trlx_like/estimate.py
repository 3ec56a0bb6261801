"""What `trlx-like estimate` prints: the memory that a run needs on each GPU, without weights and without a GPU.

The trainer is the real one, built on tensors without memory (`imagined.py`), and so are its longest micro-batch and
its forward and backward pass. Weights, gradients, optimizer states and copies are counted from shapes. Left out on
purpose: reward functions and judges, which may use the GPU too, what CUDA itself takes, and fragmentation.
"""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trlx_like.check import quiet
from trlx_like.config import TRLConfig
from trlx_like.data import Completion
from trlx_like.data.diffusion import DenoisingExperience
from trlx_like.distributed.footprint import DIVIDES, Table, bytes_of, divide, forget_casts, tensors_of
from trlx_like.imagined import LiveBytes, imagined
from trlx_like.optim import bounded
from trlx_like.rehearsal import make_rehearsal
from trlx_like.samplers.decode import last_only, spare
from trlx_like.samplers.text import TextSampler
from trlx_like.samplers.vllm_colocated import GPU_MEMORY_UTILIZATION
from trlx_like.trainers.probe import generate_longest

COLUMNS = (
    *("weights", "reference", "heads", "gradients", "optimizer", "copies"),
    *("activations", "logits", "KV cache"),
)
"""Kinds of memory. Copies are those of `train.undo_nonfinite_updates` and of the exchange between processes. The memory
of a vLLM in this process counts as KV cache."""
QUANTIZED = {"nf4": 0.5 + 1 / 64 + 4 / 64 / 256, "int8": 1.0}
"""Bytes of a weight: 4 bits, a byte for each block of 64, 4 bytes for 256 of these; or 8 bits."""


@dataclass
class Estimate:
    """Hold the memory of a run on each GPU.

    Attributes:
        table: Bytes by phase and kind.
        budget: Bytes of a GPU.
        copied: Bytes of CPU memory that `train.async_save` takes on the process that copies most.
        kept: Bytes of CPU memory that `train.keep_trunk` takes for a sample of the greatest length; 0 if it keeps
            nothing.
        samples: The samples that a process makes in a round; 0 if they are given.
    """

    table: Table
    budget: float
    copied: int = 0
    kept: int = 0
    samples: int = 0

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(row.total() for row in self.table.values())

    @property
    def fits(self) -> bool:
        """Whether the largest phase fits into a GPU."""
        return self.peak <= self.budget

    def lines(self) -> list[str]:
        """Return the table as lines, in GiB."""
        shown = [name for name in COLUMNS if any(row[name] for row in self.table.values())]
        head = f"{'GiB per GPU':<17}" + "".join(f"{name:>12}" for name in (*shown, "total"))
        rows = [
            f"{phase:<17}" + "".join(f"{bytes_ / 2**30:>12.2f}" for bytes_ in (*(row[n] for n in shown), row.total()))
            for phase, row in self.table.items()
        ]
        return [head, *rows]


def estimate(config: TRLConfig, gpus: int = 1, memory: float = math.inf) -> Estimate:
    """Estimate the memory of a run.

    Args:
        config: The complete configuration. Its data is not read.
        gpus: Number of processes, each with a GPU.
        memory: GiB of each GPU.

    Returns:
        The estimate.

    Raises:
        ConfigError: For a configuration that cannot run, and for a trainer or model that cannot be estimated.
    """
    # Libraries complain of tensors without values, such as ids of EOS that are no numbers.
    silence = quiet(logging.CRITICAL, "transformers", "torch._subclasses.fake_tensor")
    unseen = warnings.catch_warnings(action="ignore")
    with tempfile.TemporaryDirectory() as folder, silence, unseen, _own_accelerator(), imagined():
        trainer = make_rehearsal(config, folder, gpus)
        table, kept = _table(trainer, gpus, config)
        if "generate" in table and config.sampler.engine.lower() in ("vllm", "vllm_colocated"):
            table["generate"] = table["rest"].copy()  # vLLM has memory of its own, on other GPUs or on these
        if config.sampler.engine.lower() == "vllm_colocated" and memory < math.inf:
            part = config.sampler.kwargs.get("gpu_memory_utilization", GPU_MEMORY_UTILIZATION)
            for phase in table.keys() & {"generate", "reward"}:
                table[phase]["KV cache"] += round(part * memory * 2**30)
        copied = _copied(trainer, table["rest"], config, gpus) if config.train.async_save else 0
        if config.backend.kind in DIVIDES and gpus > 1:
            divide(table, trainer.model, config, gpus)
        for row in table.values():
            row["weights"] += bytes_of(tensors_of(getattr(trainer.model, "frozen", [])))
        made = trainer.method.to_dict()
        samples = made.get("num_rollouts") or made.get("num_prompts", 0) * made.get("num_generations", 1)
        return Estimate(table, memory * 2**30, copied, kept, 0 if trainer.offline else samples)


@contextmanager
def _own_accelerator() -> Iterator[None]:
    """Let accelerate choose a device and a number format in a `with` block, and forget them after it."""
    kinds = PartialState, AcceleratorState, GradientState
    states = [(kind._shared_state, dict(kind._shared_state)) for kind in kinds]
    for held, _ in states:
        held.clear()
    try:
        yield
    finally:
        for held, before in states:
            held.clear()
            held.update(before)


def _table(trainer: Any, gpus: int, config: TRLConfig) -> tuple[Table, int]:
    """Measure every phase of a trainer that has no memory, and what frozen blocks make of a sample."""
    # Quantized layers compute in the format that the others have, so only their weights differ.
    model, several = trainer.model, trainer.run.local_batch_size > trainer.run.microbatch_size
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = bytes_of(trained)
    held = _states(trainer)
    if config.model.quantization is not None:
        held["weights"] -= _saved(model.lm, QUANTIZED[config.model.quantization])
    held["optimizer"] = _optimizer_bytes(trainer, trained)
    if trainer.config.train.undo_nonfinite_updates and not bounded(trainer.optimizer.optimizer):
        held["copies"] = gradients + held["optimizer"]
    bare = Counter({name: held[name] for name in ("weights", "reference", "heads")})
    kind, batch = _kind(model, trained), trainer.longest(trainer.run.microbatch_size)
    table: Table = {"load": bare}
    if not trainer.offline:
        table["generate"] = held + _generation(trainer, kind)
    if hasattr(model, "lm") and (not trainer.offline or held["reference"]):
        with LiveBytes(kind) as live, torch.no_grad(), trainer.run.forward("logprobs"):
            if isinstance(batch, Completion) and held["reference"]:
                model(batch, reference=True)
            else:
                trainer.loss(batch)
        table["reward"] = held + live.peak
    kept = _keep_trunk(trainer, batch)
    if several:  # the gradients of the first micro-batch are there when the second one begins
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
    forget_casts(model, config, gpus)
    with LiveBytes(kind) as live:
        trainer.optimisation.probe(batch, trainer.loss)
    data = Counter(activations=_step_bytes(trainer, batch, config), gradients=gradients * several)
    table["forward/backward"] = held + live.peak + data
    exchange = gradients if gpus > 1 else 0
    table["step"] = held + Counter(gradients=gradients, copies=exchange)
    table["rest"] = held
    return table, kept


def _keep_trunk(trainer: Any, batch: Any) -> int:
    """Add what frozen blocks make of a micro-batch to it, as training does; return the bytes of a sample."""
    model = trainer.model
    if getattr(model, "trunk", None) is None:
        return 0
    with torch.no_grad(), trainer.run.forward("logprobs"):
        batch.keep(model.trunk.states(batch.completions().inputs()))
    return bytes_of(value for name, value in vars(batch).items() if name.endswith("_trunk")) // len(batch)


def _step_bytes(trainer: Any, batch: Any, config: TRLConfig) -> int:
    """Count the bytes of all micro-batches of a step, which are moved to the device together.

    Those of images are denoising steps, which share the images' encoded prompts.
    """
    given = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    size = bytes_of(given.values())
    if isinstance(batch, DenoisingExperience):
        method: Any = config.method
        taken = max(1, int(method.num_inference_steps * method.timestep_fraction))
        size += (taken - 1) * bytes_of([batch.latents, batch.old_logprobs, batch.order])
    count: int = math.ceil(trainer.run.local_batch_size / trainer.run.microbatch_size)
    return count * size


def _copied(trainer: Any, held: Counter[str], config: TRLConfig, gpus: int) -> int:
    """Count the bytes that the main process copies for a checkpoint: its part of the state, and the export."""
    whole, model = held["weights"] + held["heads"], trainer.model
    alone = config.model.peft_config is not None and hasattr(model, "heads")  # a reward model is exported whole
    exported = bytes_of(p for p in model.parameters() if p.requires_grad) if alone else whole
    divided = config.backend.kind in DIVIDES
    share = 1 / min(gpus, 8) if config.backend.shard == "hybrid" else 1 / gpus
    moments = held["optimizer"] * config.train.save_optimizer
    return round((whole + moments) * (share if divided else 1.0)) + exported


def _states(trainer: Any) -> Counter[str]:
    """Count the bytes of weights, heads and reference."""
    model = trainer.model
    heads = [part for name in ("heads", "head_tops") for part in tensors_of([getattr(model, name, None)])]
    known = {id(part) for part in heads}
    reference = tensors_of(model.reference_modules()) if hasattr(model, "reference_modules") else []
    weights = [part for part in tensors_of([model]) if id(part) not in known]
    return Counter(weights=bytes_of(weights), heads=bytes_of(heads), reference=bytes_of(reference))


def _saved(lm: Any, size: float) -> int:
    """Count the bytes that the frozen linear layers of a model save if each of their weights takes `size` bytes."""
    head = lm.get_output_embeddings()
    layers = [m for m in lm.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    weights = [layer.weight for layer in layers if not layer.weight.requires_grad]
    return round(sum(weight.numel() * (weight.element_size() - size) for weight in weights))


def _optimizer_bytes(trainer: Any, trained: list[nn.Parameter]) -> int:
    """Count the bytes of the optimizer's state, by a step that makes it."""
    optimizer = trainer.optimizer.optimizer
    if type(optimizer).__module__.startswith("bitsandbytes"):
        name = trainer.config.optimizer.name
        size = 4 if "32bit" in name else 1 + 4 / 256  # a byte for each number and a scale for 256 of them
        moments = 1 if name.startswith("lion") else 2
        return round(moments * size * sum(parameter.numel() for parameter in trained))
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return bytes_of(
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    )


def _kind(model: nn.Module, trained: list[nn.Parameter]) -> Any:
    """Make the function that names the kind of a tensor, by its shape."""
    lm = getattr(model, "lm", None)
    vocabulary = None if lm is None else lm.config.get_text_config().vocab_size
    weights = {parameter.shape for parameter in model.parameters()}
    gradients = {parameter.shape for parameter in trained}

    def kind(tensor: Tensor) -> str:
        if tensor.shape in gradients and torch._C._current_graph_task_id() != -1:  # in a backward pass
            return "gradients"
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == vocabulary and tensor.shape not in weights
        return "logits" if is_logits else "activations"

    return kind


def _generation(trainer: Any, kind: Callable[[Tensor], str]) -> Counter[str]:
    """Measure the forward pass of the prompts and of a token; count the cache at the end of the responses.

    Of images, all is measured.
    """
    trainer.model.eval()
    with LiveBytes(kind) as live, torch.no_grad():
        rows, refilled = generate_longest(trainer)
    if not isinstance(trainer.sampler, TextSampler):
        return Counter(live.peak)
    length, prompt, lm = trainer.config.train.seq_length, trainer.max_prompt_length, trainer.model.lm
    ids = torch.ones(rows, prompt, dtype=torch.int64)
    start = {} if trainer.model.start is None else {"decoder_input_ids": ids[:, :1]}
    with LiveBytes(kind) as read, torch.no_grad():  # prompts without values seem equal, and were read once
        cache = lm(input_ids=ids, use_cache=True, **last_only(lm), **start).past_key_values
    of_prompt, of_token = _cache_bytes(cache, rows, prompt, bool(start))
    more = spare(length - prompt) if refilled else 0
    begun, full = rows * of_prompt, round(rows * (of_prompt + of_token * (length - prompt + more)))
    # The forward pass of the prompts ends before the cache is full: the larger of both counts.
    first, last = read.peak + Counter({"KV cache": begun}), Counter({"logits": live.peak["logits"], "KV cache": full})
    if refilled:  # but prompts that take the place of finished rows are read beside it
        return Counter({**read.peak, "KV cache": full})
    first["activations"] = max(0, first["activations"] - begun)
    return max(first, last, key=Counter.total)


def _cache_bytes(cache: Any, rows: int, prompt: int, seq2seq: bool) -> tuple[int, float]:
    """Return the bytes of a row of a cache: those of the prompt, and those of each further token."""

    def size(one: Any) -> int:
        return sum(bytes_of([layer.keys, layer.values]) for layer in one.layers if layer.keys is not None)

    if seq2seq:
        return size(cache.cross_attention_cache) // rows, size(cache.self_attention_cache) / rows
    return size(cache) // rows, size(cache) / rows / prompt
