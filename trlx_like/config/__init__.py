"""The configuration: typed, closed sections, and the registries of methods and trainers. Imports no torch."""

from trlx_like.config.generation import NEUTRAL, longest_response, swept
from trlx_like.config.method import MethodConfig, OnlineTextMethodConfig, TextMethodConfig
from trlx_like.config.methods.ddpo import DDPOConfig
from trlx_like.config.methods.dpo import DPOConfig
from trlx_like.config.methods.grpo import GRPOConfig
from trlx_like.config.methods.ilql import ILQLConfig
from trlx_like.config.methods.online_dpo import OnlineDPOConfig
from trlx_like.config.methods.ppo import PPOConfig
from trlx_like.config.methods.reward import RewardConfig
from trlx_like.config.methods.rft import RFTConfig
from trlx_like.config.methods.rloo import RLOOConfig
from trlx_like.config.methods.sft import SFTConfig
from trlx_like.config.model import (
    BackendConfig,
    ModelConfig,
    OptimizerConfig,
    SamplerConfig,
    SchedulerConfig,
    TokenizerConfig,
)
from trlx_like.config.problems import InvalidConfig, Problem
from trlx_like.config.registries import METHODS, TRAINERS, register_method, register_trainer
from trlx_like.config.reward import RewardFnConfig
from trlx_like.config.section import Section
from trlx_like.config.train import DataConfig, TrainConfig
from trlx_like.config.trl import TRLConfig

__all__ = [
    "METHODS",
    "NEUTRAL",
    "TRAINERS",
    "BackendConfig",
    "DDPOConfig",
    "DPOConfig",
    "DataConfig",
    "GRPOConfig",
    "ILQLConfig",
    "InvalidConfig",
    "MethodConfig",
    "ModelConfig",
    "OnlineTextMethodConfig",
    "OnlineDPOConfig",
    "OptimizerConfig",
    "PPOConfig",
    "Problem",
    "RFTConfig",
    "RLOOConfig",
    "RewardConfig",
    "RewardFnConfig",
    "SFTConfig",
    "SamplerConfig",
    "SchedulerConfig",
    "Section",
    "TRLConfig",
    "TextMethodConfig",
    "TokenizerConfig",
    "TrainConfig",
    "longest_response",
    "register_method",
    "register_trainer",
    "swept",
]
