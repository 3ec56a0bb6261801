"""Reward models as reward functions: `train(reward_fn=RewardModel("folder"))`, or `data.reward_fn: folder`.

A text gets the reward that the model learned to give: prompt and output are tokenised as in `pipelines/preferences.py`,
with EOS at the end. A text that is too long loses its beginning, so that the answer is kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trlx_like.data.experience import padded_rows
from trlx_like.errors import ConfigError
from trlx_like.models.reward_model import RewardNetwork, load_reward_model
from trlx_like.models.sources import UNTRUSTED
from trlx_like.pipelines.chat import encode_answer, template_options
from trlx_like.pipelines.tokens import TextEncoder

logger = logging.getLogger(__name__)


class RewardModel:
    """Reward outputs by a classifier with one label.

    Prompts that were messages are written by the chat template of the reward model's tokenizer, with the output as the
    assistant's turn.

    Args:
        model: A folder (as `RewardTrainer` exports it), a hub name, or a loaded classifier.
        tokenizer: The model's tokenizer; None: the one in the folder.
        batch_size: Texts per forward pass.
        max_length: Longest prompt and output in tokens; None: the number of the model's positions.
        device: The device of the model; None: the process's GPU if there is one.
        option: The name of `model` in errors.
        **options: Options of `from_pretrained`.

    Raises:
        ConfigError: The model has no trained head or no tokenizer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        batch_size: int = 32,
        max_length: int | None = None,
        device: torch.device | str | None = None,
        option: str = "RewardModel",
        **options: Any,
    ) -> None:
        sizes: dict[str, Any] = {"batch_size": batch_size, "max_length": max_length, "device": device, "option": option}
        self._made_of = partial(type(self), **sizes, **options), (model, tokenizer)
        lm = load_reward_model(model, trained=True, option=option, **options)
        self.network = RewardNetwork(lm).eval().requires_grad_(False)
        self.tokenizer = _own_tokenizer(lm.config.name_or_path, option) if tokenizer is None else tokenizer
        self.encoder = TextEncoder(self.tokenizer)
        self.batch_size = batch_size
        positions: int | None = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
        self.max_length = max_length or positions or self.tokenizer.model_max_length
        self.device = device
        self.has_cut = False  # whether a text was too long, which is logged once

    @property
    def label(self) -> str:
        """The name of the model in metrics: that of its folder."""
        return Path(self.network.lm.config.name_or_path or "").name or type(self).__name__

    def __reduce__(self) -> Any:
        """Pickle the arguments, so that a worker process loads the folder again."""
        return self._made_of

    @torch.no_grad()
    def __call__(
        self,
        *,
        prompts: Sequence[str],
        outputs: Sequence[str],
        messages: Sequence[Sequence[Mapping[str, Any]] | None] | None = None,
        tools: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float]:
        """Return one reward per output.

        Args:
            prompts: The prompts as text.
            outputs: The outputs as text.
            messages: For each prompt its messages, or None if it was text.
            tools: For each prompt the tools of its chat template, or None.
        """
        missing = [None] * len(prompts)
        columns = prompts, outputs, missing if messages is None else messages, missing if tools is None else tools
        rows = [self._ids(*row) for row in zip(*columns, strict=True)]
        too_long = [row for row in rows if len(row) > self.max_length]
        if too_long and not self.has_cut:
            self.has_cut = True
            logger.warning(
                f"{len(too_long)} of {len(rows)} texts are longer than the {self.max_length} tokens that the reward "
                "model reads: these, and others like them, lose their beginning."
            )
        rows = [self.encoder.cut(row, self.max_length, side="left") for row in rows]
        device = self._placed()
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))  # similar lengths together, to save padding
        rewards = [0.0] * len(rows)
        for start in range(0, len(order), self.batch_size):
            places = order[start : start + self.batch_size]
            ids, mask = padded_rows([torch.tensor(rows[place]) for place in places])
            for place, reward in zip(places, self.network(ids.to(device), mask.to(device)).tolist(), strict=True):
                rewards[place] = reward
        return rewards

    def _ids(self, prompt: str, output: str, messages: Sequence[Mapping[str, Any]] | None, tools: Any) -> list[int]:
        """Encode a prompt and its output."""
        if messages is not None:
            answer = [{"role": "assistant", "content": output}]
            options = template_options({"tools": tools})
            chat = encode_answer(messages, answer, self.tokenizer, place="the prompt's messages", **options)
            return [*chat.prompt.ids, *chat.ids]
        return [*self.encoder.opening([prompt])[0], *self.encoder.ended(self.encoder.following([output])[0])]

    def _placed(self) -> torch.device:
        """Move the model to its device, which is chosen at the first call, when the process knows its own GPU."""
        if self.device is None:
            # A worker is a new process, for which nobody has chosen the GPU of the process that it works for.
            if torch.cuda.is_available():
                own = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
                self.device = torch.device("cuda", own % torch.cuda.device_count())
            else:
                self.device = "cpu"
        self.network.to(self.device)
        return torch.device(self.device)


def _own_tokenizer(path: str, option: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is in a model's folder."""
    error = ConfigError(f"{option}: there is no tokenizer with the model; pass tokenizer=.")
    if not path or (Path(path).is_dir() and not (Path(path) / "tokenizer_config.json").is_file()):
        raise error  # transformers would make an empty one
    try:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(path, **UNTRUSTED))
    except (OSError, ValueError) as missing:
        raise error from missing
