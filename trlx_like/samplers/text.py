"""Sampling of text: from prompts to responses, as ids for training and as text for reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from trlx_like.config.generation import forbidding
from trlx_like.data import Completion, Sampled
from trlx_like.functional.counter import keys, random_stream
from trlx_like.pipelines.prompts import PromptBatch
from trlx_like.samplers.engines import Engine
from trlx_like.samplers.generation import eos_ids, generation_config

SEPARATOR = "<sep>"
"""Stands in `samples` between the prompt (read by the encoder) and the output of an encoder-decoder, as in trlX."""


FinishReason = Literal["eos", "stop", "length"]
"""Why a response ended: by EOS, by a stop sequence, or because it was cut at `max_new_tokens`."""


@dataclass
class TextSamples:
    """Hold sampled responses, as ids for the trainer and as text for the user's functions. One entry per response."""

    completion: Completion
    prompts: list[str]
    outputs: list[str]  # without special tokens, cut before a stop sequence
    samples: list[str]  # prompt and output
    finish_reasons: list[FinishReason]
    metadata: list[dict[str, Any]]
    components: dict[str, list[Any]] = field(default_factory=dict)  # scores of each of several reward functions
    sampling_logprobs: Tensor | None = None  # [B, R] float32, see `Sampled`
    version: Tensor | None = None  # [B] int64, see `Sampled`

    def __len__(self) -> int:
        """Return the number of responses."""
        return len(self.prompts)

    @property
    def numbers(self) -> list[int]:
        """Return the number of each response in its round, if it was sampled from a given stream."""
        assert self.completion.place is not None
        return self.completion.place.tolist()

    @property
    def drawn(self) -> Tensor | None:
        """Return `sampling_logprobs` under its former name."""
        return self.sampling_logprobs

    @property
    def finished(self) -> list[bool]:
        """Tell which responses ended by EOS or a stop sequence, instead of being cut at max_new_tokens."""
        return [reason != "length" for reason in self.finish_reasons]

    def __getitem__(self, rows: Sequence[int]) -> TextSamples:
        """Select responses by their numbers, which may repeat."""

        def pick(column: Any) -> Any:
            if isinstance(column, dict):
                return {name: pick(values) for name, values in column.items()}
            if isinstance(column, list):
                return [column[row] for row in rows]
            return None if column is None else column[list(rows)]

        return TextSamples(**pick(vars(self)))

    def rows(self) -> list[dict[str, Any]]:
        """Return, for each response, a dictionary of what a reward function may see.

        Its keys are samples, prompts, outputs, metadata, length (the number of response tokens), output_ids and
        finish_reasons.
        """
        ids = [row[mask].tolist() for row, mask in zip(self.completion.response, self.completion.mask, strict=True)]
        names = ("samples", "prompts", "outputs", "metadata", "length", "output_ids", "finish_reasons")
        columns = (self.samples, self.prompts, self.outputs, self.metadata, map(len, ids), ids, self.finish_reasons)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


@dataclass(eq=False)
class TextSampler:
    """Generate responses to batches of prompts with an engine.

    Args:
        engine: Generates token ids.
        tokenizer: Decodes them.
        stop_sequences: Strings that end a response. They are cut off from `outputs`.
        separator: For encoder-decoders: `samples` are prompt, separator and output, which are decoded separately. None:
            the output continues the prompt.
        batch_size: How many prompts the engine works on at once; None is all.
        device: Where the engine expects prompts.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    stop_sequences: Sequence[str] = ()
    separator: str | None = None
    batch_size: int | None = None
    device: torch.device | str = "cpu"

    def sample(
        self, prompts: PromptBatch, options: Mapping[str, Any], stream: int | None = None, *, choices: bool = False
    ) -> TextSamples:
        """Generate one response per prompt.

        Args:
            prompts: The prompts.
            options: Options of `generate()` of transformers, and those that the engine adds.
            stream: Determines the random numbers, together with the numbers of the prompts, which become the places of
                the responses. None draws one with torch's global generator.
            choices: Whether to keep which tokens could be drawn, if the options forbid any and the engine can tell.

        Returns:
            The responses, in the order of the prompts.

        Raises:
            ConfigError: For an option that is unknown or refused.
        """
        own = {name: options[name] for name in getattr(self.engine, "options", ()) if name in options}
        if choices and getattr(self.engine, "tells_choices", False) and forbidding(options):
            own["choices"] = True
        config = generation_config({name: options[name] for name in options if name not in own}, self.tokenizer)
        step = self.batch_size or len(prompts)
        if getattr(self.engine, "refills", None) and self.engine.refills(config):  # type: ignore[attr-defined]
            own["at_once"], step = step, len(prompts)
        of = random_stream() if stream is None else stream
        parts = [self._generate(prompts[i : i + step], config, own, of) for i in range(0, len(prompts), step)]
        made = parts[0] if len(parts) == 1 else Sampled.collate([row for part in parts for row in part.split()])
        place = None if stream is None else torch.tensor(prompts.numbers, device=made.response.device)
        names = ("prompt", "prompt_mask", "response", "mask", "choices", "choice_sizes")
        completion = Completion(**{name: getattr(made, name) for name in names}, place=place)
        reasons = self.finish_reasons(completion, config)
        texts = self.decode(completion)
        drawn, version = made.sampling_logprobs, made.version
        return TextSamples(completion, *texts, reasons, prompts.metadata, sampling_logprobs=drawn, version=version)

    def rest(self) -> None:
        """Let the engine give its memory back until its next weights, if it can."""
        if hasattr(self.engine, "sleep"):
            self.engine.sleep()

    def _generate(self, prompts: PromptBatch, config: GenerationConfig, own: Mapping[str, Any], stream: int) -> Sampled:
        """Generate for one batch of prompts."""
        ids, mask = (part.to(self.device) for part in prompts.tensors(self.tokenizer.pad_token_id))
        key = keys(stream, prompts.numbers, ids.device)
        own = {**own, "keys": key} if getattr(self.engine, "keyed", False) else own
        # For beams, and for engines without keys. `torch.manual_seed` notes the stack for each kind of GPU, every time.
        seed = torch.default_generator.manual_seed if ids.device.type == "cpu" else torch.manual_seed
        with torch.random.fork_rng([ids.device] if ids.device.type == "cuda" else []):
            seed(int(key[0]))
            return self.engine.generate(ids, mask, config, list(self.stop_sequences), **own)

    def decode(self, completion: Completion) -> tuple[list[str], list[str], list[str]]:
        """Decode prompts and responses for people and reward functions. Training uses the ids, never this text.

        Args:
            completion: Token ids of prompts and responses.

        Returns:
            Three lists of text: prompts, outputs (cut before a stop sequence) and samples (prompt and output together).
        """
        prompt_ids = [ids[m].tolist() for ids, m in zip(completion.prompt, completion.prompt_mask, strict=True)]
        response_ids = [ids[m].tolist() for ids, m in zip(completion.response, completion.mask, strict=True)]
        found = {key: self._text(list(key)) for key in dict.fromkeys(map(tuple, prompt_ids))}  # groups share prompts
        prompts = [found[tuple(ids)] for ids in prompt_ids]
        if self.separator is not None:
            outputs = [self._cut(self._text(ids)) for ids in response_ids]
            return prompts, outputs, [p + self.separator + o for p, o in zip(prompts, outputs, strict=True)]
        outputs = []
        for prompt, before, after in zip(prompts, prompt_ids, response_ids, strict=True):
            whole = self._text(before + after)
            # Some tokenizers drop the space before the first word when they decode the response alone.
            output = whole[len(prompt) :] if whole.startswith(prompt) else self._text(after)
            outputs.append(self._cut(output))
        return prompts, outputs, [p + o for p, o in zip(prompts, outputs, strict=True)]

    def finish_reasons(self, completion: Completion, config: GenerationConfig) -> list[FinishReason]:
        """Tell for each response why it ended. An EOS that also completes a stop sequence counts as EOS.

        Args:
            completion: Token ids of prompts and responses.
            config: The generation options, for the EOS ids.

        Returns:
            One reason per response.
        """
        lengths = completion.mask.sum(dim=1)
        last: Tensor = completion.response.gather(1, lengths[:, None] - 1).squeeze(1)
        ended = torch.isin(last, torch.tensor(eos_ids(config), device=last.device, dtype=last.dtype)).tolist()
        stopped = [False] * len(ended)
        if self.stop_sequences:
            rows = zip(completion.response, completion.mask, strict=True)
            texts = [self.tokenizer.decode(ids[m].tolist()) for ids, m in rows]
            stopped = [any(string in text for string in self.stop_sequences) for text in texts]
        return ["eos" if eos else "stop" if stop else "length" for eos, stop in zip(ended, stopped, strict=True)]

    def _text(self, ids: list[int]) -> str:
        """Decode ids without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _cut(self, output: str) -> str:
        """Cut a text before its first stop sequence."""
        found = [at for at in (output.find(s) for s in self.stop_sequences) if at >= 0]
        return output[: min(found)] if found else output
