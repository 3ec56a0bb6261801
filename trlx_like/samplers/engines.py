"""Sampling engines, which turn prompts into responses, as token ids.

`Engine` defines the interface. The built-in engines are "transformers" (here), "copy", "paged", "vllm" and
"vllm_colocated".
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from trlx_like.data import Sampled, padded_right
from trlx_like.errors import ConfigError
from trlx_like.functional.choices import by_row
from trlx_like.functional.counter import keys as make_keys, random_stream
from trlx_like.functional.digest import Digest
from trlx_like.models.dropout import evaluating
from trlx_like.models.layout import decoder_start
from trlx_like.registry import Registry
from trlx_like.samplers.attention import attention_for_decoding
from trlx_like.samplers.decode import Decoding, needs_generate
from trlx_like.samplers.drawing import TokenSampler, draws_token_by_token, refuse_nan, warpers
from trlx_like.samplers.generation import asks_for_tokens, greedy, is_exact, is_plain
from trlx_like.samplers.lean import lean
from trlx_like.samplers.recorded import Steps, together
from trlx_like.samplers.stopping import StopStrings, finished

logger = logging.getLogger(__name__)

ENGINES: Registry[Any] = Registry(
    "sampler engine",
    option="sampler.engine",
    lazy={
        "copy": "trlx_like.samplers.plain_copy:CopyEngine",
        "paged": "trlx_like.samplers.paged:PagedEngine",
        "transformers": "trlx_like.samplers.engines:TransformersEngine",
        "vllm": "trlx_like.samplers.vllm:VLLMEngine",
        "vllm_colocated": "trlx_like.samplers.vllm_colocated:ColocatedVLLM",
    },
)
register_engine = ENGINES.register


class Engine(Protocol):
    """Define the interface of a sampling engine, which generates responses and keeps its weights equal to the policy's.

    Write one to sample with other software, such as vLLM or a server. Register the class with
    `@register_engine("my_engine")`; the YAML then chooses it with `sampler.engine: my_engine`. Every process makes its
    own engine, as `MyEngine(lm, tokenizer, allowed, **sampler.kwargs)`:

    - `lm`: the policy's `PreTrainedModel`. It may be on the CPU still; it is moved to the training device later. With
      LoRA the adapter layers are inside it.
    - `tokenizer`: the tokenizer of the run, to find stop strings.
    - `allowed`: None, or a table [V, V] bool: `allowed[previous, next]` is True if `next` may follow `previous`. An
      engine that cannot forbid tokens must raise `ConfigError` for a table.
    - `sampler.kwargs` of the configuration: the engine's own options. A TypeError for an unknown one is reported as an
      error of the configuration.

    The optional attribute `options` names keywords of `generate` beyond those below, such as `("beta",)`. They may then
    be set in `method.gen_kwargs`, and are passed to `generate` instead of into `config`.

    With the optional attribute `keyed = True`, `generate` gets the keyword `keys` [B] int64, and all random numbers of
    a response should follow from its key: `trlx_like.functional.counter` has a generator, and an engine that takes a
    seed for each request can use the key. Then a response does not depend on the others in its batch, and a run does
    not depend on the number of processes. Other engines should draw from torch's global generators, which are seeded
    for each call, or from one seeded by them. A resumed run then samples what the uninterrupted run would have.

    With the optional attribute `tells_choices = True`, `generate` gets the keyword `choices`: True if the result must
    say which tokens could be drawn, in the fields `choices` and `choice_sizes` that `encode` and `by_row` of
    `trlx_like.functional.choices` make. Without it, options that forbid tokens, such as `top_k`, are refused for
    experience of trainers with a policy loss.

    With the optional method `refills(config)`, an engine for which it returns True gets all prompts in one call, and
    with the keyword `at_once` how many it may work on at a time: `sampler.batch_size`. Other engines get so many.

    The optional method `sleep()` is called on every process when a round or an evaluation is sampled and scored: give
    memory back that nothing needs before the next `sync_weights`.
    """

    dtype: torch.dtype | None
    """The number format of the engine's weights, if it differs from the policy's on purpose; None if not."""

    def generate(self, prompt: Tensor, prompt_mask: Tensor, config: GenerationConfig, stop: list[str]) -> Sampled:
        """Generate one response per prompt.

        Prompts are on the training device, and results must be there too. Processes call this independently of each
        other and a different number of times, so it must not wait for other processes.

        The result is `trlx_like.data.Sampled(prompt, prompt_mask, response, mask, sampling_logprobs, version)`:

        - `prompt`, `prompt_mask`: as they were given.
        - `response` [B, R] int64: padded on the right to the longest one. Each has at least one token, and ends
          with its first EOS (included), with the token that completes a stop string, or after `max_new_tokens`.
        - `mask` [B, R] bool: True on the response tokens, the EOS included.
        - `sampling_logprobs` [B, R] float32: the log-probability of each token when it was sampled, temperature
          and `allowed` applied. It is compared with the learner's in every round. It may be None for greedy
          decoding, and for options that change the distribution. If tokens were forbidden, by `top_k` for example, it
          may be given with `choices` only.
        - `version` [B] int64: the version of the weights that each response was sampled with, as `sync_weights` got it.
          A round with another version than the present one is refused. None if the engine generates with `lm` itself.

        Args:
            prompt: Prompt token ids, padded on the left. [B, P] int64
            prompt_mask: True on real prompt tokens. Never infer it from the ids, as the pad token may be the EOS.
                [B, P] bool
            config: The generation options. The most important are `max_new_tokens`, `do_sample` (False is greedy
                decoding), `temperature`, `eos_token_id` (None, one id or a list) and `pad_token_id`; `is_plain(config)`
                of `samplers/generation.py` says whether tokens are simply sampled from softmax(logits / temperature),
                which without `tells_choices` is always the case for experience of trainers with a policy loss. Others
                may be set for evaluation: raise `ConfigError` for an option that the engine does not have.
            stop: Strings that end a response. One that only occurs in the prompt ends nothing.

        Returns:
            The responses, as described above.
        """

    def sync_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Load the present weights of the policy into the engine.

        Called before every round of experience and every evaluation, on every process. An engine that reads the weights
        on one process only has to exhaust the iterator on all. Do nothing if the engine generates with `lm` itself.

        Args:
            weights: Every weight of the policy by its name in the model without an adapter, adapters merged, whole on
                every process. A weight that layers share comes once. Each tensor is only valid until the next.
            version: The number of optimizer steps that these weights have.

        Raises:
            SamplerError: If the weights cannot be delivered. It then stops all processes.
        """

    def digests(self) -> Mapping[str, Digest] | None:
        """Compute checksums of the weights that the engine generates with, to detect mistakes of `sync_weights`.

        Called in every round before anything is learned. The run stops if they are not those of the policy's weights in
        `dtype`. Take them of the memory that generation really reads, not of what was sent.

        Returns:
            For each weight, by its name in the model without an adapter, `trlx_like.functional.digest.digest(weight)`.
            None: the engine generates with the trained model itself, so there is nothing to compare, or cannot read its
            weights. Then the version and the log-probabilities are the judges. An engine may also leave the method out.
        """


def check_engine(name: str, engine: Any) -> None:
    """Raise ConfigError for an engine whose `sync_weights` does not take `weights` and `version`."""
    if list(inspect.signature(engine.sync_weights).parameters)[:2] != ["weights", "version"]:
        raise ConfigError(
            f"sampler.engine ({name}): sync_weights must take (weights, version): pairs of name and tensor, adapters "
            "merged, and the number of optimizer steps that they have."
        )


class AllowedTokens(LogitsProcessor):
    """Forbid tokens by the previous token; a logits processor of transformers.

    Args:
        allowed: `allowed[previous, next]` is True if `next` may follow `previous`. [V, V] bool
    """

    def __init__(self, allowed: Tensor) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Set the logits of forbidden tokens to -inf."""
        self.allowed = self.allowed.to(scores.device)  # the model may have been moved since the table was made
        return scores.masked_fill(~self.allowed[input_ids[:, -1]], -torch.inf)


class TransformersEngine:
    """Generate with the trained model itself, so its weights are always current (engine "transformers").

    Args:
        lm: The policy's language model.
        tokenizer: Decodes tokens to find stop strings.
        allowed: `allowed[previous, next]` is True if `next` may follow `previous`; None allows all. [V, V] bool
    """

    dtype: torch.dtype | None = None
    keyed = True
    tells_choices = True

    def __init__(self, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, allowed: Tensor | None = None) -> None:
        self.lm = lm
        self.tokenizer = tokenizer
        self.start, self.steps = decoder_start(lm), Steps(lm)
        self.processors: list[LogitsProcessor] = [] if allowed is None else [AllowedTokens(allowed)]

    def sync_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Do nothing: the engine generates with the trained model itself."""
        return

    def digests(self) -> Mapping[str, Digest] | None:
        """Return None: there is no second set of weights to compare."""
        return None

    def refills(self, config: GenerationConfig) -> bool:
        """Return whether new prompts take the place of finished rows, see `Engine`."""
        return needs_generate(self.lm, config) is None

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        config: GenerationConfig,
        stop: list[str],
        *,
        keys: Tensor | None = None,
        choices: bool = False,
        at_once: int | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> Sampled:
        """Generate one response per prompt.

        Args:
            prompt: As in `Engine.generate`. [B, P]
            prompt_mask: As in `Engine.generate`. [B, P] bool
            config: As in `Engine.generate`.
            stop: As in `Engine.generate`.
            keys: What the random numbers of each response follow from; None draws them with torch's global generator.
                [B] int64
            choices: Whether to tell which tokens could be drawn.
            at_once: The most prompts in a batch, if the engine `refills` it; None is all.
            processors: Further logits processors, applied after the table of allowed tokens, so that forbidden tokens
                stay forbidden.

        Returns:
            As `Engine.generate`.
        """
        if keys is None:
            keys = make_keys(random_stream(), range(len(prompt)), prompt.device)
        plain = is_plain(config)
        tell = choices and is_exact(config)
        if not (reason := needs_generate(self.lm, config)):
            config.validate()
            completes = StopStrings(stop, self.tokenizer, 0).complete if stop else None
            all_processors = [*self.processors, *processors]
            decoding = Decoding(
                self.lm, prompt, prompt_mask, config, keys, all_processors, completes, tell, at_once, self.steps
            )
            with (
                neutral(self.lm),
                attention_for_decoding(self.lm, decoding.cache),
                self.steps.ready(),
                lean(self.lm),
                torch.inference_mode(),
            ):
                decoding.run()
            return decoding.sampled(tell or plain)
        logger.debug("generate() of transformers writes the responses, because of %s.", reason)
        ids, mask, before = prompt, prompt_mask, prompt.shape[1]  # before: columns before the response
        if self.start is not None:
            ids, mask = padded_right(prompt, prompt_mask)
            before = 1
            config = GenerationConfig(**{**config.to_dict(), "decoder_start_token_id": self.start})
        if asks_for_tokens(config):  # of padding too, which therefore repeats the first token of its row
            ids = ids.where(mask, ids.gather(1, mask.long().argmax(dim=1, keepdim=True)))
        token_sampler = None
        if draws_token_by_token(config):
            token_sampler = TokenSampler(keys, tell)
            processors, config = [*processors, *warpers(config, ids.device), token_sampler], greedy(config)
        stops = StopStrings(stop, self.tokenizer, before) if stop else None
        # Inference mode has less overhead per operation than no_grad, which matters for small models.
        with neutral(self.lm), torch.inference_mode():
            ids = self.lm.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask.long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([*self.processors, *processors]),
                stopping_criteria=StoppingCriteriaList([] if stops is None else [stops]),
            )
        response = ids[:, before:].clone()  # [B, R], a clone made outside inference mode, so that a loss may use it
        made = finished(prompt, prompt_mask, response, config, stops)
        if token_sampler is not None:
            probabilities = torch.cat(token_sampler.probabilities, dim=1)[:, : made.response.shape[1]]
            refuse_nan(probabilities)
        if token_sampler is not None and (tell or plain):
            made.sampling_logprobs = probabilities.log()
            if token_sampler.choices is not None:
                made.choices, made.choice_sizes = by_row(token_sampler.choices, made.mask)
        return made


@contextmanager
def neutral(lm: PreTrainedModel) -> Iterator[None]:
    """Remove everything from a model that would change how it generates, for the duration of a block.

    The model is in evaluation mode (no dropout, and a KV cache even with gradient checkpointing), without generation
    defaults of its own (they would replace options that are not set), and a decoder without a pad id: `generate()`
    drops a mask of ones, and some families then take the padding of finished rows for unmasked input. An encoder may
    need it: LED pads its input to whole windows.
    """
    config = lm.config.get_text_config()
    defaults, pad = lm.generation_config, config.pad_token_id
    lm.generation_config = GenerationConfig()
    if not lm.config.is_encoder_decoder:
        vars(config)["pad_token_id"] = None  # `setattr` checks types, and ModernBERT's must be a number
    close = lm.get_output_embeddings().register_forward_pre_hook(together)
    try:
        with close, evaluating(lm):
            yield
    finally:
        lm.generation_config = defaults
        vars(config)["pad_token_id"] = pad
