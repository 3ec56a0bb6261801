"""The engine "vllm_colocated": vLLM in the training process, on its GPU, asleep while the policy learns.

    sampler:
      engine: vllm_colocated
      kwargs: {gpu_memory_utilization: 0.3}

Every process has its own vLLM for its own prompts. Weights go from tensor to tensor. Left out on purpose: vLLM divided
over GPUs (servers do that), and stop strings inside vLLM, which has no tokenizer here.
"""

from __future__ import annotations

import copy
import logging
import os
import tempfile
from collections.abc import Iterator
from typing import Any, Literal

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trlx_like.errors import ConfigError, raised_as
from trlx_like.samplers.engines import register_engine
from trlx_like.samplers.vllm import OPTION, UNKNOWN, Answer, VLLMBase

logger = logging.getLogger(__name__)

GPU_MEMORY_UTILIZATION = 0.3
"""The part of a GPU's memory that vLLM takes while it is awake, by default."""


@register_engine("vllm_colocated")
class ColocatedVLLM(VLLMBase):
    """Generate with a vLLM (0.32 or newer) of this process, which is made with random weights and gets the policy's.

    Args:
        lm: The policy's language model.
        tokenizer: Decodes tokens to find stop strings.
        allowed: Must be None: vLLM cannot forbid tokens.
        dtype: The number format in which vLLM computes; None is that of the model.
        gpu_memory_utilization: The part of the GPU's memory that vLLM takes while it is awake.
        options: Further options of `vllm.LLM`, such as `max_model_len` or `enforce_eager`.

    Raises:
        ConfigError: If vLLM is not installed, or for an option, a model or a memory with which it does not start.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        allowed: Tensor | None = None,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
        **options: Any,
    ) -> None:
        super().__init__(lm, tokenizer, allowed, dtype)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported and when it starts
        with raised_as(ConfigError, ImportError, "sampler.engine (vllm_colocated) needs vLLM in this environment"):
            from vllm import LLM
            from vllm.platforms import current_platform
        self.sleeps = bool(current_platform.is_sleep_mode_available())
        if not self.sleeps:
            logger.warning("vLLM cannot sleep on %s: it keeps its memory while the policy learns.", lm.device)
        config = copy.deepcopy(lm.config)
        config.architectures = [type(lm).__name__]
        executor = "external_launcher" if PartialState().num_processes > 1 else "uni"
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():  # vLLM seeds torch's generators
            config.save_pretrained(folder)
            with raised_as(ConfigError, (ValueError, RuntimeError), f"{OPTION} ({options}): vLLM does not start"):
                self.llm = LLM(
                    model=folder,
                    skip_tokenizer_init=True,
                    load_format="dummy",
                    dtype=dtype or str(lm.dtype).removeprefix("torch."),
                    logprobs_mode="processed_logprobs",
                    enable_sleep_mode=self.sleeps,
                    gpu_memory_utilization=gpu_memory_utilization,
                    distributed_executor_backend=executor,
                    **options,
                )
        self.sleep()

    def sleep(self) -> None:
        """Give the GPU's memory back, weights included, until `sync_weights` brings the next ones."""
        if self.sleeps:
            self.llm.sleep(level=2)
            self.version = UNKNOWN

    @torch.no_grad()
    def sync_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Wake up, replace the weights in place, and forget what was cached with those before."""
        asleep = self.sleeps and self.version == UNKNOWN
        if asleep:
            self.llm.wake_up(tags=["weights"])
        # vLLM keeps what it is given until a layer is complete.
        own = ((name, weight.clone()) for name, weight in self.named(weights))
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": own})
        if asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        self.version = version

    def complete(self, prompts: list[list[int]], params: dict[str, Any], seeds: list[int]) -> list[Answer]:
        from vllm import SamplingParams

        params = {**params, "stop": None, "detokenize": False}
        made = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            [SamplingParams(**params, seed=seed) for seed in seeds],
            use_tqdm=False,
        )
        completions = [one.outputs[0] for one in made]
        return [
            (
                list(one.token_ids),
                [held[token].logprob for held, token in zip(one.logprobs or [], one.token_ids, strict=True)],
                self.version,
            )
            for one in completions
        ]
