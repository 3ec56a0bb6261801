"""Steps of decoding that are recorded once, and then replayed without the Python of the modules.

A step of a small model is several hundred short operations, between which most of the time is Python. torch's tracer
records those of one step, for any number of rows and tokens, and its interpreter replays them on the present weights:
the same kernels, hence the same bits. Where a model decides by numbers or sizes that it sees, the tracer warns, and the
modules go on computing each step. A record is compared with the modules, too: at first, for each new number of rows,
and whenever rows are twice as long as before. The modules also compute all steps of models with hooks, adapters, own
classes, or layers that do not see all tokens; in other number formats, on GPUs, with PYTORCH_JIT=0, and with Python
3.14 and later, for which torch has no tracer.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from trlx_like.models.attention import attending
from trlx_like.samplers.attention import NAME, attend_to_all
from trlx_like.samplers.cache import RowCache, RowLayer

logger = logging.getLogger(__name__)

RECORDED = "trlx_like_recorded"
"""Name of the attention in a step that is recorded. It has no function for masks, so the model makes none."""
TRACER = sys.version_info < (3, 14) and os.environ.get("PYTORCH_JIT") != "0"
"""Whether torch has its tracer."""
WORTH = 64
"""How many steps the modules compute before one is recorded, which takes as long as about 100 steps."""
MOST = 4
"""The most records with padding, and without. A layer may choose another kernel for some numbers of rows."""
KNOWN = ("transformers.", "torch.nn.", "trlx_like.")
"""Packages of modules that compute the same at every call; an adapter, for example, can be switched off."""
PLAIN = {bool, int, float, str, type(None)}
"""Types of the attributes of modules that are compared, to find that a model has changed."""
Replay = Callable[..., Tensor]


class Steps:
    """Computes the steps of decoding of a model, by replaying one where that was found to give the same.

    Args:
        lm: The language model. Its weights may change between two steps.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self.lm = lm
        self._usable = False
        self._state: Any = None  # what the records are of, beside weights
        self._weights: list[Tensor] = []  # the present ones, while steps may be replayed
        self._forget()

    def _forget(self) -> None:
        self._computed = 0  # steps so far
        self._records: dict[bool, list[Replay]] = defaultdict(list)  # for rows without and with padding
        # For rows without and with padding and their number: the record, None if none is right, and the length of the
        # longest row for which that was found.
        self._found: dict[tuple[bool, int], tuple[Replay | None, int]] = {}
        self._refused = set[bool]()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Replay steps inside a block, in which nobody may change the model."""
        modules = list(self.lm.modules())
        parameters, buffers = (
            {id(tensor): tensor for held in of_modules for tensor in held.values() if tensor is not None}
            for of_modules in ([module._parameters for module in modules], [module._buffers for module in modules])
        )
        self._weights = [*parameters.values(), *buffers.values()]
        sizes = [(type(weight), weight.dtype, weight.shape) for weight in self._weights]
        # But for what transformers sets when it saves a model.
        config = {**vars(self.lm.config), "dtype": None, "architectures": None}
        state = config, sizes, [(type(module), _plain(module)) for module in modules]
        if state != self._state:
            self._state = state
            self._forget()
        text = self.lm.config.get_text_config(decoder=True)
        seen_by_layers = DynamicCache(config=text).layers
        self._usable = (
            TRACER
            and text._attn_implementation == NAME
            and all(type(layer) is DynamicLayer for layer in seen_by_layers)
            and all(type(weight) is nn.Parameter and weight.dtype == torch.float32 for weight in parameters.values())
            and all(type(module).__module__.startswith(KNOWN) for module in modules)
            and not any(_is_hooked(module) for module in modules)
            and not (_has_any_global_hook() or torch.is_autocast_enabled("cpu"))
        )
        try:
            # Otherwise it would optimise for sizes that are others at the next token.
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
                yield
        finally:
            self._usable, self._weights = False, []

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
            The logits of the next token. [n, V]
        """
        if not self._usable or cache.common is not None:
            return compute()
        first, column, kind = cache.tokens.start, cache.tokens.end - 1, (mask is not None, len(tokens))
        given = [tokens, positions, *([] if mask is None else [mask])]
        layers = cast("list[RowLayer]", cache.layers)
        held = [states.narrow(2, first, column + 1 - first) for layer in layers for states in layer.held]
        replay, longest = self._found.get(kind, (None, 0))
        new = column - first >= 2 * longest
        if replay is not None and not new:
            logits = replay(*given, *held, *self._weights)
            cache.read(1)
            return logits
        logits = compute()
        self._computed += 1
        if new and self._computed > WORTH and kind[0] not in self._refused:
            written = [states[:, :, -1].clone() for states in held]
            self._found[kind] = self._right(kind[0], given, held, logits), column - first
            for states, right in zip(held, written, strict=True):
                states[:, :, -1] = right
        return logits

    def _right(self, padded: bool, given: list[Tensor], held: list[Tensor], logits: Tensor) -> Replay | None:
        """Find a record, or make one, that computes these logits of a step. It writes into the cache."""
        records = self._records[padded]
        try:
            for replay in records:
                if torch.equal(replay(*given, *held, *self._weights), logits):
                    return replay
            if len(records) == MOST:
                return None
            records.append(self._record([*given, *held], len(held)))
            if torch.equal(records[-1](*given, *held, *self._weights), logits):
                return records[-1]
            reason: Any = "it computes something else"
        except Exception as error:  # whatever torch's tracer or interpreter refuses, the modules can compute
            reason = error
        self._refused.add(padded)
        logger.debug("A step of decoding cannot be replayed: %s", reason)
        return None

    def _record(self, given: list[Tensor], states: int) -> Replay:
        """Record a step as a function of what is given, the last of which are keys and values, and of all weights."""
        with attending(self.lm.config, RECORDED), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' and torch's own, about old names
            warning = torch.jit.TracerWarning  # type: ignore[attr-defined]
            warnings.simplefilter("error", warning)
            # An embedding checks that it has its padding token.
            warnings.filterwarnings("ignore", category=warning, module="torch.nn.functional")
            # `torch.jit.trace` would keep a class for each module, some MB a layer, for as long as the process is.
            graph = torch._C._create_graph_by_tracing(
                lambda *inputs: _step(self.lm, states, *inputs[: len(given)]),
                (*given, *self._weights),
                lambda tensor: "",
                True,  # strict
                False,  # operations in place stay so
            )[0]
        # Each operation of the interpreter takes time: constants and sizes are the most of them, and repeat.
        for simplify in ("erase_shape_information", "peephole", "cse", "constant_pooling", "dce"):
            getattr(torch._C, f"_jit_pass_{simplify}")(graph)
        made: Replay = torch._C._create_function_from_graph("step", graph)
        return made


def _step(lm: PreTrainedModel, states: int, tokens: Tensor, positions: Tensor, *others: Tensor) -> Tensor:
    """Return the logits [n, V] of a step of decoding, as a function of tensors alone.

    Args:
        lm: The language model.
        states: The number of tensors with keys or values.
        tokens: As for `Steps`. [n, 1]
        positions: As for `Steps`. [n, 1]
        others: The mask [n, T], if there is padding; then the visible keys and values [n, heads, T, width] of each
            layer, of which the last are those of the new tokens, to be written.
    """
    mask, held = others[:-states], others[-states:]
    cache = DynamicCache()
    cache.layers = [_Layer(pair) for pair in zip(held[::2], held[1::2], strict=True)]
    visible = mask[0][:, None, None].bool() if mask else None
    given = {"position_ids": positions, "past_key_values": cache, "use_cache": True, "attention_mask": visible}
    logits: Tensor = cast(Any, lm)(input_ids=tokens, **given).logits
    return logits[:, -1]


class _Layer(DynamicLayer):
    """Keys and values [n, heads, T, width] whose last column is that of the new tokens, and not written yet."""

    def __init__(self, pair: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pair, self.is_initialized = pair, True

    def get_seq_length(self) -> Any:
        """Return how many columns were there before; while a step is recorded, a tensor []."""
        return self.pair[0].shape[2] - 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values of new tokens [n, heads, 1, width]; return all that are visible."""
        for held, new in zip(self.pair, (key_states, value_states), strict=True):
            held.select(2, -1).copy_(new.select(2, 0))
        keys, values = self.pair
        return keys, values


def together(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Give a head states that lie side by side; a hook.

    The last states of all prompts lie apart in memory, and for such rows torch reads or copies the head for each row.
    """
    return (args[0].contiguous(),)


def _is_hooked(module: nn.Module) -> bool:
    before = any(hook is not together for hook in module._forward_pre_hooks.values())
    return bool(before or module._forward_hooks or "forward" in vars(module))


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers, texts or the like."""
    return {name: value for name, value in vars(module).items() if type(value) in PLAIN}


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Attend to all columns that the mask shows."""
    if given.get("sliding_window") is not None or given.get("position_bias") is not None:
        raise NotImplementedError("a window or a bias of attention")
    return attend_to_all(query, key, value, attention_mask, given.get("scaling")), None


AttentionInterface.register(RECORDED, _attend)
