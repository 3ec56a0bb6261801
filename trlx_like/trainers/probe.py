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
    compaction = getattr(trainer.model, "compaction", None)
    trainer.model.compaction = None  # prompts of a probe are equal, those of the run may all differ
    try:
        with isolated_rng(seed):
            with trainer.run.backend.sampling(), torch.no_grad():
                trainer.model.eval()
                if not trainer.offline:
                    generate_longest(trainer)
                batch = trainer.longest(trainer.run.microbatch_size)
            trainer.optimisation.probe(batch, trainer.loss)
    finally:
        trainer.model.compaction = compaction
        trainer.state.restore(before)


def generate_longest(trainer: Any) -> tuple[int, bool]:
    """Generate responses of the maximum length to as many of the longest prompts as a rollout generates for at once.

    If new prompts take the place of finished rows, they do it here too: they are read beside a full cache.

    Args:
        trainer: An online trainer. One of images makes as many images.

    Returns:
        The number of responses at a time, and whether new ones took the place of finished ones.
    """
    method = trainer.method
    if not isinstance(trainer.sampler, TextSampler):
        given = min(method.chunk_size * method.num_generations, math.ceil(method.num_samples / trainer.world.size))
        rows = min(trainer.sampler.batch_size or given, given)
        trainer.longest(rows)
        return rows, False
    total = getattr(method, "num_rollouts", None) or getattr(method, "num_prompts", None) or math.inf
    chunk = min(method.chunk_size * trainer.world.size, total)
    given = max(1, len(trainer.take_prompts(int(chunk))))
    rows = min(trainer.config.sampler.batch_size or given, given)
    never = trainer.model.lm.config.get_text_config().vocab_size  # no token ends the response
    config = generation_config({**trainer.experience_kwargs, "eos_token_id": never}, trainer.tokenizer)
    engine, refill = trainer.sampler.engine, {}
    if rows < given and hasattr(engine, "refills") and engine.refills(config):
        refill = {"at_once": rows}
    count = min(given, 2 * rows) if refill else rows
    ids = torch.ones(count, trainer.max_prompt_length, dtype=torch.int64, device=trainer.device)
    ids[:, 0] = torch.arange(count, device=ids.device) % never  # equal prompts would be read once
    trainer.sync_sampler()
    engine.generate(ids, ids.bool(), config, [], **refill)
    return rows, bool(refill)
