"""Distributed training: start processes, exchange data between them, hold their weights and sum their gradients."""

from trlx_like.distributed.backend import BACKENDS, Backend, make_backend, register_backend
from trlx_like.distributed.heartbeat import Heartbeat
from trlx_like.distributed.launcher import launch, slurm_node
from trlx_like.distributed.setup import make_accelerator
from trlx_like.distributed.world import NamedNumbers, Statistics, World

Group = World
"""The older name of `World`."""

__all__ = [
    "BACKENDS",
    "Backend",
    "Group",
    "Heartbeat",
    "NamedNumbers",
    "Statistics",
    "World",
    "launch",
    "make_accelerator",
    "make_backend",
    "register_backend",
    "slurm_node",
]
