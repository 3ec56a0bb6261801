"""Embeddings whose gradient is added row by row, without a tensor of the size of the weight.

The gradient of an embedding is zero but in the rows of the tokens of a batch. torch fills a tensor of the size of the
weight with zeros, and adds it to the gradient of the head if that has the same weight: with 50,257 tokens of 768
numbers that is a twentieth of a pass, and up to 300 MB. Here the rows are added to `weight.grad` at the end of the
backward pass, when all else is in there. The sum is the same up to rounding.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

DEVICES = ("cpu", "cuda")
"""Types of devices whose sums by rows do not depend on the order of threads."""

LEAST = 2**17
"""The least size of a weight whose gradient is added by rows. With smaller ones torch is faster."""


def add_by_rows(model: nn.Module) -> None:
    """Let the embeddings of a model add their gradients by rows: those of class `nn.Embedding`.

    It is for weights that this process holds whole, and whose gradients nobody takes in the middle of a backward pass.
    """
    for module in model.modules():
        if type(module) is nn.Embedding:
            module.__class__ = _RowEmbedding


class _RowEmbedding(nn.Embedding):
    """An embedding whose gradient is added by rows where that is possible, and by torch elsewhere."""

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [*]; return their rows [*, H]."""
        weight = self.weight
        hooks: Any = weight._backward_hooks, weight._post_accumulate_grad_hooks
        special = self.max_norm is not None or self.scale_grad_by_freq or self.sparse
        trained = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf
        if not trained or special or any(hooks) or weight.numel() < LEAST or weight.device.type not in DEVICES:
            return super().forward(ids)
        return cast(Tensor, _Lookup.apply(ids, weight, self.padding_idx))  # type: ignore[no-untyped-call]


class _Lookup(torch.autograd.Function):
    """Rows [*, H] of a weight [V, H] by ids [*]. The row of the id `padding` gets no gradient."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Return the rows."""
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        """Add the gradient to `weight.grad` when the backward pass ends, or return it where that is not wanted."""
        (ids,), weight, padding = ctx.saved_tensors, ctx.weight, ctx.padding
        if torch.is_grad_enabled() or not _is_accumulated(weight):
            none = -1 if padding is None else padding
            return None, torch.ops.aten.embedding_dense_backward(grad, ids, len(weight), none, False), None

        def add() -> None:
            rows, of = grad.reshape(-1, grad.shape[-1]), ids.reshape(-1)
            if padding is not None:
                kept = of != padding
                rows, of = rows[kept], of[kept]
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if weight.device.type == "cpu":
                weight.grad.index_add_(0, of, rows)
            else:  # where that would depend on the order in which threads come
                weight.grad.index_put_((of,), rows, accumulate=True)

        torch.autograd.Variable._execution_engine.queue_callback(add)
        return None, None, None


def _is_accumulated(weight: Tensor) -> bool:
    """Tell whether this backward pass adds to `weight.grad`: not if `torch.autograd.grad` asks for its gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(weight).node))
    except RuntimeError:
        return False
