"""Distributed training: start processes, exchange data between them, hold their weights and sum their gradients."""

from trlx_like.distributed.backend import (
    BACKENDS as BACKENDS,
    Backend as Backend,
    make_backend as make_backend,
    register_backend as register_backend,
)
from trlx_like.distributed.heartbeat import Heartbeat as Heartbeat
from trlx_like.distributed.launcher import launch as launch, slurm_node as slurm_node
from trlx_like.distributed.setup import make_accelerator as make_accelerator
from trlx_like.distributed.world import NamedNumbers as NamedNumbers, Statistics as Statistics, World as World
