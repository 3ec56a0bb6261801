"""Steps of decoding that are recorded once, and then replayed without the Python of the modules.

A step of a small model is several hundred short operations, between which most of the time is Python. torch's tracer
records those of one step, for any number of rows and tokens, and its interpreter replays them on the present weights:
the same kernels, hence the same bits. Where a model would decide by numbers or sizes that it sees, the tracer warns,
and the modules go on computing each step. So they do with hooks, adapters or sliding windows, in other number formats,
on GPUs, with PYTORCH_JIT=0, and with Python 3.14 and later, for which torch has no tracer.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from trlx_like.models.faster import choices
from trlx_like.samplers.attention import NAME, attend_to_all
from trlx_like.samplers.cache import RowCache

logger = logging.getLogger(__name__)

RECORDED = "trlx_like_recorded"
"""Name of the attention in a step that is recorded. It has no function for masks, so the model makes none."""
WORTH = 64
"""How many steps the modules compute before one is recorded, which takes as long as about 100 steps."""
CHECKED = 2
"""How many replayed steps must equal those of the modules."""
KNOWN = ("transformers.", "torch.nn.", "trlx_like.")
"""Packages of modules that compute the same at every call; an adapter, for example, can be switched off."""


TRACER = sys.version_info < (3, 14)
"""Whether torch has its tracer."""


@dataclass
class _Recorded:
    """A step for one kind of input."""

    computed: int = 0
    replay: Callable[..., Tensor] | None = None
    equal: int = 0  # replays that were compared
    refused: bool = False


class Steps:
    """Computes the steps of decoding of a model, by replaying one where that is known to give the same.

    Args:
        lm: The language model. Its weights may change between two steps.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self.lm = lm
        self._usable, self._worth = False, WORTH
        self._parts: list[Any] = []  # what the recorded steps are of
        self._recorded: dict[Any, _Recorded] = defaultdict(_Recorded)
        self._choices: dict[int, Any] = {}  # of the layers, by the number of rows

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Replay steps inside a block, in which nobody may replace a module or a weight of the model."""
        modules, weights = list(self.lm.modules()), list(self.lm.parameters())
        parts = [*modules, *map(type, modules), *weights, *self.lm.buffers()]
        if list(map(id, parts)) != list(map(id, self._parts)):
            # Where weights are gathered anew for every round, records would be thrown away again and again.
            self._worth *= 2 if any(step.replay for step in self._recorded.values()) else 1
            self._parts, self._recorded, self._choices = parts, defaultdict(_Recorded), {}
        self._usable = (
            TRACER
            and self.lm.config._attn_implementation == NAME
            and all(type(weight) is nn.Parameter and weight.dtype == torch.float32 for weight in weights)
            and all(type(module).__module__.startswith(KNOWN) for module in modules)
            and not any(_is_hooked(module) for module in modules)
            and not (_has_any_global_hook() or torch.is_autocast_enabled("cpu"))
        )
        try:
            # Otherwise it would optimise for sizes that are others at the next token.
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
                yield
        finally:
            self._usable = False

    def __call__(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor, cache: RowCache, compute: Callable[[], Tensor]
    ) -> Tensor:
        """Read a new token of each row.

        Args:
            tokens: The tokens. [n, 1]
            mask: 1 on real tokens, the new ones included; None if all are. [n, T]
            positions: The places of the new tokens in their rows. [n, 1]
            cache: The keys and values of the rows, which those of the new tokens join.
            compute: The same by the modules.

        Returns:
            The logits. [n, 1, V]
        """
        if not self._usable or cache.common is not None:
            return compute()
        rows = len(tokens)
        if rows not in self._choices:
            self._choices[rows] = choices(self.lm, rows)
        step = self._recorded[mask is None, self._choices[rows]]
        first, column = cache.tokens.start, cache.tokens.end - 1
        given = [tokens, positions, torch.tensor(first), torch.tensor(column), *([] if mask is None else [mask])]
        held = [states for layer in cache.layers for states in cast(Any, layer).held]
        if step.replay is not None and step.equal == CHECKED:
            logits = step.replay(*given, *held)
            cache.read(1)
            return logits
        logits = compute()
        step.computed += 1
        if step.computed > self._worth and not step.refused:
            written = [states[:, :, column].clone() for states in held]
            self._record(step, given, held, logits)
            if step.refused:
                for states, new in zip(held, written, strict=True):
                    states[:, :, column] = new
        return logits

    def _record(self, step: _Recorded, given: list[Tensor], held: list[Tensor], logits: Tensor) -> None:
        """Record a step that the modules have computed, or replay it, and compare the results."""
        before = self.lm.config._attn_implementation
        try:
            self.lm.config._attn_implementation = RECORDED
            if step.replay is None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # transformers' and torch's own, about old names
                    warning = torch.jit.TracerWarning  # type: ignore[attr-defined]
                    warnings.simplefilter("error", warning)
                    # It only checks that an embedding has its padding token.
                    warnings.filterwarnings("ignore", category=warning, module="torch.nn.functional")
                    module = _Step(self.lm, len(held))
                    made: Any = torch.jit.trace(module, (*given, *held), check_trace=False, _store_inputs=False)
                if not isinstance(made, torch.jit.ScriptModule):
                    raise NotImplementedError("PYTORCH_JIT is 0")
                step.replay = made.forward
            step.refused = not torch.equal(step.replay(*given, *held), logits)
            step.equal += 1
            reason: Any = "it computes something else"
        except Exception as error:  # whatever the tracer refuses, the modules can compute
            step.refused, reason = True, error
        finally:
            self.lm.config._attn_implementation = before
        if step.refused:
            step.replay = None
            logger.debug("A step of decoding cannot be replayed: %s", reason)


class _Step(nn.Module):
    """A step of decoding as a function of tensors alone.

    Args:
        lm: The language model.
        states: The number of tensors with keys or values.
    """

    def __init__(self, lm: PreTrainedModel, states: int) -> None:
        super().__init__()
        self.lm, self.states = lm, states

    def forward(self, tokens: Tensor, positions: Tensor, first: Tensor, column: Tensor, *others: Tensor) -> Tensor:
        """Return the logits [n, 1, V].

        Args:
            tokens: As for `Steps`. [n, 1]
            positions: As for `Steps`. [n, 1]
            first: The first column that is visible. []
            column: The one of the new tokens. []
            others: The mask [n, T], if there is padding; then keys and values [n, heads, columns, width] of each layer.
        """
        held, mask = others[-self.states :], others[: -self.states]
        visible = mask[0][:, None, None].bool() if mask else None
        cache = DynamicCache()
        cache.layers = [_Layer(pair, first, column) for pair in zip(held[::2], held[1::2], strict=True)]
        given = {"position_ids": positions, "past_key_values": cache, "use_cache": True, "attention_mask": visible}
        logits: Tensor = self.lm(input_ids=tokens, **given).logits
        return logits


class _Layer(DynamicLayer):
    """Keys and values whose columns are given by tensors, so that the record does not take them for constants."""

    def __init__(self, pair: tuple[Tensor, ...], first: Tensor, column: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pair, self.first, self.column, self.is_initialized = pair, first, column, True

    def get_seq_length(self) -> Any:
        """Return how many columns are visible, as a tensor []."""
        return self.column - self.first

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values of new tokens [n, heads, 1, width]; return all that are visible."""
        columns: Any = slice(self.first, self.column + 1)
        for held, new in zip(self.pair, (key_states, value_states), strict=True):
            held.index_copy_(2, self.column.view(1), new)
        keys, values = (held[:, :, columns] for held in self.pair)
        return keys, values


def together(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Give a head states that lie side by side; a hook.

    The last states of all prompts lie apart in memory, and for such rows torch reads or copies the head for each row.
    """
    return (args[0].contiguous(),)


def _is_hooked(module: nn.Module) -> bool:
    before = any(hook is not together for hook in module._forward_pre_hooks.values())
    return bool(before or module._forward_hooks or "forward" in vars(module))


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Attend to all columns that the mask shows."""
    if given.get("sliding_window") is not None or given.get("position_bias") is not None:
        raise NotImplementedError("a window or a bias of attention")
    return attend_to_all(query, key, value, attention_mask, given.get("scaling")), None


AttentionInterface.register(RECORDED, _attend)
