"""Language models with a value head under the names and with the calls that TRL's and trlX's users know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from trlx_like.errors import ConfigError
from trlx_like.models.heads import ValueHead
from trlx_like.models.layout import hidden_size, is_encoder_decoder, lm_head, run_base
from trlx_like.models.loading import no_progress_bars
from trlx_like.models.reward_adapter import RewardAdapter

HEADS_FILE = "heads.safetensors"
"""Heads beside an exported model, in a file of their own so that the model itself stays a plain one."""


class _WithValueHead(nn.Module):
    """`lm` and a `ValueHead` on its last hidden state.

    `from_pretrained` takes a folder, a hub name or a model, and reads the head that a trainer's `save_pretrained` left
    beside the model.
    """

    kind: ClassVar[Any]
    """The class of transformers that loads the model."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        if is_encoder_decoder(lm) != (self.kind is AutoModelForSeq2SeqLM):
            raise ConfigError(f"{type(self).__name__}: {type(lm).__name__} is a model of the other kind.")
        self.pretrained_model = lm
        self.v_head = ValueHead(hidden_size(lm))

    @classmethod
    def from_pretrained(cls, path: str | Path | PreTrainedModel, **kwargs: Any) -> Self:
        if isinstance(path, PreTrainedModel):
            return cls(path)
        with no_progress_bars():
            model = cls(cls.kind.from_pretrained(str(path), **kwargs))
        heads = Path(path) / HEADS_FILE
        if heads.is_file():
            model._load_head(load_file(heads), heads)
        return model

    def _load_head(self, saved: dict[str, Tensor], file: Path) -> None:
        if any(name.startswith("head_tops.value.") for name in saved):
            raise ConfigError(
                f"{file} has a value branch (method.num_value_layers_unfrozen), which this model has no place for."
            )
        prefix = "heads.value."
        value = {name.removeprefix(prefix): part for name, part in saved.items() if name.startswith(prefix)}
        if value:
            self.v_head.load_state_dict(value)

    def save_pretrained(self, directory: str | Path) -> None:
        """A folder that plain transformers load, with the head beside it."""
        with no_progress_bars():
            self.pretrained_model.save_pretrained(directory)
        head = {f"heads.value.{name}": value for name, value in self.v_head.state_dict().items()}
        save_file(head, Path(directory) / HEADS_FILE)

    def _outputs(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, None, Tensor]:
        hidden, _ = run_base(self.pretrained_model, inputs)
        logits = lm_head(self.pretrained_model)(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return logits, None, self.v_head(hidden)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.pretrained_model.generate(*args, **kwargs)  # type: ignore[operator]


class AutoModelForCausalLMWithValueHead(_WithValueHead):
    """A causal model with a value head. `forward` returns (logits [B, T, V], None, values [B, T]), as TRL's does."""

    kind = AutoModelForCausalLM

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        self.reward_adapter: RewardAdapter | None = None

    def add_and_load_reward_modeling_adapter(
        self, adapter_model_id: str | Path, adapter_name: str = "reward_model_adapter"
    ) -> None:
        """Loads a reward model that is an adapter on the policy's own base: a folder or hub name in peft's format.

        It is frozen, and used by `compute_reward_score` only. ConfigError for a policy without an adapter of its own,
        whose training would change what the reward adapter is for, and for an adapter without a head `score`.
        """
        self.reward_adapter = RewardAdapter(self.pretrained_model, str(adapter_model_id), adapter_name)

    def compute_reward_score(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Scores [B, 1, L] of sequences [B, T] by the head of the reward adapter with L labels, read at the last token.

        That is the last real one, on whichever side `attention_mask` pads; `[:, -1, 0]` are the rewards, as in TRL
        (which scores all tokens, padding too). No gradient, no dropout; the policy's adapter is active again after it.
        """
        if self.reward_adapter is None:
            raise ConfigError("compute_reward_score: there is no reward adapter; add_and_load_reward_modeling_adapter.")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        scores: Tensor = self.reward_adapter(self.pretrained_model, input_ids, mask.bool())
        return scores[:, None]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None, Tensor]:
        inputs = {"input_ids": input_ids}
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
            inputs |= {"attention_mask": attention_mask, "position_ids": positions}
        return self._outputs(inputs)


class AutoModelForSeq2SeqLMWithValueHead(_WithValueHead):
    """An encoder-decoder with a value head on its decoder.

    `forward` returns (logits [B, R, V], None, values [B, R]) at the R decoder tokens; the first is the one that
    decoders begin with.
    """

    kind = AutoModelForSeq2SeqLM

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        decoder_input_ids: Tensor,
        decoder_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, None, Tensor]:
        ones = torch.ones_like
        inputs = {
            "input_ids": input_ids,
            "attention_mask": ones(input_ids) if attention_mask is None else attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": ones(decoder_input_ids)
            if decoder_attention_mask is None
            else decoder_attention_mask,
        }
        return self._outputs(inputs)
