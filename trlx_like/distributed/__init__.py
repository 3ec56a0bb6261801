"""Processes: how they are started, how they agree, and how their gradients become one."""

from trlx_like.distributed.accumulate import GradientAccumulator
from trlx_like.distributed.gather import Group
from trlx_like.distributed.setup import launch, make_accelerator

__all__ = ["GradientAccumulator", "Group", "launch", "make_accelerator"]
