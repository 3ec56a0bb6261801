"""Value-guided decoding of ILQL: `generate()` of transformers on log pi + beta (min target Q - V)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from trlx_like.data import Sampled
from trlx_like.functional.q_learning import guided_logits
from trlx_like.models.heads import ILQLHeads
from trlx_like.models.layout import hidden_size, last_hidden, vocabulary_size
from trlx_like.models.saved_heads import HEADS_FILE
from trlx_like.models.wrapper import PreTrainedModelWrapper
from trlx_like.samplers.engines import TransformersEngine

logger = logging.getLogger(__name__)

_PREFIX = "heads.ilql."
"""Beginning of the names of ILQL heads in a heads file."""


class AdvantageGuide(LogitsProcessor):
    """Add beta times the advantage of each token to the logits [B, V]; a logits processor of transformers.

    `generate()` applies temperature, top-k and top-p afterwards.

    Args:
        heads: The ILQL heads that compute Q and V.
        beta: The weight of the advantage, in nats per unit of reward.
        hidden: The last hidden states of the model's newest forward pass, see `last_hidden`. [B, T, H]
    """

    def __init__(self, heads: ILQLHeads, beta: float, hidden: list[Tensor]) -> None:
        self.heads = heads
        self.beta = beta
        self.hidden = hidden

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Add the scaled advantages, computed from the hidden states that the logits were made of."""
        state = self.hidden[0][:, -1]  # [B, H]
        return guided_logits(scores, self.heads.target_q(state), self.heads.value(state), self.beta)


@contextmanager
def guidance(lm: PreTrainedModel, heads: ILQLHeads, beta: float) -> Iterator[list[LogitsProcessor]]:
    """Hook a model so that the yielded logits processors guide its `generate()`, for the duration of a block.

    Args:
        lm: The language model.
        heads: The ILQL heads.
        beta: The weight of the advantage; with 0 there is no processor, and the model generates as it is.

    Yields:
        The processors, to be passed as `logits_processor`.
    """
    if beta == 0:
        yield []
        return
    with last_hidden(lm) as hidden:
        yield [AdvantageGuide(heads, beta, hidden)]


class GuidedEngine(TransformersEngine):
    """Generate with value-guided decoding, for ILQL; otherwise as `TransformersEngine`.

    Its option `beta` in `method.gen_kwargs` is the weight of the advantage; without it, the policy alone decodes.

    Args:
        lm: The policy's language model.
        tokenizer: Decodes tokens to find stop strings.
        allowed: `allowed[previous, next]` is True if `next` may follow `previous`; None allows all. [V, V] bool
        heads: The ILQL heads.
    """

    options = ("beta",)

    def __init__(self, *args: Any, heads: ILQLHeads) -> None:
        super().__init__(*args)
        self.heads = heads

    def generate(self, *args: Any, beta: float = 0.0, **options: Any) -> Sampled:
        """Generate one response per prompt, see `TransformersEngine.generate`. beta: the weight of the advantage."""
        with guidance(self.lm, self.heads, beta) as guide:
            return super().generate(*args, processors=guide, **options)


class _WithILQLHeads(PreTrainedModelWrapper):
    """A language model with ILQL heads, which guide its decoding.

    Args:
        pretrained_model: The language model, or a `PeftModel` around it.
        heads: Its ILQL heads; None makes new ones, which guide to nothing before they are trained.
        two_qs: Whether new heads have two Qs, of which the minimum is taken.

    Raises:
        ConfigError: For a model of the other kind, causal or encoder-decoder.
    """

    head_prefix = "ilql_heads."
    saved_prefix = _PREFIX
    head_options = ("two_qs",)
    refused: ClassVar[Mapping[str, str]] = {
        **PreTrainedModelWrapper.refused,
        "alpha": "it is an argument of ilql_heads.sync",
    }

    def __init__(
        self, pretrained_model: Any, heads: ILQLHeads | None = None, *, two_qs: bool = True, **others: Any
    ) -> None:
        super().__init__(pretrained_model, **others)
        lm = self.pretrained_model
        made = ILQLHeads(hidden_size(lm), vocabulary_size(lm), two_qs) if heads is None else heads
        self.ilql_heads = made.to(lm.device)

    @property
    def base_model(self) -> PreTrainedModel:
        """The language model, under the name that trlX uses."""
        return self.pretrained_model

    def load_heads(self, saved: Mapping[str, Tensor], file: str) -> None:
        """Load the heads that an `ILQLTrainer` or `save_pretrained` wrote, or warn that there are none."""
        heads = _heads_of(saved)
        if heads is not None:
            self.ilql_heads = heads.to(self.pretrained_model.device)
        else:
            logger.warning("%s: no ILQL heads were saved with the model; new ones are made.", type(self).__name__)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        states_ixs: Tensor | None = None,
        actions_ixs: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Any]:
        """Compute logits, Q, target Q and V.

        Args:
            input_ids: Token ids; of an encoder-decoder, those of the encoder. [B, T]
            attention_mask: 1 on real tokens; None is no padding. [B, T]
            states_ixs: Positions at which V is computed; None: all. [B, S]
            actions_ixs: Positions at which Q is computed; None: all. [B, A]
            kwargs: Further arguments of the model's forward, such as `position_ids` and `decoder_input_ids`.

        Returns:
            Logits [B, T, V], each Q [B, A, V], each target Q [B, A, V], V [B, S, 1], and the cache if there is one.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        with last_hidden(self.pretrained_model) as states:
            out = self.pretrained_model(**{name: value for name, value in given.items() if value is not None})
        at_actions, at_states = _at(states[0], actions_ixs), _at(states[0], states_ixs)
        heads = self.ilql_heads
        with torch.no_grad():
            targets = tuple(target(at_actions) for target in heads.targets)
        qs = tuple(q(at_actions) for q in heads.qs)
        return out.logits, qs, targets, heads.value(at_states)[..., None], out.past_key_values

    @torch.no_grad()
    def generate(self, input_ids: Tensor, *, beta: float = 1.0, **options: Any) -> Tensor:
        """Generate with value guidance.

        Args:
            input_ids: Prompt token ids, padded on the left. [B, P]
            beta: The weight of the advantage; 0 is the language model alone.
            options: Options of `generate()` of transformers, such as `attention_mask` and `max_new_tokens`.

        Returns:
            Prompts and responses [B, P + R]; of an encoder-decoder, the decoder's tokens only.
        """
        with guidance(self.pretrained_model, self.ilql_heads, beta) as guide:
            given = [*options.pop("logits_processor", []), *guide]
            ids: Tensor = self.pretrained_model.generate(  # type: ignore[operator]
                input_ids, logits_processor=LogitsProcessorList(given), **options
            )
        return ids


class AutoModelForCausalLMWithILQLHeads(_WithILQLHeads):
    """A causal language model with value-guided decoding, under the name that trlX uses."""

    kind = AutoModelForCausalLM


class AutoModelForSeq2SeqLMWithILQLHeads(_WithILQLHeads):
    """An encoder-decoder with value-guided decoding, under the name that trlX uses."""

    kind = AutoModelForSeq2SeqLM


def _at(hidden: Tensor, places: Tensor | None) -> Tensor:
    """Return the states [B, N, H] at positions [B, N] of [B, T, H]; without positions, all."""
    if places is None:
        return hidden
    return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))


def load_ilql_heads(path: str | Path) -> ILQLHeads | None:
    """Load the ILQL heads of an exported folder.

    Args:
        path: The folder.

    Returns:
        The heads in evaluation mode, or None if the folder has none.
    """
    file = Path(path) / HEADS_FILE
    return _heads_of(load_file(file) if file.is_file() else {})


def _heads_of(saved: Mapping[str, Tensor]) -> ILQLHeads | None:
    """Make ILQL heads of the weights of a heads file; None if it has none."""
    weights = {name.removeprefix(_PREFIX): value for name, value in saved.items() if name.startswith(_PREFIX)}
    if not weights:
        return None
    hidden_size, vocabulary = weights["value.layers.0.weight"].shape[1], len(weights["qs.0.layers.2.bias"])
    heads = ILQLHeads(hidden_size, vocabulary, two_qs="qs.1.layers.2.bias" in weights)
    heads.load_state_dict(weights)
    return heads.eval()
