"""Sampling with divided weights (`backend.rollout: layers`): a block is whole while it runs, and divided after it.

Weights can only be gathered by all processes together, and processes sample differently long. So before each block all
agree on the one that is gathered next: of those that processes are about to run, the last in the model. A process that
needs another one takes part, and asks again. One that has come to a collective operation, or to the end, asks for none
until nobody does.
Processes that run the model in step ask for the same blocks, so the weights travel once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed as dist

from trlx_like.distributed import torch_fsdp
from trlx_like.distributed.world import World

NONE = -1


class Layers:
    """Gather blocks one at a time, as processes need them.

    Args:
        world: The processes of the run.
        blocks: The blocks, which are units of FSDP2, in the same order on every process.
    """

    def __init__(self, world: World, blocks: Sequence[Any]) -> None:
        self.world, self.blocks = world, blocks

    @contextmanager
    def gathered_to_run(self) -> Iterator[None]:
        """Gather each block for its forward pass in a `with` block, in which modules have no hooks of FSDP."""
        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                stack.enter_context(block.register_forward_pre_hook(self._before(number), prepend=True))
                stack.enter_context(block.register_forward_hook(_after, always_call=True))
            self.world.before_meeting = self.help
            try:
                yield
            finally:
                self.world.before_meeting = None
        self.help()

    def help(self) -> None:
        """Take part in gathering until no process needs a block."""
        while (number := self._agree(NONE)) != NONE:
            self._pass(number)

    def _before(self, number: int) -> Any:
        def gather(*_: Any) -> None:
            while (agreed := self._agree(number)) != number:
                self._pass(agreed)
            torch_fsdp.gather(self.blocks[number])

        return gather

    def _agree(self, number: int) -> int:
        """Return the highest number that a process asks for."""
        asked = torch.tensor(number, device=self.world.accelerator.device)
        self.world.waiting = True
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        self.world.waiting = False
        return int(asked)

    def _pass(self, number: int) -> None:
        """Gather a block that another process runs."""
        torch_fsdp.gather(self.blocks[number])
        torch_fsdp.divide(self.blocks[number])


def _after(block: Any, *_: Any) -> None:
    torch.clear_autocast_cache()  # or copies of the weights in 16 bits would stay
    torch_fsdp.divide(block)
