"""The configuration: typed, closed sections, and the registries of methods and trainers. Imports no torch."""

from trlx_like.config.generation import NEUTRAL as NEUTRAL, longest_response as longest_response, swept as swept
from trlx_like.config.method import (
    MethodConfig as MethodConfig,
    OnlineTextMethodConfig as OnlineTextMethodConfig,
    TextMethodConfig as TextMethodConfig,
)
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


def __getattr__(name: str) -> type[MethodConfig]:
    """Return the section of a method by its name, such as PPOConfig, which is imported when it is asked for."""
    if name not in METHODS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return METHODS.get(name)
