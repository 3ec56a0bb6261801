"""Sampling from a trained model with the chat template, stop sequences and reward function of its run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trlx_like.config import ModelConfig, TokenizerConfig, TRLConfig
from trlx_like.errors import ConfigError
from trlx_like.models.loading import arch_type, load_model
from trlx_like.models.tokenizer import load_tokenizer
from trlx_like.pipelines.chat import common_options
from trlx_like.pipelines.prompts import PromptPipeline
from trlx_like.pipelines.sources import load_rows
from trlx_like.rewards.make import make_reward
from trlx_like.rewards.runner import RewardRunner
from trlx_like.samplers.engines import TransformersEngine
from trlx_like.samplers.guided import GuidedEngine, load_ilql_heads
from trlx_like.samplers.text import SEPARATOR, TextSampler, TextSamples
from trlx_like.sharing.export import checkpoint_in
from trlx_like.tracking.folder import read_config
from trlx_like.trainers.scoring import argument_columns, reward_columns

logger = logging.getLogger(__name__)

BATCH = 32
"""Number of responses that are generated at once."""


@dataclass
class Trained:
    """Hold the place of a model, and what the configuration of its run says about prompts."""

    name: str
    model: str  # folder or hub name
    run: Path | None  # the run folder that it is in
    config: dict[str, Any]  # of the run; empty without one

    def option(self, section: str, name: str) -> Any:
        """Return an option of the run, or None."""
        return (self.config.get(section) or {}).get(name)

    def prompts(self, source: str) -> list[Any]:
        """Load the prompts of a source as `data.prompts` of the run would be."""
        return list(load_rows(source, "--prompts", self.option("data", "columns")))

    def reward(self) -> RewardRunner:
        """Load the reward function that the run was trained on.

        Raises:
            ConfigError: If config.yml of the run names none.
        """
        if self.option("data", "reward_fn") is None:
            raise ConfigError(
                f"--reward: {self.name} has no config.yml of a run with data.reward_fn. A function that Python code "
                "passed to train() is not known here; name it in the file as path/to/file.py:function."
            )
        assert self.run is not None
        config = TRLConfig.load_yaml(self.run / "config.yml")
        return RewardRunner(make_reward(config.data.reward_fn, config.reward.weights, "data.reward_fn"), config.reward)


def find_model(name: str) -> Trained:
    """Find the model that a run folder, a checkpoint, or the folder or hub name of a model stands for.

    Raises:
        ConfigError: If there is none.
    """
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        if folder.is_absolute() or (len(folder.parts) > 1 and folder.parent.is_dir()):  # the hub would be asked
            raise ConfigError(f"{name}: there is no such folder.")
        return Trained(name, name, None, {})
    if not (folder / "config.json").is_file():
        chosen = checkpoint_in(folder)
        if chosen is None:
            raise ConfigError(f"{name} is not a model, a checkpoint, or a run with a checkpoint.")
        folder = chosen / "hf_model"
    run = folder.resolve().parents[1] if folder.resolve().name == "hf_model" else None
    return Trained(name, str(folder), run, {} if run is None else read_config(run)[1])


class Generator:
    """Sample responses of a model, with the chat template and the stop sequences of its run.

    Args:
        trained: The model.
        options: Generation options; `beta` is for ILQL models only.
        seed: Seed of the sampling; None for a random one.
        longest: Maximum number of new tokens; None: `usual`, or half of the model's positions if these are fewer.
        usual: What `longest` is by default.

    Raises:
        ConfigError: If the options do not fit the model.
    """

    def __init__(
        self, trained: Trained, options: dict[str, Any], seed: int | None, longest: int | None, usual: int
    ) -> None:
        model = trained.model
        self._template = common_options(trained.option("tokenizer", "chat_template_kwargs") or {})
        device = "cuda" if torch.cuda.is_available() else "cpu"
        kind = arch_type(model)
        lm = load_model(model, ModelConfig(model_path=model, model_arch_type=kind))
        self.tokenizer = load_tokenizer(TokenizerConfig(truncation_side="left"), model)
        torch.nn.Module.to(lm, device)  # transformers' own is not typed
        positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        if longest is None:
            longest = min(usual, max(1, positions // 2))
            if longest < usual:
                logger.warning("The model has %d positions: at most %d new tokens are written.", positions, longest)
        self._room = positions - longest
        if self._room < 1:
            raise ConfigError(f"--max-new-tokens ({longest}) must be below the model's {positions} positions.")
        options = {"max_new_tokens": longest, **options}
        if seed is not None:
            torch.manual_seed(seed)
        self.seq2seq = kind == "seq2seq"
        heads = load_ilql_heads(model)
        generator: Any = TransformersEngine(lm, self.tokenizer)
        if heads is not None:
            generator = GuidedEngine(lm, self.tokenizer, heads=heads.to(device))
            options = {"beta": 1.0, **options}
        elif "beta" in options:
            raise ConfigError(f"--beta: {model} has no ILQL heads to be guided by.")
        self._options = options
        self._sampler = TextSampler(
            generator,
            self.tokenizer,
            stop_sequences=trained.option("data", "stop_sequences") or (),
            separator=SEPARATOR if self.seq2seq else None,
            batch_size=BATCH,
            device=device,
        )

    def sample(self, prompts: Sequence[Any], number: int = 1) -> TextSamples:
        """Sample `number` responses to each prompt: text, messages, or a mapping with either under "prompt".

        If a prompt is too long for the model, its beginning is cut off.
        """
        pipeline = PromptPipeline(prompts, self._room, self.tokenizer, seq2seq=self.seq2seq, template=self._template)
        return self._sampler.sample(pipeline[range(len(pipeline))].repeated(number), self._options)

    def texts(self, samples: TextSamples) -> list[str]:
        """Return each prompt with its response; an encoder-decoder's response is on a line of its own."""
        between = "\n" if self.seq2seq else ""
        return [prompt + between + output for prompt, output in zip(samples.prompts, samples.outputs, strict=True)]

    def rewards(self, runner: RewardRunner, samples: TextSamples) -> list[dict[str, float | None]]:
        """Score responses.

        Args:
            runner: Calls the reward function.
            samples: The responses.

        Returns:
            For each response "reward", and "reward/<name>" of each of several functions; None without a reward.
        """
        rows = samples.rows()
        columns, metadata = argument_columns(runner.function, rows, self.tokenizer)
        ids = [row["output_ids"] for row in rows]
        try:
            scores = runner.result(runner.submit(columns, metadata, ids=ids, tokenizer=self.tokenizer))
        finally:
            runner.close()
        return [reward_columns(scores.rewards, scores.components, place) for place in range(len(rows))]
