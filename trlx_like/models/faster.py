"""Replace layers of a model by faster ones that compute the same up to rounding.

Activations: "gelu_new" is eight operations in Python, and torch's kernel for it spends its time in the hyperbolic
tangent. In float32 on CPUs the same function of a sigmoid takes half as long.

Matrix products: on x86 CPUs torch computes those in float32 with Intel's MKL, which uses AVX-512 on Intel's processors
only. On AMD's it takes AVX2. oneDNN, which is part of torch too, is about twice as fast on those that compute 512 bits
at once (Zen 5), and 1.1 times on those that compute them in two halves (Zen 4), where only large weights are worth it.
On those without AVX-512 (up to Zen 3) it is up to 1.9 times as fast for several rows and a large weight of
`nn.Linear`, and MKL is faster for most gradients. Small products stay with MKL, because starting one costs more with
oneDNN, and for other number formats torch chooses oneDNN by itself. On Intel's processors oneDNN takes the products of
a few rows with a large weight of `nn.Linear`, as in a step of decoding, since MKL reads such a weight half as fast.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.pytorch_utils import Conv1D

Module = TypeVar("Module", bound=nn.Module)

LEAST_PRODUCT = 2**20
"""The least multiplications of a product that is worth the start of oneDNN, about 10 microseconds."""
FULL_WIDTH_FAMILY = 26
"""The first family of AMD processors that compute 512 bits at once."""
LEAST_WEIGHT_HALF_WIDTH = 2**19
"""The least size of a weight for which oneDNN is faster on AMD's processors before."""
FEW_ROWS = range(4, 33)
"""Numbers of rows for which oneDNN is faster than MKL on Intel's processors, with a large weight. On AMD's without
AVX-512 it is for more rows too."""
LARGE_WEIGHT = 2**20
"""The least size of such a weight."""
CPUINFO = Path("/proc/cpuinfo")
LEAST_ACTIVATED, LEAST_IN_A_STEP = 2**16, 2**12
"""From how many numbers on a sigmoid, in several operations, replaces torch's GELU: in most passes, and in a step of
decoding. Most passes have one bound, with gradients and without, because a trainer compares their results."""


class Choice(NamedTuple):
    """Which products oneDNN computes on a processor.

    Attributes:
        kinds: The classes of linear layers that use it, in the place of others.
        least: The least size of a weight of theirs.
        words: The choice in words.
    """

    kinds: Mapping[type[nn.Module], type[nn.Module]]
    least: int
    words: str


@cache
def choice() -> Choice:
    """Choose what computes matrix products in float32 on this processor."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    name, wide = known.get("cpu_name", ""), known.get("avx512_f", False)
    intel = "Intel" in name
    if not name or not torch.backends.mkldnn.is_available() or not (wide or (known.get("avx2") and not intel)):
        return Choice({}, 0, "torch's own choice")
    if intel:
        few = f"MKL; oneDNN for {FEW_ROWS[0]} to {FEW_ROWS[-1]} rows and large weights, except in training"
        return Choice({nn.Linear: _FewRowsLinear}, LARGE_WEIGHT, few)
    if not wide:
        some = f"MKL; oneDNN for {FEW_ROWS[0]} rows or more and large weights of nn.Linear, except for gradients"
        return Choice({nn.Linear: _ForwardLinear}, LARGE_WEIGHT, some)
    every = {nn.Linear: _FasterLinear, Conv1D: _FasterConv1D}
    if _family() >= FULL_WIDTH_FAMILY:
        return Choice(every, 0, "oneDNN")
    large = f"oneDNN for weights of {LEAST_WEIGHT_HALF_WIDTH:,} numbers or more, MKL for others"
    return Choice(every, LEAST_WEIGHT_HALF_WIDTH, large)


def _family() -> int:
    """Return the family of the processor as Linux tells it, and 0 elsewhere."""
    found = re.search(r"^cpu family\s*: (\d+)$", CPUINFO.read_text() if CPUINFO.exists() else "", re.MULTILINE)
    return int(found[1]) if found else 0


def faster(model: Module) -> Module:
    """Make a model compute the same in less time, see the module. What it saves does not change.

    Args:
        model: The model, changed in place. Its linear layers remain instances of `nn.Linear` and `Conv1D`.

    Returns:
        The same model.
    """
    kinds, least, _ = choice()
    for module in list(model.modules()):
        for name, part in module.named_children():
            if type(part) in (NewGELUActivation, GELUTanh):
                setattr(module, name, _FasterGELU(approximate="tanh"))
        kind = kinds.get(type(module))
        if kind is not None and cast(Tensor, module.weight).numel() >= least:
            module.__class__ = kind
    return model


class _Faster(nn.Module):
    """A linear layer that computes some products with oneDNN."""

    weight: nn.Parameter
    bias: Any
    by_columns: bool
    """Whether the weight is [in, out]; otherwise it is [out, in]."""

    def forward(self, states: Tensor) -> Tensor:
        """Map states [*, in] to [*, out]."""
        weight = self.weight
        outs = weight.shape[1 if self.by_columns else 0]
        worth = self._is_worth(states)
        if not (worth and _plain(states) and _plain(weight)) or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(states, weight.t() if self.by_columns else weight, self.bias)
        rows = states.reshape(-1, states.shape[-1])
        made: Tensor
        if torch.is_grad_enabled():
            made = self._learn(rows)
        else:  # in a step of decoding, the call of a function with a gradient costs as much as the product
            made = product(rows, weight.t() if self.by_columns else weight, self.bias)
        return made.view(*states.shape[:-1], outs)

    def _learn(self, rows: Tensor) -> Tensor:
        """Map rows [N, in] to [N, out], with a gradient."""
        made = _Affine.apply(rows, self.weight, self.bias, self.by_columns)  # type: ignore[no-untyped-call]
        return cast(Tensor, made)

    def _is_worth(self, states: Tensor) -> bool:
        """Tell whether oneDNN is the faster one for states [*, in]."""
        return _rows(states) * _untraced(self.weight.numel()) >= LEAST_PRODUCT


class _FasterLinear(_Faster, nn.Linear):  # type: ignore[misc]
    by_columns = False


class _FasterConv1D(_Faster, Conv1D):
    by_columns = True


class _FewRowsLinear(_FasterLinear):
    def _is_worth(self, states: Tensor) -> bool:
        return _rows(states) in FEW_ROWS and not torch.is_grad_enabled()


class _ForwardLinear(_FasterLinear):
    def _is_worth(self, states: Tensor) -> bool:
        return _rows(states) >= FEW_ROWS[0]

    def _learn(self, rows: Tensor) -> Tensor:
        return cast(Tensor, _Forward.apply(rows, self.weight, self.bias, False))  # type: ignore[no-untyped-call]


class _FasterGELU(nn.GELU):
    """GELU with the hyperbolic tangent: x s(u), u = 2 sqrt(2 / pi) (x + 0.044715 x^3), where s is the sigmoid."""

    def forward(self, states: Tensor) -> Tensor:
        """Apply it to states [*]."""
        trained, step = torch.is_grad_enabled(), states.dim() == 3 and _untraced(states.shape[1]) == 1
        least = LEAST_IN_A_STEP if step and not trained else LEAST_ACTIVATED
        if not _plain(states) or _untraced(states.numel()) < least:
            return super().forward(states)
        if trained and states.requires_grad:
            return cast(Tensor, _TanhGELU.apply(states))  # type: ignore[no-untyped-call]
        return _inner(states).sigmoid_().mul_(states)


class _TanhGELU(torch.autograd.Function):
    """`_FasterGELU` with its derivative, which is kept in place of the states."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        """Return the results [*]."""
        made, slope = gelu_and_slope(states)
        ctx.save_for_backward(slope)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of the states."""
        return cast(Tensor, grad * ctx.saved_tensors[0])


_SCALE, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715
_START = torch.tensor(_SCALE)
PIECE = 2**16
"""Of how many numbers the derivative is computed at once: what one operation writes, the next finds in the cache."""


def gelu_and_slope(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return `_FasterGELU` of states [*], and its derivative. [*]"""
    flat = states.reshape(-1)
    made, slopes = torch.empty_like(flat), torch.empty_like(flat)
    for piece, gate, slope in zip(flat.split(PIECE), made.split(PIECE), slopes.split(PIECE), strict=True):
        torch.sigmoid(_inner(piece, slope), out=gate)
        slope.add_(piece, alpha=-2 / 3 * _SCALE)  # x u' / 3, which is u - 2/3 _SCALE x; times s' in the next line
        torch.ops.aten.sigmoid_backward.grad_input(slope, gate, grad_input=slope)
        torch.add(gate, slope, alpha=3, out=slope)
        gate.mul_(piece)
    return made.view(states.shape), slopes.view(states.shape)


def _inner(states: Tensor, out: Tensor | None = None) -> Tensor:
    """Return u of `_FasterGELU`. [*]"""
    return torch.addcmul(_START, states, states, value=_SCALE * _CUBIC, out=out).mul_(states)


def _rows(states: Tensor) -> int:
    """Count the rows of states [*, in]."""
    return _untraced(states.numel()) // max(1, _untraced(states.shape[-1]))


def _untraced(size: int) -> int:
    """Return a size. While a step is recorded it is a constant, without a warning: that is compared later."""
    if not torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        return int(size)


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


class _Affine(torch.autograd.Function):
    """Rows [N, in] times a weight, plus a bias [out]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, by_columns: bool) -> Tensor:
        """Return the results [N, out], and keep what the trained inputs need."""
        states_trained, weight_trained, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if weight_trained else None, weight if states_trained else None)
        ctx.by_columns = by_columns
        return product(rows, weight.t() if by_columns else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients of the inputs that are trained."""
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        of_rows = of_weight = None
        if weight is not None:
            of_rows = product(grad, weight if ctx.by_columns else weight.t())
        if rows is not None:
            # A product copies its first factor if that is transposed, and a result of the other order is copied later.
            (count, ins), outs = rows.shape, grad.shape[1]
            turned = ins * outs if ctx.by_columns else -ins * outs
            by_columns = count * (ins - outs) < turned
            of_weight = product(rows.t(), grad.t()) if by_columns else product(grad.t(), rows.t())
            of_weight = of_weight if by_columns == ctx.by_columns else of_weight.t()
        return of_rows, of_weight, grad.sum(dim=0) if ctx.needs_input_grad[2] else None, None


class _Forward(_Affine):
    """`_Affine` for a weight [out, in], with its gradients by torch's own products."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients of the inputs that are trained."""
        rows, weight = ctx.saved_tensors
        of_bias = grad.sum(dim=0) if ctx.needs_input_grad[2] else None
        return None if weight is None else grad @ weight, None if rows is None else grad.t() @ rows, of_bias, None


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute rows [N, in] times the transpose of a weight [out, in], plus a bias [out]. [N, out]"""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return made
