"""The configuration: typed, closed sections, and the registries of methods and trainers. Imports no torch."""

from trlx_like.config.generation import NEUTRAL as NEUTRAL, longest_response as longest_response, swept as swept
from trlx_like.config.method import (
    MethodConfig as MethodConfig,
    OnlineTextMethodConfig as OnlineTextMethodConfig,
    TextMethodConfig as TextMethodConfig,
)
from trlx_like.config.methods.ddpo import DDPOConfig as DDPOConfig
from trlx_like.config.methods.distill import DistillConfig as DistillConfig
from trlx_like.config.methods.dpo import DPOConfig as DPOConfig
from trlx_like.config.methods.grpo import GRPOConfig as GRPOConfig
from trlx_like.config.methods.ilql import ILQLConfig as ILQLConfig
from trlx_like.config.methods.kto import KTOConfig as KTOConfig
from trlx_like.config.methods.online_dpo import OnlineDPOConfig as OnlineDPOConfig
from trlx_like.config.methods.ppo import PPOConfig as PPOConfig
from trlx_like.config.methods.reward import RewardConfig as RewardConfig
from trlx_like.config.methods.rft import RFTConfig as RFTConfig
from trlx_like.config.methods.rloo import RLOOConfig as RLOOConfig
from trlx_like.config.methods.sft import SFTConfig as SFTConfig
from trlx_like.config.model import (
    BackendConfig as BackendConfig,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    SamplerConfig as SamplerConfig,
    SchedulerConfig as SchedulerConfig,
    TokenizerConfig as TokenizerConfig,
)
from trlx_like.config.problems import InvalidConfig as InvalidConfig, Problem as Problem
from trlx_like.config.registries import (
    METHODS as METHODS,
    TRAINERS as TRAINERS,
    register_method as register_method,
    register_trainer as register_trainer,
)
from trlx_like.config.reward import RewardFnConfig as RewardFnConfig
from trlx_like.config.section import Section as Section
from trlx_like.config.train import DataConfig as DataConfig, TrainConfig as TrainConfig
from trlx_like.config.trl import TRLConfig as TRLConfig
