"""Distributed training: start processes, exchange data between them, and sum their gradients."""

from trlx_like.distributed.accumulate import GradientAccumulator
from trlx_like.distributed.heartbeat import Heartbeat
from trlx_like.distributed.launcher import launch
from trlx_like.distributed.setup import make_accelerator
from trlx_like.distributed.world import Statistics, World

Group = World
"""The older name of `World`."""

__all__ = ["GradientAccumulator", "Group", "Heartbeat", "Statistics", "World", "launch", "make_accelerator"]
