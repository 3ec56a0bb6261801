# ruff: noqa: I001
# Written by scripts/exports.py.
from trlx_like.api import train as train
from trlx_like.config import BackendConfig as BackendConfig
from trlx_like.config import DataConfig as DataConfig
from trlx_like.config import MethodConfig as MethodConfig
from trlx_like.config import ModelConfig as ModelConfig
from trlx_like.config import OptimizerConfig as OptimizerConfig
from trlx_like.config import RewardFnConfig as RewardFnConfig
from trlx_like.config import SamplerConfig as SamplerConfig
from trlx_like.config import SchedulerConfig as SchedulerConfig
from trlx_like.config import TRLConfig as TRLConfig
from trlx_like.config import TokenizerConfig as TokenizerConfig
from trlx_like.config import TrainConfig as TrainConfig
from trlx_like.config import register_method as register_method
from trlx_like.config import register_trainer as register_trainer
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
from trlx_like.models.diffusion_families import register_diffusion_family as register_diffusion_family
from trlx_like.models.reference import create_reference_model as create_reference_model
from trlx_like.models.value_head import AutoModelForCausalLMWithValueHead as AutoModelForCausalLMWithValueHead
from trlx_like.models.value_head import AutoModelForSeq2SeqLMWithValueHead as AutoModelForSeq2SeqLMWithValueHead
from trlx_like.models.wrapper import PreTrainedModelWrapper as PreTrainedModelWrapper
from trlx_like.pipelines.prompts import register_datapipeline as register_datapipeline
from trlx_like.rewards.judges import WinRate as WinRate
from trlx_like.rewards.judges import register_judge as register_judge
from trlx_like.rewards.models import RewardModel as RewardModel
from trlx_like.rewards.weighted import WeightedRewards as WeightedRewards
from trlx_like.samplers.guided import AutoModelForCausalLMWithILQLHeads as AutoModelForCausalLMWithILQLHeads
from trlx_like.samplers.guided import AutoModelForSeq2SeqLMWithILQLHeads as AutoModelForSeq2SeqLMWithILQLHeads
from trlx_like.tracking import register_tracker as register_tracker
from trlx_like.trainers.base import BaseRLTrainer as BaseRLTrainer
from trlx_like.trainers.base import LossOutput as LossOutput
from trlx_like.trainers.callbacks import Callback as Callback
from trlx_like.trainers.ddpo import DDPOTrainer as DDPOTrainer
from trlx_like.trainers.distill import DistillTrainer as DistillTrainer
from trlx_like.trainers.dpo import DPOTrainer as DPOTrainer
from trlx_like.trainers.grpo import GRPOTrainer as GRPOTrainer
from trlx_like.trainers.ilql import ILQLTrainer as ILQLTrainer
from trlx_like.trainers.kto import KTOTrainer as KTOTrainer
from trlx_like.trainers.online import OnlineTextTrainer as OnlineTextTrainer
from trlx_like.trainers.online_dpo import OnlineDPOTrainer as OnlineDPOTrainer
from trlx_like.trainers.ppo import PPOTrainer as PPOTrainer
from trlx_like.trainers.reward import RewardTrainer as RewardTrainer
from trlx_like.trainers.rft import RFTTrainer as RFTTrainer
from trlx_like.trainers.rloo import RLOOTrainer as RLOOTrainer
from trlx_like.trainers.sft import SFTTrainer as SFTTrainer
from trlx_like.trainers.text import TextTrainer as TextTrainer

AcceleratePPOTrainer = PPOTrainer
AccelerateRFTTrainer = RFTTrainer
AccelerateILQLTrainer = ILQLTrainer
AccelerateSFTTrainer = SFTTrainer

__version__: str

def default_ppo_config() -> TRLConfig:
    """Return the preset for PPO on a GPT-2 of film reviews: trlX's values but for rate, KL weight and layers."""

def default_grpo_config() -> TRLConfig:
    """Return the preset for GRPO, on a GPT-2 that was fine-tuned on film reviews."""

def default_rloo_config() -> TRLConfig:
    """Return the preset for RLOO, on a GPT-2 that was fine-tuned on film reviews."""

def default_rft_config() -> TRLConfig:
    """Return the preset for rejection-sampling fine-tuning of a GPT-2 that was fine-tuned on film reviews."""

def default_ilql_config() -> TRLConfig:
    """Return the preset for ILQL: trlX's values, on GPT-2."""

def default_sft_config() -> TRLConfig:
    """Return the preset for supervised fine-tuning of GPT-2, with trlX's values."""

def default_reward_config() -> TRLConfig:
    """Return the preset for a reward model on GPT-2, with TRL's learning rate and batch size."""

def default_dpo_config() -> TRLConfig:
    """Return the preset for DPO on GPT-2, with TRL's learning rate, batch size and epochs."""

def default_kto_config() -> TRLConfig:
    """Return the preset for KTO on GPT-2, with TRL's learning rate, batch size and epochs."""

def default_online_dpo_config() -> TRLConfig:
    """Return the preset for Online DPO on GPT-2: TRL's lengths, the best and the worst of eight responses."""

def default_distill_config() -> TRLConfig:
    """Return the preset for distilling GPT-2 large into GPT-2 on the small model's own responses."""

def default_ddpo_config() -> TRLConfig:
    """Return the preset for DDPO with LoRA on Stable Diffusion 1.5, with its authors' values for compressibility."""
