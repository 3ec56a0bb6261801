"""Decoding that values guide (ILQL): transformers' own generate() on log pi + beta (min target Q - V)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trlx_like.data import Sampled
from trlx_like.errors import ConfigError
from trlx_like.functional.q_learning import guided_logits
from trlx_like.models import HEADS_FILE, ILQLHeads, last_hidden_module, no_progress_bars
from trlx_like.samplers.engines import TransformersEngine


class AdvantageGuide(LogitsProcessor):
    """Shifts the logits [B, V] of a step by beta times the advantage of each token.

    Temperature, top-k and top-p come after it, as generate() applies them.
    """

    def __init__(self, heads: ILQLHeads, beta: float) -> None:
        self.heads = heads
        self.beta = beta
        self.hidden: Tensor | None = None  # [B, T, H], of the model's last forward

    def keep(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook that brings the hidden states that logits are made of."""
        self.hidden = output.last_hidden_state

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        assert self.hidden is not None
        state = self.hidden[:, -1]  # [B, H]
        return guided_logits(scores, self.heads.target_q(state), self.heads.value(state), self.beta)


@contextmanager
def guidance(lm: PreTrainedModel, heads: ILQLHeads, beta: float) -> Iterator[list[LogitsProcessor]]:
    """The processors for `lm.generate` that guide it; none for beta 0, which is the model itself."""
    if beta == 0:
        yield []
        return
    guide = AdvantageGuide(heads, beta)
    handle = last_hidden_module(lm).register_forward_hook(guide.keep)
    try:
        yield [guide]
    finally:
        handle.remove()


class GuidedEngine(TransformersEngine):
    """`TransformersEngine` with one more option, `beta`: the weight of the advantage, 0 where it is not given."""

    options = ("beta",)

    def __init__(
        self,
        lm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        allowed: Tensor | None = None,
        *,
        heads: ILQLHeads,
    ) -> None:
        super().__init__(lm, tokenizer, allowed)
        self.heads = heads

    def generate(
        self, prompt: Tensor, prompt_mask: Tensor, config: GenerationConfig, stop: list[str], *, beta: float = 0.0
    ) -> Sampled:
        with guidance(self.lm, self.heads, beta) as guide:
            return self.generate_with(guide, prompt, prompt_mask, config, stop)


class _WithILQLHeads(nn.Module):
    """A language model with the heads that an ILQL trainer exported beside it."""

    kind: ClassVar[Any]

    def __init__(self, lm: PreTrainedModel, heads: ILQLHeads) -> None:
        super().__init__()
        self.base_model = lm
        self.ilql_heads = heads

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> Self:
        """From the folder that `save_pretrained` of an `ILQLTrainer` wrote. ConfigError for one without ILQL heads."""
        heads = load_ilql_heads(path)
        if heads is None:
            raise ConfigError(f"{path} has no ILQL heads: they are in {HEADS_FILE} of what an ILQLTrainer saved.")
        with no_progress_bars():
            return cls(cls.kind.from_pretrained(str(path), **kwargs), heads)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, *, beta: float = 1.0, **options: Any) -> Tensor:
        """transformers' generate() with its options, guided.

        Ids [B, P + R] from left-padded prompts [B, P]; those of an encoder-decoder are the decoder's alone.
        """
        with guidance(self.base_model, self.ilql_heads, beta) as guide:
            given = [*options.pop("logits_processor", []), *guide]
            ids: Tensor = self.base_model.generate(  # type: ignore[operator]
                input_ids, logits_processor=LogitsProcessorList(given), **options
            )
        return ids


class AutoModelForCausalLMWithILQLHeads(_WithILQLHeads):
    """A causal language model with ILQL heads (the name trlX's users know)."""

    kind = AutoModelForCausalLM


class AutoModelForSeq2SeqLMWithILQLHeads(_WithILQLHeads):
    """An encoder-decoder with ILQL heads on its decoder (the name trlX's users know)."""

    kind = AutoModelForSeq2SeqLM


def load_ilql_heads(path: str | Path) -> ILQLHeads | None:
    """The heads in an exported folder; None where there are none."""
    file = Path(path) / HEADS_FILE
    prefix = "heads.ilql."
    saved = load_file(file) if file.is_file() else {}
    weights = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
    if not weights:
        return None
    hidden_size, vocabulary = weights["value.layers.0.weight"].shape[1], len(weights["qs.0.layers.2.bias"])
    heads = ILQLHeads(hidden_size, vocabulary, two_qs="qs.1.layers.2.bias" in weights)
    heads.load_state_dict(weights)
    return heads.eval()
