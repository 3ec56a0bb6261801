"""What the frozen lower blocks of a model compute for a sample, kept with it for later passes over the same sample."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor

from trlx_like.data.columns import ColumnRows, batch_of, packed
from trlx_like.data.experience import IDS, Experience
from trlx_like.data.flat import LazyRows
from trlx_like.models.dropout import has_dropout
from trlx_like.models.policy import LanguagePolicy
from trlx_like.trainers.context import Run

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Experience)


def filled(run: Run, elements: Sequence[E], fill: Callable[[Any], None], flat: bool = False) -> Sequence[E]:
    """Fill in fields of samples, in micro-batches of similar lengths on the device. Every process calls it.

    Args:
        run: The run.
        elements: This process's samples.
        fill: Sets fields of a micro-batch.
        flat: Whether to return them in flat tensors. This takes twice the memory for a moment, and then less.

    Returns:
        The samples in their order, on the CPU.
    """
    made: list[Any] = []
    order, size = np.argsort(_sizes(elements), kind="stable").tolist(), run.microbatch_size  # saves padding
    for start in range(0, run.world.max(math.ceil(len(order) / size)) * size, size):
        run.check_stop()
        if rows := order[start : start + size]:
            part = batch_of(type(elements[0]), elements, rows).to(run.device)
            fill(part)
            split = part.to("cpu").split()
            made += [packed(type(part), split)] if flat else split
    places = np.argsort(order)
    if flat and made:
        return ColumnRows.unpacked(type(elements[0]), *made).taken(places)
    return [made[place] for place in places]


class TrunkStates:
    """Keep the states that enter the lowest trained block of a policy, where samples are used more than once.

    Args:
        run: The run.
        model: The policy, before the first update. From now on it starts from kept states where a batch has them.
        passes: How many times a sample is used.
        offline: The samples are given and not sampled in rounds.
    """

    def __init__(self, run: Run, model: LanguagePolicy, passes: int, offline: bool) -> None:
        self.run, self.model, self.passes, self.offline = run, model, passes, offline
        if passes < 2 or not run.config.train.keep_trunk:
            return
        reason = "dropout is on" if has_dropout(model.lm) else model.add_trunk()
        partly = model.num_layers_unfrozen > 0 or run.config.model.peft_config is not None
        if reason is not None and partly and run.world.main:
            logger.info("All blocks of the model run in every pass: %s.", reason)

    def keep(self, part: Any, states: Tensor | None) -> None:
        """Keep the states of `PolicyOutput.trunk` with the completions of a part; None keeps nothing."""
        if states is not None:
            part.keep(states)

    @torch.no_grad()
    def fill(self, elements: Sequence[Any], whole: bool) -> Sequence[Any]:
        """Compute the states of given samples once, see `worth_keeping`.

        Args:
            elements: This process's samples; every process calls it, if samples are given.
            whole: All processes have the same samples, of which each uses its part.

        Returns:
            The samples in their order, with the states if they are kept.
        """
        if self.model.trunk is None or not self.offline:
            return elements  # online, each process adds samples when it has some
        lacking = self.run.world.max(any(element.prompt_trunk is None for element in elements))
        if not lacking or not self.worth_keeping(elements, whole):
            return elements

        def add(part: Any) -> None:
            with self.run.forward("logprobs"):
                self.keep(part, self.model.trunk_states(part.completions()))

        return filled(self.run, elements, add)

    def worth_keeping(self, elements: Sequence[Any], whole: bool) -> bool:
        """Tell whether the states of given samples are used more than once, and fit into half of the free memory.

        Args:
            elements: As for `fill`.
            whole: As for `fill`.
        """
        if self.model.trunk is None or not self.offline:
            return False
        train, world = self.run.config.train, self.run.world
        total = len(elements) if whole else world.sum([float(len(elements))])[0]
        uses = min(self.passes, train.total_steps * train.batch_size / max(1, total)) / (world.size if whole else 1)
        if uses <= 1:
            return False
        lm = self.model.lm
        size = int(_sizes(elements).sum()) * lm.config.get_text_config().hidden_size * lm.dtype.itemsize
        free = psutil.virtual_memory().available
        sizes = len(elements), size / 2**30, free / 2**30
        if too_much := bool(world.max(size > free / 2)):
            logger.warning(
                "All blocks of the model run in every pass: what the frozen ones make of %d samples would take %.1f "
                "GiB, and %.1f GiB of memory are free.",
                *sizes,
            )
        else:
            logger.info("What the frozen blocks make of %d samples is kept: %.3f of %.1f GiB of free memory.", *sizes)
        return not too_much


def _sizes(elements: Sequence[Any]) -> np.ndarray:
    """Count the tokens of each sample. [N]"""
    if isinstance(elements, LazyRows):
        return elements.sizes()
    lengths = (sum(len(ids) for name in IDS if (ids := getattr(e, name, None)) is not None) for e in elements)
    return np.fromiter(lengths, np.int64, len(elements))
