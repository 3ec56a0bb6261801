"""Distributed training: start processes, exchange data between them, and sum their gradients."""

from trlx_like.distributed.accumulate import GradientAccumulator
from trlx_like.distributed.setup import launch, make_accelerator
from trlx_like.distributed.world import Statistics, World

Group = World
"""The older name of `World`."""

__all__ = ["GradientAccumulator", "Group", "Statistics", "World", "launch", "make_accelerator"]
