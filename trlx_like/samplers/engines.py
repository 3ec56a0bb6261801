"""Engines that turn prompts into token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from trlx_like.data import Sampled, padded_right
from trlx_like.functional.digest import Digest
from trlx_like.functional.draw import draw
from trlx_like.models.layout import decoder_start
from trlx_like.registry import Registry
from trlx_like.samplers.cache import growing_cache
from trlx_like.samplers.generation import eos_ids, greedy, is_plain

ENGINES: Registry[Any] = Registry(
    "sampler engine",
    lazy={
        "copy": "trlx_like.samplers.plain_copy:CopyEngine",
        "transformers": "trlx_like.samplers.engines:TransformersEngine",
    },
)
register_engine = ENGINES.register


class Engine(Protocol):
    """What an engine does. Constructed as `Engine(lm, tokenizer, allowed, **sampler.kwargs)`."""

    dtype: torch.dtype | None
    """The format that it keeps weights in on purpose; None: that of the model."""

    def generate(self, prompt: Tensor, prompt_mask: Tensor, config: GenerationConfig, stop: list[str]) -> Sampled:
        """prompt [B, P] left-padded, prompt_mask [B, P] bool -> completions whose responses end with the first EOS
        (kept), or when a `stop` string is complete, or at `config.max_new_tokens`.

        `sampling_logprobs` is what the canary compares with the learner. It may be None where tokens are not drawn from
        softmax(logits / temperature): greedy, or with an option that cuts or bends the distribution.
        """
        ...

    def sync_weights(self, lm: nn.Module) -> None:
        """Brings the engine to the present weights of the language model that learns.

        Called before each round and each evaluation.
        """
        ...

    def digests(self) -> Mapping[str, Digest] | None:
        """Digests of the weights that it generates with, by their names in a model without an adapter, in `dtype`.

        Of what is really there, since this is what finds a mistake in `sync_weights`. None: the model that learns
        itself.
        """
        ...


class AllowedTokens(LogitsProcessor):
    """Takes away the tokens that may not follow the last one: `allowed[previous, next]` is True where it may."""

    def __init__(self, allowed: Tensor) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.allowed = self.allowed.to(scores.device)  # the table is as the user made it, before the model was moved
        return scores.masked_fill(~self.allowed[input_ids[:, -1]], -torch.inf)


class _TokenSampler(LogitsProcessor):
    """Draws each row's next token and leaves it no other, so that it is the likeliest, which generate() then takes."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.probabilities: list[Tensor] = []  # [B, 1] for each token: of the one that was drawn

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        probabilities = (scores / self.temperature).softmax(dim=-1)
        tokens = draw(probabilities)
        self.probabilities.append(probabilities.gather(1, tokens))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


class StopStrings(StoppingCriteria):
    """Ends the rows whose last token completes a stop string. What stands in the prompt is no part of one."""

    def __init__(self, stop: list[str], tokenizer: PreTrainedTokenizerBase, prompt_width: int) -> None:
        self.stop = stop
        self.tokenizer = tokenizer
        self.prompt_width = prompt_width
        # A token is at least a byte. Those in excess are for decoders that change the first word of a text.
        self.longest = max(len(string.encode()) for string in stop) + 4

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        recent = input_ids[:, max(self.prompt_width, input_ids.shape[1] - self.longest) :]
        return torch.tensor([self.complete(ids) for ids in recent.tolist()], device=input_ids.device)

    def complete(self, ids: list[int]) -> bool:
        text = self.tokenizer.decode(ids[-self.longest :])
        return any(string in text for string in self.stop)

    def lengths(self, response: Tensor, lengths: Tensor) -> Tensor:
        """Tokens until the first stop string is complete, for each row; `lengths` [B] where there is none."""
        rows = zip(response.tolist(), lengths.tolist(), strict=True)
        found = [next((n for n in range(1, end) if self.complete(ids[:n])), end) for ids, end in rows]
        return torch.tensor(found, device=response.device)


class TransformersEngine:
    """`transformers`' own generate(), with the model that is trained: its weights are always the present ones."""

    dtype: torch.dtype | None = None

    def __init__(self, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, allowed: Tensor | None = None) -> None:
        self.lm = lm
        self.tokenizer = tokenizer
        self.start = decoder_start(lm)
        self.processors: list[LogitsProcessor] = [] if allowed is None else [AllowedTokens(allowed)]

    def sync_weights(self, lm: nn.Module) -> None:
        return

    def digests(self) -> Mapping[str, Digest] | None:
        return None

    def generate(self, prompt: Tensor, prompt_mask: Tensor, config: GenerationConfig, stop: list[str]) -> Sampled:
        return self.generate_with([], prompt, prompt_mask, config, stop)

    @torch.no_grad()
    def generate_with(
        self,
        processors: Sequence[LogitsProcessor],
        prompt: Tensor,
        prompt_mask: Tensor,
        config: GenerationConfig,
        stop: list[str],
    ) -> Sampled:
        """`generate` with further logits processors, after the allowed tokens: what is forbidden stays so."""
        ids, mask, before = prompt, prompt_mask, prompt.shape[1]  # before: columns of the result before a response
        if self.start is not None:
            ids, mask = padded_right(prompt, prompt_mask)
            before = 1
            config = GenerationConfig(**{**config.to_dict(), "decoder_start_token_id": self.start})
        cache = token_sampler = None
        if is_plain(config):
            token_sampler = _TokenSampler(config.temperature)
            processors, config = [*processors, token_sampler], greedy(config)
            cache = growing_cache(self.lm, config, before + config.max_new_tokens)
        stops = StopStrings(stop, self.tokenizer, before) if stop else None
        # Inference mode costs less than no_grad does for each of a small model's many operations.
        with _neutral(self.lm), torch.inference_mode():
            ids = self.lm.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask.long(),
                generation_config=config,
                **({} if cache is None else {"past_key_values": cache}),
                logits_processor=LogitsProcessorList([*self.processors, *processors]),
                stopping_criteria=StoppingCriteriaList([] if stops is None else [stops]),
            )
        response = ids[:, before:].clone()  # [B, R], out of inference mode: a loss may keep it
        lengths = ends(response, eos_ids(config))
        if stops is not None:
            lengths = stops.lengths(response, lengths)
        response = response[:, : int(lengths.max())]
        mask = torch.arange(response.shape[1], device=response.device) < lengths[:, None]
        if token_sampler is None:
            return Sampled(prompt, prompt_mask, response, mask)
        probabilities = torch.cat(token_sampler.probabilities, dim=1)[:, : response.shape[1]]
        return Sampled(prompt, prompt_mask, response, mask, probabilities.log())


@contextmanager
def _neutral(lm: PreTrainedModel) -> Iterator[None]:
    """The model without what would change how it generates, or what it says about it.

    In evaluation mode, since there would be dropout otherwise, and no KV cache under gradient checkpointing. Without
    generation defaults of its own, which would fill every option that is not set. Without a pad id: generate() drops
    a mask that is all ones, and some families then take the padding of finished rows for input without a mask.
    """
    config = lm.config.get_text_config()
    was_training, defaults, pad = lm.training, lm.generation_config, config.pad_token_id
    lm.eval()
    lm.generation_config, config.pad_token_id = GenerationConfig(), None
    try:
        yield
    finally:
        lm.generation_config, config.pad_token_id = defaults, pad
        lm.train(was_training)


def ends(response: Tensor, eos: list[int]) -> Tensor:
    """Tokens of each row up to its first EOS, that one counted; all of them where there is none. [B, R] -> [B]"""
    is_eos = torch.isin(response, torch.tensor(eos, device=response.device, dtype=response.dtype))
    first = is_eos.long().argmax(dim=1) + 1
    return torch.where(is_eos.any(dim=1), first, response.shape[1])
