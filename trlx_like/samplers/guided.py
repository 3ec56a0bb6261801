"""Value-guided decoding of ILQL: `generate()` of transformers on log pi + beta (min target Q - V)."""

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
    """Add beta times the advantage of each token to the logits [B, V]; a logits processor of transformers.

    `generate()` applies temperature, top-k and top-p afterwards.

    Args:
        heads: The ILQL heads that compute Q and V.
        beta: The weight of the advantage, in nats per unit of reward.
    """

    def __init__(self, heads: ILQLHeads, beta: float) -> None:
        self.heads = heads
        self.beta = beta
        self.hidden: Tensor | None = None  # [B, T, H], of the model's last forward

    def keep(self, module: nn.Module, args: Any, output: Any) -> None:
        """Store the last hidden states of a forward pass. A forward hook of `last_hidden_module(lm)`."""
        self.hidden = output.last_hidden_state

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Add the scaled advantages, computed from the hidden states that the logits were made of."""
        assert self.hidden is not None
        state = self.hidden[:, -1]  # [B, H]
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
    guide = AdvantageGuide(heads, beta)
    handle = last_hidden_module(lm).register_forward_hook(guide.keep)
    try:
        yield [guide]
    finally:
        handle.remove()


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
        """Generate one response per prompt, see `Engine.generate`. beta: the weight of the advantage."""
        with guidance(self.lm, self.heads, beta) as guide:
            return self.generate_with(guide, prompt, prompt_mask, config, stop)


class _WithILQLHeads(nn.Module):
    """A language model with ILQL heads, which guide its decoding."""

    kind: ClassVar[Any]

    def __init__(self, lm: PreTrainedModel, heads: ILQLHeads) -> None:
        super().__init__()
        self.base_model = lm
        self.ilql_heads = heads

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> Self:
        """Load the model and the heads that an `ILQLTrainer` exported with `save_pretrained`.

        Args:
            path: The exported folder.
            kwargs: Passed to `from_pretrained` of transformers.

        Returns:
            The model with its heads.

        Raises:
            ConfigError: If the folder has no ILQL heads.
        """
        heads = load_ilql_heads(path)
        if heads is None:
            raise ConfigError(f"{path} has no ILQL heads: they are in {HEADS_FILE} of what an ILQLTrainer saved.")
        with no_progress_bars():
            return cls(cls.kind.from_pretrained(str(path), **kwargs), heads)

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
        with guidance(self.base_model, self.ilql_heads, beta) as guide:
            given = [*options.pop("logits_processor", []), *guide]
            ids: Tensor = self.base_model.generate(  # type: ignore[operator]
                input_ids, logits_processor=LogitsProcessorList(given), **options
            )
        return ids


class AutoModelForCausalLMWithILQLHeads(_WithILQLHeads):
    """A causal language model with value-guided decoding, under the name that trlX uses."""

    kind = AutoModelForCausalLM


class AutoModelForSeq2SeqLMWithILQLHeads(_WithILQLHeads):
    """An encoder-decoder with value-guided decoding, under the name that trlX uses."""

    kind = AutoModelForSeq2SeqLM


def load_ilql_heads(path: str | Path) -> ILQLHeads | None:
    """Load the ILQL heads of an exported folder.

    Args:
        path: The folder.

    Returns:
        The heads in evaluation mode, or None if the folder has none.
    """
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
