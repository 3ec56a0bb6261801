"""Language models with a value head, with the names and calls of TRL and trlX."""

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
from trlx_like.models.reward_adapter import RewardAdapter
from trlx_like.models.sources import no_progress_bars

HEADS_FILE = "heads.safetensors"
"""The file with the heads in the folder of an exported model, separate so that plain transformers can load the model.
"""


class _WithValueHead(nn.Module):
    """A language model with a `ValueHead` on its last hidden states.

    Args:
        lm: The language model.

    Raises:
        ConfigError: For a causal model where an encoder-decoder is expected, or the other way round.
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
        """Load a model and, from a folder that a trainer's `save_pretrained` wrote, its value head.

        Args:
            path: A folder, a hub name, or a model in memory. Without a saved head, a new one is made.
            kwargs: Passed to `from_pretrained` of transformers.

        Returns:
            The model with a value head.

        Raises:
            ConfigError: If the saved head is a value branch, which has blocks of its own.
        """
        if isinstance(path, PreTrainedModel):
            return cls(path)
        with no_progress_bars():
            model = cls(cls.kind.from_pretrained(str(path), **kwargs))
        heads = Path(path) / HEADS_FILE
        if heads.is_file():
            model._load_head(load_file(heads), heads)
        return model

    def _load_head(self, saved: dict[str, Tensor], file: Path) -> None:
        """Load the value head from the weights of a heads file."""
        if any(name.startswith("head_tops.value.") for name in saved):
            raise ConfigError(
                f"{file} has a value branch (method.num_value_layers_unfrozen), which this model has no place for."
            )
        prefix = "heads.value."
        value = {name.removeprefix(prefix): part for name, part in saved.items() if name.startswith(prefix)}
        if value:
            self.v_head.load_state_dict(value)

    def save_pretrained(self, directory: str | Path) -> None:
        """Save the model, which plain transformers can load, and its value head in a file of its own."""
        with no_progress_bars():
            self.pretrained_model.save_pretrained(directory)
        head = {f"heads.value.{name}": value for name, value in self.v_head.state_dict().items()}
        save_file(head, Path(directory) / HEADS_FILE)

    def _outputs(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, None, Tensor]:
        """Compute logits and values."""
        hidden, _ = run_base(self.pretrained_model, inputs)
        logits = lm_head(self.pretrained_model)(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return logits, None, self.v_head(hidden)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the language model: arguments and result are those of `generate()` of transformers."""
        return self.pretrained_model.generate(*args, **kwargs)  # type: ignore[operator]


class AutoModelForCausalLMWithValueHead(_WithValueHead):
    """A causal language model with a value head.

    Its forward returns (logits, None, values), like that of TRL's class.

    Args:
        lm: The language model. Usually the class is made by `from_pretrained` instead.

    Raises:
        ConfigError: If the model is an encoder-decoder.
    """

    kind = AutoModelForCausalLM

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        self.reward_adapter: RewardAdapter | None = None

    def add_and_load_reward_modeling_adapter(
        self, adapter_model_id: str | Path, adapter_name: str = "reward_model_adapter"
    ) -> None:
        """Load a reward model that is an adapter on the policy's own base model.

        It stays frozen, and only `compute_reward_score` uses it.

        Args:
            adapter_model_id: Folder or hub name of the adapter, in peft's format, with a head `score`.
            adapter_name: The name of the adapter in the model.

        Raises:
            ConfigError: If the adapter does not fit or has no head, or if the policy has no adapter of its own:
                training would then change the base that the reward adapter was trained on.
        """
        self.reward_adapter = RewardAdapter(self.pretrained_model, str(adapter_model_id), adapter_name)

    def compute_reward_score(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Score sequences with the reward adapter, without gradient and dropout.

        Afterwards the policy's adapter is active again.

        Args:
            input_ids: Token ids. [B, T]
            attention_mask: 1 on real tokens, with padding on either side; None is no padding. [B, T]

        Returns:
            The scores at the last real token, one per label of the head: `scores[:, -1, 0]` are the rewards. TRL
            returns [B, T, L], the scores of all tokens. [B, 1, L]

        Raises:
            ConfigError: If no reward adapter was loaded.
        """
        if self.reward_adapter is None:
            raise ConfigError("compute_reward_score: there is no reward adapter; add_and_load_reward_modeling_adapter.")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        scores: Tensor = self.reward_adapter(self.pretrained_model, input_ids, mask.bool())
        return scores[:, None]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None, Tensor]:
        """Compute logits and values.

        Args:
            input_ids: Token ids. [B, T]
            attention_mask: 1 on real tokens; None is no padding. [B, T]

        Returns:
            Logits [B, T, V], None, and values [B, T].
        """
        inputs = {"input_ids": input_ids}
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
            inputs |= {"attention_mask": attention_mask, "position_ids": positions}
        return self._outputs(inputs)


class AutoModelForSeq2SeqLMWithValueHead(_WithValueHead):
    """An encoder-decoder with a value head on its decoder.

    Its forward returns (logits, None, values), like that of TRL's class.

    Args:
        lm: The language model. Usually the class is made by `from_pretrained` instead.

    Raises:
        ConfigError: If the model is a causal one.
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
        """Compute logits and values at the decoder's tokens.

        Args:
            input_ids: Token ids that the encoder reads. [B, P]
            attention_mask: 1 on real tokens of the encoder; None is no padding. [B, P]
            decoder_input_ids: The decoder's tokens, beginning with its start token. [B, R]
            decoder_attention_mask: 1 on real tokens of the decoder; None is no padding. [B, R]

        Returns:
            Logits [B, R, V], None, and values [B, R].
        """
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
