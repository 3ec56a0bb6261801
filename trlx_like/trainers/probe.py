"""The longest sample that a run may meet, before all others (`train.probe_memory`).

A run whose memory does not suffice for it ends in its first minute, and not in the night. Left out on purpose: the
optimizer's state, which the first step makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from trlx_like.checkpoint import isolated_rng
from trlx_like.samplers.generation import generation_config
from trlx_like.samplers.text import TextSampler
from trlx_like.trainers.callbacks import Callback


class ProbeMemory(Callback):
    """Probe once: online before the run, offline as soon as the data is encoded."""

    def on_train_begin(self, trainer: Any) -> None:
        if not trainer.offline:
            probe(trainer)

    def on_experience(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        if trainer.offline:
            probe(trainer)


def probe(trainer: Any) -> None:
    """Generate to the maximum length, and run the longest micro-batch forward and backward; change nothing."""
    before, seed = trainer.state.snapshot(), trainer.config.train.seed
    try:
        with isolated_rng(seed):
            with trainer.run.backend.sampling(), torch.no_grad():
                trainer.model.eval()
                if not trainer.offline and isinstance(trainer.sampler, TextSampler):
                    generate_longest(trainer)
                batch = trainer.longest(trainer.run.microbatch_size)
            trainer.optimisation.probe(batch, trainer.loss)
    finally:
        trainer.state.restore(before)


def generate_longest(trainer: Any) -> int:
    """Generate responses of the maximum length to as many of the longest prompts as a rollout generates for at once.

    Args:
        trainer: An online trainer of text.

    Returns:
        The number of responses.
    """
    method = trainer.method
    total = getattr(method, "num_rollouts", None) or getattr(method, "num_prompts", None) or math.inf
    chunk = min(method.chunk_size * trainer.world.size, total)
    rows = min(trainer.config.sampler.batch_size or math.inf, len(trainer.take_prompts(int(chunk))))
    ids = torch.ones(max(1, int(rows)), trainer.max_prompt_length, dtype=torch.int64, device=trainer.device)
    never = trainer.model.lm.config.get_text_config().vocab_size  # no token ends the response
    ids[:, 0] = torch.arange(len(ids), device=ids.device) % never  # equal prompts would be read once
    config = generation_config({**trainer.experience_kwargs, "eos_token_id": never}, trainer.tokenizer)
    trainer.sync_sampler()
    trainer.sampler.engine.generate(ids, ids.bool(), config, [])
    return len(ids)
