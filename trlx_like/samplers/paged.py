"""The engine "paged": generates with the trained model by the continuous batching of transformers.

Prompts are read in pieces beside rows that are being decoded, finished rows make room at once, and keys and values lie
in pages, which rows with the same beginning share. Tokens are drawn here, by the counter of each response, so that the
samples are those of the engine "transformers" up to rounding. Left out on purpose: CUDA graphs and asynchronous batches
of transformers, in which no token could be drawn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

from trlx_like.data import Sampled
from trlx_like.errors import ConfigError, SamplerError
from trlx_like.functional.counter import keys as make_keys, random_stream, uniforms
from trlx_like.samplers.drawing import drawn, refuse_nan, warpers
from trlx_like.samplers.engines import TransformersEngine, neutral, register_engine
from trlx_like.samplers.generation import SAMPLING_ONLY, changed, eos_ids, is_plain
from trlx_like.samplers.stopping import finished_ids


@register_engine("paged")
class PagedEngine(TransformersEngine):
    """Generate with the trained model, by the continuous batching of transformers (engine "paged").

    Args:
        lm: The policy's language model, a decoder.
        tokenizer: Decodes tokens to find stop strings.
        allowed: `allowed[previous, next]` is True if `next` may follow `previous`; None allows all. [V, V] bool
        page_size: Tokens of a page, at least 4.
        num_blocks: Pages of each layer; None: as many as the longest responses of all rows at a time may need. With
            fewer, rows that do not fit wait, and may be computed again.
        max_batch_tokens: Tokens of a forward pass; None: the longest prompt, and at least one for each row.

    Raises:
        ConfigError: If the model is an encoder-decoder, or of a family that continuous batching would not read rightly.
    """

    tells_choices = False

    def __init__(
        self, *args: Any, page_size: int = 256, num_blocks: int | None = None, max_batch_tokens: int | None = None
    ) -> None:
        super().__init__(*args)
        if self.start is not None:
            raise ConfigError("sampler.engine (paged) has no encoder-decoders; use transformers.")
        if not _reads_pages(self.lm):
            family = self.lm.config.get_text_config().model_type
            raise ConfigError(f"sampler.engine (paged) does not serve the family {family}; use transformers or copy.")
        self.page_size, self.num_blocks, self.max_batch_tokens = page_size, num_blocks, max_batch_tokens

    def refills(self, config: GenerationConfig) -> bool:
        """Return True: all prompts are given at once, see `Engine`."""
        return True

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        config: GenerationConfig,
        stop: list[str],
        *,
        keys: Tensor | None = None,
        at_once: int | None = None,
    ) -> Sampled:
        """Generate one response per prompt; the arguments are those of `TransformersEngine.generate`.

        A stop string ends a response after it was generated to its end, as continuous batching knows ids alone.
        """
        if name := changed(config, {*SAMPLING_ONLY, "do_sample"}):
            raise ConfigError(f"method.gen_kwargs.{name}: sampler.engine (paged) has no such option.")
        if keys is None:
            keys = make_keys(random_stream(), range(len(prompt)), prompt.device)
        prompts = [ids[real].tolist() for ids, real in zip(prompt, prompt_mask, strict=True)]
        rows = min(at_once or len(prompts), len(prompts))
        pages = -(-(prompt.shape[1] + (config.max_new_tokens or 0)) // self.page_size)  # rounded up
        options = ContinuousBatchingConfig(
            page_size=self.page_size,
            num_blocks=self.num_blocks or rows * pages,
            max_batch_tokens=max(self.max_batch_tokens or prompt.shape[1], rows),
            max_requests_per_batch=rows,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,  # the learner would compute other numbers
        )
        drawing = _Drawing(self.processors, config, prompts, keys)
        with neutral(self.lm):
            found = self._run(prompts, options, drawing, config)
        refuse_nan(drawing.logprobs.exp())
        made = finished_ids(prompt, prompt_mask, found, config, stop, self.tokenizer)
        if is_plain(config):
            made.sampling_logprobs = drawing.logprobs[:, : made.response.shape[1]]
        return made

    def _run(
        self, prompts: list[list[int]], options: ContinuousBatchingConfig, drawing: _Drawing, config: GenerationConfig
    ) -> list[list[int]]:
        """Return the generated ids of each prompt. All prompts are queued before the first forward pass."""
        take = GenerationConfig(do_sample=False, eos_token_id=-1)  # the one token that `drawing` leaves
        manager = self.lm.init_continuous_batching(take, options)  # type: ignore[operator]
        manager.logit_processor = drawing
        ending = {"max_new_tokens": config.max_new_tokens, "eos_token_id": eos_ids(config)}
        for row, ids in enumerate(prompts):
            manager.add_request(ids, str(row), **ending)
        found: dict[int, list[int]] = {}
        manager.start()
        try:
            while len(found) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.error is None:
                    found[int(result.request_id)] = result.generated_tokens
                elif result is not None or not manager.is_running():
                    error = manager.background_thread_status.fatal_error or (result and result.error)
                    raise SamplerError(f"sampler.engine (paged): continuous batching ended with {error!r}.")
        finally:
            manager.stop(hard_stop=True)
            manager.destroy()
        return [found[row] for row in range(len(prompts))]


def _reads_pages(lm: PreTrainedModel) -> bool:
    """Return whether attention finds its keys and values in pages.

    It does not if it is code of the family's own (GPT-J), if values have another width than keys (`kv_lora_rank`,
    DeepSeek), or in layers that are neither full nor sliding (Llama 4).
    """
    text = lm.config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ())}
    latent = getattr(text, "kv_lora_rank", None) is not None
    return bool(lm._supports_attention_backend) and not latent and kinds <= {"full_attention", "sliding_attention"}


class _Drawing(ContinuousBatchingLogitsProcessorList):
    """Draw the next token of each row by its counter, keep its log-probability, and forbid all other tokens.

    Args:
        processors: Forbid tokens by the one before.
        config: The generation options.
        prompts: The ids of each prompt.
        keys: What the random numbers of each row follow from. [B] int64
    """

    def __init__(
        self, processors: Sequence[LogitsProcessor], config: GenerationConfig, prompts: list[list[int]], keys: Tensor
    ) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.lengths = [len(ids) for ids in prompts]
        self.before = list(processors)
        self.sampled = bool(config.do_sample)
        self.after = warpers(config, keys.device) if self.sampled else []
        count = config.max_new_tokens or 0
        self.uniforms = uniforms(keys, count)
        self.logprobs = torch.zeros(len(prompts), count, device=keys.device)
        self.at: tuple[list[int], list[int]] = ([], [])

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """Note the row and the position of each token that the next forward pass draws."""
        states = [request.state for request in requests_in_batch if request.has_new_token]
        rows = [int(state.request_id) for state in states]
        # Tokens of a row that had to leave the cache are among its initial ones.
        known = [len(state.initial_tokens) + len(state.generated_tokens) for state in states]
        self.at = rows, [count - self.lengths[row] for row, count in zip(rows, known, strict=True)]
        return arg_storage

    def __call__(self, input_ids: Any, scores: Any, logits_processor_args: Any) -> Any:
        """Return scores [N, V] that are 0 for the drawn token and -inf for others. input_ids: the last tokens. [N]"""
        count = len(self.at[0])  # behind them are rows of prompts that are not read to their end
        wanted = scores[:count]
        for processor in [*self.before, *self.after]:
            wanted = processor(input_ids[:count, None], wanted)
        if self.sampled:
            tokens, probabilities = drawn(wanted, self.uniforms[self.at][:, None])
            self.logprobs[self.at] = probabilities[:, 0].log()
        else:
            tokens = wanted.argmax(dim=-1, keepdim=True)
        taken = torch.full_like(scores, -torch.inf)
        taken[:count].scatter_(1, tokens, 0.0)
        return taken
