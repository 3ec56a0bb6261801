"""Language models with a value head, with the names and calls of TRL and trlX."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from trlx_like.errors import ConfigError, raised_as
from trlx_like.models.heads import SummaryHead, ValueHead
from trlx_like.models.layout import hidden_size, last_hidden, takes
from trlx_like.models.reward_adapter import RewardAdapter
from trlx_like.models.wrapper import PreTrainedModelWrapper


class _WithValueHead(PreTrainedModelWrapper):
    """A language model with a value head on its last hidden states.

    Args:
        pretrained_model: The language model, or a `PeftModel` around it.
        v_head_init_strategy: "normal" draws the weights of a new head from a normal distribution; None keeps torch's
            own initialisation.
        v_head_initializer_range: The standard deviation of that distribution.
        summary_dropout_prob: The dropout probability of the head; None: no dropout.

    Raises:
        ConfigError: For a model of the other kind, causal or encoder-decoder, and for another strategy.
    """

    head_prefix = "v_head."
    saved_prefix = "heads.value."
    head_options = ("v_head_init_strategy", "v_head_initializer_range", "summary_dropout_prob")
    refused: ClassVar[Mapping[str, str]] = {
        **PreTrainedModelWrapper.refused,
        "score_module": "load the reward model's adapter, which has its head, with reward_adapter=",
        "supports_rm_adapter": "every policy with an adapter of its own takes a reward adapter",
        "rm_adapter_name": "it is called reward_adapter_name",
    }

    def __init__(
        self,
        pretrained_model: Any,
        *,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
        summary_dropout_prob: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__(pretrained_model, **others)
        lm = self.pretrained_model
        head = SummaryHead(hidden_size(lm), v_head_init_strategy, v_head_initializer_range, summary_dropout_prob)
        self.v_head: SummaryHead | ValueHead = head.to(lm.device)
        self.reward_adapter: RewardAdapter | None = None

    def load_heads(self, saved: Mapping[str, Tensor], file: str) -> None:
        """Load the value head of a trainer of this package, of TRL (`v_head.summary`) or of trlX (`v_head.0`).

        Raises:
            ConfigError: If it is a value branch, which has blocks of its own, or does not fit the model.
        """
        if any(name.startswith(("head_tops.value.", "v_head.")) for name in saved):
            raise ConfigError(
                f"{file} has a value branch (method.num_value_layers_unfrozen), which this model has no place for."
            )
        prefix = self.saved_prefix
        value = {name.removeprefix(prefix): part.float() for name, part in saved.items() if name.startswith(prefix)}
        if not value:
            return
        if "summary.weight" not in value:
            if isinstance(self.v_head, SummaryHead) and self.v_head.dropout.p:
                raise ConfigError(f"summary_dropout_prob: the head in {file} has two layers and no dropout.")
            self.v_head = ValueHead(hidden_size(self.pretrained_model)).to(self.pretrained_model.device)
        model = type(self.pretrained_model).__name__
        with raised_as(ConfigError, RuntimeError, f"{file} has a value head that does not fit {model}"):
            self.v_head.load_state_dict(value)

    def add_and_load_reward_modeling_adapter(
        self,
        adapter_model_id: str | Path,
        adapter_name: str = "reward_model_adapter",
        token: str | bool | None = None,
    ) -> None:
        """Load a reward model that is an adapter on the policy's own base model.

        It stays frozen, and only `compute_reward_score` uses it.

        Args:
            adapter_model_id: Folder or hub name of the adapter, in peft's format, with a head `score`.
            adapter_name: The name of the adapter in the model.
            token: The token for a hub repository that is not public.

        Raises:
            ConfigError: If the adapter does not fit or has no head, or if the policy has no adapter of its own:
                training would then change the base that the reward adapter was trained on.
        """
        self.reward_adapter = RewardAdapter(self.pretrained_model, str(adapter_model_id), adapter_name, token)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: Any = None,
        return_past_key_values: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Compute logits, the loss of labels, and values; of an encoder-decoder, at the tokens of the decoder.

        Args:
            input_ids: Token ids, of an encoder-decoder those that the encoder reads; None with `inputs_embeds`. [B, T]
            attention_mask: 1 on real tokens, those in the cache included; None is no padding. [B, T]
            past_key_values: A cache of the tokens before.
            return_past_key_values: Return the cache as well.
            kwargs: Further arguments of the model's forward, such as `labels` and `inputs_embeds`. Without
                `position_ids` padding does not shift positions. An encoder-decoder takes `decoder_input_ids` [B, R],
                which begin with the decoder's start token and may be left out with `labels`,
                `decoder_attention_mask` [B, R] (None is no padding) and `encoder_outputs`.

        Returns:
            Logits in float32 [B, T, V], the loss (None without `labels`), values [B, T], and the cache if asked for.
            With a decoder, T is the number of its tokens.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values, **kwargs}
        inputs = self._completed({name: value for name, value in given.items() if value is not None})
        cached = return_past_key_values or past_key_values is not None
        with last_hidden(self.pretrained_model) as states:
            out = self.pretrained_model(**{"use_cache": cached, **inputs}, return_dict=True)
        outputs = out.logits.float(), out.loss, self.v_head(states[0])
        return (*outputs, out.past_key_values) if return_past_key_values else outputs

    def compute_reward_score(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **decoder: Tensor
    ) -> Tensor:
        """Score sequences with the reward adapter, without gradient and dropout.

        Afterwards the policy's adapter is active again.

        Args:
            input_ids: Token ids, of an encoder-decoder those that the encoder reads. [B, T]
            attention_mask: 1 on real tokens, with padding on either side; None is no padding. [B, T]
            decoder: Of an encoder-decoder, the response as `decoder_input_ids`, beginning with the decoder's start
                token, and if it is padded `decoder_attention_mask`. [B, R]

        Returns:
            The scores at the last real token, of the response if there is a decoder, one per label of the head:
            `scores[:, -1, 0]` are the rewards. TRL returns [B, T, L], the scores of all tokens. [B, 1, L]

        Raises:
            ConfigError: If no reward adapter was loaded.
        """
        if self.reward_adapter is None:
            raise ConfigError("compute_reward_score: there is no reward adapter; add_and_load_reward_modeling_adapter.")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        inputs = self._completed({"input_ids": input_ids, "attention_mask": mask, **decoder})
        real = inputs.get("decoder_attention_mask", mask).bool()
        scores: Tensor = self.reward_adapter(self.pretrained_model, inputs, real)
        return scores[:, None]

    @abstractmethod
    def _completed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Add to the arguments of the model's forward what follows from the others."""


class AutoModelForCausalLMWithValueHead(_WithValueHead):
    """A causal language model with a value head, under the name that TRL uses.

    Args:
        pretrained_model: The language model, or a `PeftModel` around it. Usually `from_pretrained` loads it.
        v_head_init_strategy: "normal" draws the weights of a new head from a normal distribution; None keeps torch's
            own initialisation.
        v_head_initializer_range: The standard deviation of that distribution.
        summary_dropout_prob: The dropout probability of the head; None: no dropout.

    Raises:
        ConfigError: If the model is an encoder-decoder.
    """

    kind = AutoModelForCausalLM

    def _completed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Add position ids that padding does not shift, if the model takes any."""
        mask = inputs.get("attention_mask")
        if mask is None or mask.dim() != 2 or not takes(self.pretrained_model, "position_ids"):
            return inputs
        length = inputs["input_ids" if "input_ids" in inputs else "inputs_embeds"].shape[1]
        return {"position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -length:], **inputs}


class AutoModelForSeq2SeqLMWithValueHead(_WithValueHead):
    """An encoder-decoder with a value head on its decoder, under the name that TRL uses.

    Args:
        pretrained_model: The language model, or a `PeftModel` around it. Usually `from_pretrained` loads it.
        v_head_init_strategy: "normal" draws the weights of a new head from a normal distribution; None keeps torch's
            own initialisation.
        v_head_initializer_range: The standard deviation of that distribution.
        summary_dropout_prob: The dropout probability of the head; None: no dropout.

    Raises:
        ConfigError: If the model is a causal one.
    """

    kind = AutoModelForSeq2SeqLM

    def _completed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Add a mask of the decoder's tokens, because some families take the start for padding."""
        if "decoder_input_ids" not in inputs or "past_key_values" in inputs:
            return inputs
        return {"decoder_attention_mask": torch.ones_like(inputs["decoder_input_ids"]), **inputs}
