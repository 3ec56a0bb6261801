"""The engine "vllm": generates on servers of vLLM, which run beside the training, on this machine or on others.

    sampler:
      engine: vllm
      kwargs: {url: "http://node2:8000", folder: /shared/weights}

Weights travel as safetensors through a folder that trainer and servers share; vLLM reloads them in place. Every
completion comes with the version of its weights, which vLLM keeps. Left out on purpose: transfers over NCCL.
`VLLMBase` is what this engine shares with the one in `vllm_colocated.py`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import PartialState
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from trlx_like.data import Sampled
from trlx_like.data.experience import padded_rows
from trlx_like.errors import ConfigError, SamplerError
from trlx_like.rewards.awaiting import run_async
from trlx_like.rewards.transport import Post, Transport, check_url
from trlx_like.samplers.engines import register_engine
from trlx_like.samplers.generation import changed, eos_ids, is_plain
from trlx_like.samplers.plain_copy import DTYPES
from trlx_like.samplers.stopping import finished_ids

OPTION = "sampler.kwargs"
SHARD = 2**30
"""Bytes of weights that are kept in memory and written into one file."""
UNKNOWN = -1
"""The version of weights that this run has not sent."""
Answer = tuple[list[int], list[float], int]
"""Token ids of a completion, their log-probabilities, and the version of the weights."""
_SAME_HERE = ("do_sample", "top_k", "top_p", "min_p", "repetition_penalty")
"""Options of transformers that change the distribution, and that vLLM has under the same name."""


class VLLMBase(ABC):
    """Generate with vLLM, wherever it runs: what requests contain, and what becomes of completions.

    Args:
        lm: The policy's language model.
        tokenizer: Decodes tokens to find stop strings.
        allowed: Must be None: vLLM cannot forbid tokens.
        dtype: The number format in which vLLM computes, if it is not the model's.

    Raises:
        ConfigError: For a table of allowed tokens, an encoder-decoder, or an unknown number format.
    """

    keyed = True

    def __init__(
        self, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, allowed: Tensor | None, dtype: str | None
    ) -> None:
        if allowed is not None:
            raise ConfigError("logit_mask: sampler.engine (vllm) cannot forbid tokens; use transformers or copy.")
        if lm.config.is_encoder_decoder:
            raise ConfigError("sampler.engine (vllm) generates with causal models only; use transformers or copy.")
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"{OPTION}.dtype ({dtype!r}) must be one of {', '.join(DTYPES)}.")
        self.tokenizer = tokenizer
        self.dtype = None if dtype is None else DTYPES[dtype]
        self.version = UNKNOWN
        self.shared = _shared_names(lm)

    def named(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Iterate over weights by the names that vLLM reads: one that layers share comes under each of its names."""
        for name, weight in weights:
            for own in (name, *self.shared.get(name, ())):
                yield own, weight

    @abstractmethod
    def complete(self, prompts: list[list[int]], params: dict[str, Any], seeds: list[int]) -> list[Answer]:
        """Generate one response per prompt.

        Args:
            prompts: Token ids.
            params: vLLM's `SamplingParams` of all prompts, without the seed.
            seeds: The seed of each response.
        """

    def generate(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        config: GenerationConfig,
        stop: list[str],
        *,
        keys: Tensor | None = None,
    ) -> Sampled:
        """Generate one response per prompt, see `Engine.generate`. keys: what random numbers follow from. [B] int64"""
        params = self._params(config, stop)
        seeds = torch.randint(2**62, (len(prompt),)) if keys is None else keys & (2**62 - 1)
        prompts = [ids[real].tolist() for ids, real in zip(prompt, prompt_mask, strict=True)]
        answers = self.complete(prompts, params, seeds.tolist())
        made = finished_ids(prompt, prompt_mask, [ids for ids, *_ in answers], config, stop, self.tokenizer)
        made.version = torch.tensor([held for *_, held in answers], device=prompt.device)
        if is_plain(config):
            logprobs, _ = padded_rows([torch.tensor(drawn) for _, drawn, _ in answers])
            made.sampling_logprobs = logprobs[:, : made.response.shape[1]].to(prompt.device)
        return made

    def _params(self, config: GenerationConfig, stop: list[str]) -> dict[str, Any]:
        """Translate generation options; nothing is left to the defaults of the model or the server."""
        if name := changed(config, _SAME_HERE):
            raise ConfigError(
                f"method.gen_kwargs.{name}: sampler.engine (vllm) does not have it; of the options that change "
                f"what is sampled it takes temperature, {', '.join(_SAME_HERE)}."
            )
        return {
            "max_tokens": config.max_new_tokens,
            "temperature": (config.temperature or 1.0) if config.do_sample else 0.0,
            "top_k": config.top_k or 0,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "min_p": config.min_p or 0.0,
            "repetition_penalty": config.repetition_penalty or 1.0,
            "logprobs": 0,
            "ignore_eos": True,  # the model's own; those of the configuration are among the ids below
            "stop_token_ids": eos_ids(config),
            "stop": stop,
        }


@register_engine("vllm")
class VLLMEngine(VLLMBase):
    """Generate on servers of vLLM (0.32 or newer), among which prompts are dealt out.

    Start each with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --enable-scale-out`.
    A server that is started again in the middle of a round gets the weights again.

    Args:
        lm: The policy's language model.
        tokenizer: Decodes tokens to find stop strings.
        allowed: Must be None: the servers cannot forbid tokens.
        url: The address of a server without a path, or a list of them.
        folder: A folder in which the trainer writes and the servers read weights.
        dtype: The number format of the servers, if it is not the model's: how much rounding the canary allows.
        timeout: Seconds in which a request has to be answered completely.
        retries: Further attempts after a failure that may be temporary.
        backoff: Seconds before the first retry; see `trlx_like.rewards.transport.Transport`.
        workers: Requests at a time, of each process.
        api_key_env: The environment variable that holds the servers' key.

    Raises:
        ConfigError: For an option that cannot be followed, a table of allowed tokens, or an encoder-decoder.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        allowed: Tensor | None = None,
        *,
        url: str | list[str],
        folder: str,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        timeout: float = 600.0,
        retries: int = 4,
        backoff: float = 1.0,
        workers: int = 64,
        api_key_env: str = "VLLM_API_KEY",
    ) -> None:
        super().__init__(lm, tokenizer, allowed, dtype)
        self.urls = [one.rstrip("/") for one in ([url] if isinstance(url, str) else url)]
        if not self.urls:
            raise ConfigError(f"{OPTION}.url ([]) must name at least one server.")
        for one in self.urls:
            check_url(f"{OPTION}.url", one)
        limits: dict[str, Any] = {"timeout": timeout, "retries": retries, "backoff": backoff, "workers": workers}
        self.transport = Transport(OPTION, SamplerError, **limits, api_key_env=api_key_env)
        self.folder = Path(folder).resolve()

    # Weights.

    @torch.no_grad()
    def sync_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Write the weights and let every server load them; only the main process does it."""
        self.version = version
        if not PartialState().is_main_process:
            for _ in weights:  # may be collective
                pass
            return
        held = self._place()
        unfinished = held.with_name(f"{held.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for number, part in enumerate(self._shards(weights)):
            save_file(part, unfinished / f"model-{number:05d}.safetensors")
        shutil.rmtree(held, ignore_errors=True)
        unfinished.rename(held)
        run_async(self._load_all)
        for older in self.folder.glob("weights-*"):
            if older != held:
                shutil.rmtree(older, ignore_errors=True)

    def _place(self) -> Path:
        return self.folder / f"weights-{self.version}"

    def _shards(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Collect weights on the CPU until they fill a file."""
        part: dict[str, Tensor] = {}
        size = 0
        for name, weight in self.named(weights):
            part[name] = weight.to("cpu", copy=True).contiguous()
            size += weight.numel() * weight.element_size()
            if size >= SHARD:
                yield part
                part, size = {}, 0
        if part:
            yield part

    async def _load_all(self) -> None:
        async with self.transport.session(self.urls[0]) as post:
            await asyncio.gather(*(self._load(url, post) for url in self.urls))

    async def _load(self, url: str, send: Post) -> None:
        """Let one server load the present weights, forget what it has cached, and take their version."""

        async def post(route: str, body: Any = None) -> None:
            await send(f"{url}/{route}", json.dumps(body or {}))

        await post("pause?mode=wait")
        try:
            await post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._place())}})
            await post("reset_prefix_cache")
            await post("update_weight_version", {"new_version": str(self.version)})
        finally:
            await post("resume")

    # Completions.

    def complete(self, prompts: list[list[int]], params: dict[str, Any], seeds: list[int]) -> list[Answer]:
        bodies = [
            json.dumps({"token_ids": ids, "sampling_params": {**params, "seed": seed}})
            for ids, seed in zip(prompts, seeds, strict=True)
        ]
        self.transport.max_bytes = 2**16 + 2**10 * params["max_tokens"]
        return cast("list[Answer]", run_async(lambda: self._ask_all(bodies)))

    async def _ask_all(self, bodies: list[str]) -> list[Answer]:
        """Return ids, log-probabilities and version of each completion. Servers with other weights load them again."""
        first = PartialState().process_index  # processes with few prompts begin with different servers
        urls = [self.urls[(first + row) % len(self.urls)] for row in range(len(bodies))]
        async with self.transport.session(self.urls[0]) as post:
            ask = [self._ask(url, body, post) for url, body in zip(urls, bodies, strict=True)]
            answers = list(await asyncio.gather(*ask))
            wrong = [row for row, (*_, version) in enumerate(answers) if version != self.version]
            if wrong and self._place().is_dir():
                await asyncio.gather(*(self._load(url, post) for url in {urls[row] for row in wrong}))
                again = await asyncio.gather(*(self._ask(urls[row], bodies[row], post) for row in wrong))
                for row, answer in zip(wrong, again, strict=True):
                    answers[row] = answer
        return answers

    async def _ask(self, url: str, body: str, post: Post) -> Answer:
        content = await post(f"{url}/inference/v1/generate", body)
        try:
            choice = json.loads(content)["choices"][0]
            ids = [int(number) for number in choice["token_ids"]]
            logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
            versions = {span["version"] for span in choice["weight_versions"]}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise SamplerError(
                f"{OPTION}.url ({url}) answered with no completion of vLLM 0.32 or newer: {content[:200]!r}"
            ) from error
        if not ids or len(logprobs) != len(ids):
            raise SamplerError(f"{OPTION}.url ({url}) sent {len(ids)} tokens with {len(logprobs)} log-probabilities.")
        only = versions.pop() if len(versions) == 1 else ""
        return ids, logprobs, int(only) if only.isdecimal() else UNKNOWN


def _shared_names(lm: nn.Module) -> dict[str, list[str]]:
    """Return the further names of weights that layers share (tied embeddings), by the name that comes first.

    vLLM would keep the earlier head if only the embeddings were sent.
    """
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, weight in lm.named_parameters(remove_duplicate=False):
        names[id(weight)].append(name.replace(".base_layer.", "."))
    return {first: others for first, *others in names.values() if others}
