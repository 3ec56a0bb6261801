"""What of the memory of a run each process holds when weights are divided, for `trlx-like estimate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trlx_like.config import TRLConfig
from trlx_like.distributed.backend import blocks
from trlx_like.distributed.zero import bucket_size

DIVIDES = ("fsdp", "deepspeed")
"""Values of `backend.kind` that divide weights over GPUs."""
HELD = ("weights", "reference", "heads", "optimizer", "copies")
"""What is there between two steps."""

Table = dict[str, Counter[str]]
"""Bytes by phase and kind."""


def divide(table: Table, model: nn.Module, config: TRLConfig, gpus: int) -> None:
    """Divide what fsdp or deepspeed holds over GPUs, and add the weights that it gathers.

    While samples are generated and scored all weights are gathered, or with `backend.rollout: layers` what is outside
    of the blocks, and the block that runs. In a step it is that block with the next one. DeepSpeed updates a copy of
    the weights, and gathers with ZeRO-3 only.
    """
    of_blocks = [bytes_of(tensors_of([block])) for block in blocks(model)]
    outside = bytes_of(tensors_of([model])) - sum(of_blocks)
    references: list[nn.Module] = getattr(model, "reference_modules", list)()
    of_references = [block for part in references for block in blocks(part)]
    outside_references = bytes_of(tensors_of(references)) - bytes_of(tensors_of(of_references))
    backend = config.backend
    gathered = outside + (sum(of_blocks) if backend.shard == "gradients" else 2 * max(of_blocks, default=0))
    if backend.kind == "deepspeed":  # it keeps what it has gathered, up to a number of weights
        given = backend.deepspeed_config.get("zero_optimization", {})
        gathered = max(gathered, min(outside + sum(of_blocks), 4 * given.get("stage3_max_live_parameters", 10**9)))
    share = 1 / (min(gpus, 8) if backend.shard == "hybrid" else gpus)
    states, zero = ("optimizer", "copies", "gradients"), backend.kind == "deepspeed"
    shares = dict.fromkeys((*HELD, *states), share * (backend.offload != "all"))
    if zero:
        shares |= dict.fromkeys(states, share * (backend.offload == "none"))
    if zero and backend.shard != "full":
        shares |= dict.fromkeys(("weights", "heads", "reference"), 1.0)
    if zero and backend.shard == "optimizer":
        shares["gradients"] = 1.0
    updated = zero * shares["optimizer"] * bytes_of(p for p in model.parameters() if p.requires_grad)
    for phase, row in table.items():
        whole = row.copy()
        for name, part in shares.items():
            row[name] = round(whole[name] * part)
        row["optimizer"] += round(updated) * (phase != "load")
        if shares["weights"] == 1.0:
            continue
        if phase in ("generate", "reward") and backend.rollout == "layers":
            row["weights"] += outside + max(of_blocks, default=0)
            row["reference"] += outside_references
        elif phase in ("generate", "reward"):
            row.update({name: whole[name] for name in ("weights", "heads", "reference")})
        elif phase == "forward/backward":
            row["weights"] += gathered
            row["reference"] += outside_references * (not zero)  # fsdp gathers it with the model's
        elif phase == "step":  # gradients are summed where they are made
            row["copies"] = round(table["rest"]["copies"] * shares["copies"])
            row["weights"] += zero * gathered
    if zero:
        _add_buffers(table, [p for p in model.parameters() if p.requires_grad], config, shares["gradients"])


def forget_casts(model: nn.Module, config: TRLConfig, gpus: int) -> None:
    """Free the copies of weights that autocast makes after each block, as fsdp does."""
    for block in blocks(model) if config.backend.kind == "fsdp" and gpus > 1 else ():
        block.register_forward_hook(lambda *_: torch.clear_autocast_cache())


def _add_buffers(table: Table, trained: list[nn.Parameter], config: TRLConfig, share: float) -> None:
    """Add the memory in which DeepSpeed sums gradients, and with ZeRO-3 the one in which it keeps them.

    With ZeRO-3 it is always there, and summing makes two copies of it: when it is full, or after the backward pass.
    With ZeRO-1 it is there from the first backward pass of a step on. Else it is made when a backward pass begins, when
    half of the memory of logits is free again.
    """
    size, of_trained = 4 * bucket_size(config, trained), bytes_of(trained)
    training, step = table["forward/backward"], table["step"]
    if config.backend.shard == "full":
        for phase, row in table.items():
            if phase != "load":
                row["copies"] += size
                row["gradients"] = max(row["gradients"], round(share * of_trained))
        step["copies"] += 2 * size
        training["copies"] += 2 * size * (of_trained > size)
        return
    step["copies"] = table["rest"]["copies"] + size
    kept = config.backend.shard == "optimizer" and training["gradients"] > 0
    training["copies"] += size if kept else max(0, size - training["logits"] // 2)


def tensors_of(modules: Iterable[nn.Module | None]) -> list[Tensor]:
    """Return the parameters and buffers of modules, each once."""
    found = [part for module in modules if module is not None for part in (*module.parameters(), *module.buffers())]
    return list({id(part): part for part in found}.values())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all numbers of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
