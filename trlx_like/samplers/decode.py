"""Decoding over a model's forward pass, in which no row is computed that nobody needs.

A finished row leaves the batch, the next prompt takes its place, and a prompt that several rows share is read once.
The tokens of a row follow from its key alone, so none of this changes them. `needs_generate` says what is left to
`generate()` of transformers: encoder-decoders, beams, and options that read a whole row, such as repetition penalties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, PreTrainedModel
from transformers.cache_utils import DynamicCache

from trlx_like.data import Sampled
from trlx_like.functional.choices import encode, packed
from trlx_like.functional.counter import uniforms
from trlx_like.models.layout import takes
from trlx_like.models.shared_prompts import why_no_cache
from trlx_like.samplers.cache import RowCache
from trlx_like.samplers.drawing import drawn, refuse_nan, warpers
from trlx_like.samplers.generation import SAMPLING_ONLY, changed, eos_ids
from trlx_like.samplers.recorded import Steps

_KNOWN = {"do_sample", "min_new_tokens", *SAMPLING_ONLY}
_ROOM = 4
"""New prompts are read when a part 1 / _ROOM of the rows is free, because a prompt alone is slow to read."""


def needs_generate(lm: PreTrainedModel, config: GenerationConfig) -> str | None:
    """Decide which way responses are generated.

    Args:
        lm: The language model.
        config: The options of the call.

    Returns:
        None: `decode` does it. Otherwise the reason, in words, why `generate()` of transformers has to.
    """
    if name := changed(config, _KNOWN):
        return f"the option {name} ({getattr(config, name)})"
    if config.cache_implementation is not None or config.use_cache is False:
        return "the options cache_implementation and use_cache"
    if (reason := why_no_cache(lm)) is not None:
        return reason
    prepares: Any = type(lm)
    own = prepares.prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if own or lm.is_remote_code():
        return "a model that prepares its inputs in a way of its own"
    # Rows that leave take columns of the others along, which such a model would count (RoFormer, decoders of BART).
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    if positions and not takes(lm, "position_ids"):
        return "a model that counts positions by itself"
    return None


def last_only(lm: PreTrainedModel) -> dict[str, int]:
    """Return the argument that makes a forward pass compute the logits of the last token alone, for models with one."""
    return {"logits_to_keep": 1} if takes(lm, "logits_to_keep") else {}


def spare(longest: int) -> int:
    """Return how many more tokens a row has room for where rows come later, so that the cache seldom moves."""
    return 1 + longest // 8


class Decoding:
    """Generate a response to each prompt.

    Args:
        lm: The language model, in evaluation mode.
        prompt: Prompt token ids, padded on the left. [B, P]
        mask: True on real prompt tokens. [B, P] bool
        config: The options, with which `needs_generate` is None.
        keys: What the random numbers of each response follow from. [B] int64
        processors: Change the logits before the options do.
        completes: Tells whether the last of the given response tokens completes a stop string; None without any.
        choices: Whether to tell which tokens could be drawn.
        at_once: The most rows in a batch; None is all.
        steps: Computes the steps after the prompts, if the model takes positions.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        prompt: Tensor,
        mask: Tensor,
        config: GenerationConfig,
        keys: Tensor,
        processors: Sequence[LogitsProcessor],
        completes: Callable[[list[int]], bool] | None,
        choices: bool,
        at_once: int | None,
        steps: Steps,
    ) -> None:
        self.steps = steps
        self.lm, self.prompt, self.mask, self.config = lm, prompt, mask, config
        count, width, longest = len(prompt), prompt.shape[1], config.max_new_tokens
        device = prompt.device
        self.last_only = last_only(lm)
        self.takes_positions = takes(lm, "position_ids")
        self.processors = list(processors)
        self.numbers = None
        if config.do_sample:
            self.processors += warpers(config, device)
            self.numbers = uniforms(keys, longest)  # for each place [B, R]
        self.eos = torch.tensor(eos_ids(config), dtype=prompt.dtype, device=device)
        known = range(lm.config.get_text_config().vocab_size)  # the model may lack an EOS, see `check_token_ids`
        self.too_early = torch.tensor([end for end in eos_ids(config) if end in known], device=device)
        self.completes, self.written = completes, [list[int]() for _ in range(count)]
        self.longest = longest
        self.choices: list[tuple[Tensor, ...]] | None = [] if choices else None
        self.lengths = mask.sum(dim=1)  # [B]
        self.at_once = min(count, at_once or count)
        self.waiting = list(range(count))
        if self.at_once < count:
            # From the longest prompt to the shortest, so that a prompt always fits beside the rows that are there.
            self.waiting.sort(key=self.lengths.tolist().__getitem__, reverse=True)
        more = 0 if self.at_once == count else spare(longest)
        self.cache = RowCache(self.at_once, width + longest + more)
        # Of each row in the batch, all [n, 1]: where its next token stands among the B x R of all responses, the token
        # that it got last, and the position of that in the row.
        self.places, self.tokens, self.positions = (prompt.new_zeros(0, 1) for _ in range(3))
        self.taken: list[tuple[Tensor, ...]] = []  # of each step: places, tokens and, if drawn, probabilities

    def run(self) -> None:
        """Read prompts and write tokens until every response has ended."""
        while self.waiting or len(self.places):
            free = self.at_once - len(self.places)
            if self.waiting and free * _ROOM >= self.at_once:
                self._read(free)
            else:
                self._write()

    def sampled(self, logprobs: bool) -> Sampled:
        """Return the responses.

        Args:
            logprobs: Whether to tell what the tokens were drawn with, if they were drawn.
        """
        places, tokens, *drawn_with = (torch.cat(parts)[:, 0] for parts in zip(*self.taken, strict=True))
        rows, places = places // self.longest, places % self.longest
        shape, padding = (len(self.prompt), int(places.max()) + 1), self.config.pad_token_id
        mask = torch.zeros(shape, dtype=torch.bool, device=rows.device)
        mask[rows, places] = True
        response = tokens.new_full(shape, 0 if padding is None else padding)
        response[rows, places] = tokens
        made = Sampled(self.prompt, self.mask, response, mask)
        if drawn_with:
            refuse_nan(drawn_with[0])
        if logprobs and drawn_with:
            probabilities = torch.ones(shape, device=rows.device)
            probabilities[rows, places] = drawn_with[0]
            made.sampling_logprobs = probabilities.log()
        if self.choices is not None:
            words, count = (torch.cat(parts) for parts in zip(*self.choices, strict=True))
            sizes = count.new_zeros(mask.shape)
            sizes[rows, places] = count
            made.choices, made.choice_sizes = packed(words, rows.repeat_interleave(count), sizes)
        return made

    def _read(self, free: int) -> None:
        """Read the next prompts, equal ones once, and draw the first token of each response."""
        new, self.waiting = self.waiting[:free], self.waiting[free:]
        width = max(1, int(self.lengths[new].max()))
        ids, mask = self.prompt[new][:, -width:], self.mask[new][:, -width:]
        found: dict[tuple[int, ...], int] = {}
        which = [found.setdefault(tuple(row), len(found)) for row in ids.masked_fill(~mask, -1).tolist()]
        first = [which.index(number) for number in range(len(found))]
        ids, mask, index = ids[first], mask[first], torch.tensor(which, device=ids.device)
        read = DynamicCache()
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        logits = self._forward(ids, None if bool(mask.all()) else mask.long(), positions, read)
        scores = self._scores(logits, index.new_zeros(len(ids), 1), lambda: ids)[index]
        self.cache.admit(read, ids, mask, index)
        rows = torch.tensor(new, device=ids.device)[:, None]
        places = rows * self.longest
        tokens, ended = self._take(scores, places)
        done = [False] * len(self.places) + ended
        self.places = torch.cat([self.places, places + 1])
        self.tokens = torch.cat([self.tokens, tokens])
        self.positions = torch.cat([self.positions, self.lengths[rows]])
        self._drop(done)

    def _write(self) -> None:
        """Write the next token of every row."""
        mask = self.cache.extend(self.tokens)
        compute = partial(self._forward, self.tokens, mask, self.positions, self.cache)
        steps = self.steps if self.takes_positions else None
        logits = compute() if steps is None else steps(self.tokens, mask, self.positions, self.cache, compute)
        self.tokens, done = self._take(self._scores(logits, self.places, lambda: self.cache.ids), self.places)
        self.places, self.positions = self.places + 1, self.positions + 1
        self._drop(done)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Run the model on new tokens [n, t], which a cache [n, T] gets; return the logits of the last ones. [n, V]"""
        given: dict[str, Any] = {"position_ids": positions} if self.takes_positions else {}
        given |= self.last_only
        out = self.lm(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **given)
        return cast(Tensor, out.logits[:, -1])

    def _scores(self, logits: Tensor, places: Tensor, ids: Callable[[], Tensor]) -> Tensor:
        """Apply options and processors to logits.

        Args:
            logits: The logits of the next token. [n, V]
            places: As `places` of the class, of these rows. [n, 1]
            ids: Returns all that the model has read, padded on the left. [n, T]

        Returns:
            The scores. [n, V]
        """
        scores = logits.float()
        if self.config.min_new_tokens and len(self.too_early):
            early = places % self.longest < self.config.min_new_tokens
            scores[:, self.too_early] = scores[:, self.too_early].masked_fill(early, -torch.inf)
        for processor in self.processors:
            scores = processor(ids(), scores)
        return scores

    def _take(self, scores: Tensor, places: Tensor) -> tuple[Tensor, list[bool]]:
        """Choose the tokens [n, 1] at places [n, 1] by scores [n, V], and tell which of them end their responses."""
        if self.numbers is None:
            tokens = scores.argmax(dim=-1, keepdim=True)
            self.taken.append((places, tokens))
        else:
            if self.choices is not None:
                self.choices.append(encode(scores > -torch.inf))
            tokens, probabilities = drawn(scores, self.numbers.take(places))
            self.taken.append((places, tokens, probabilities))
        ended = torch.isin(tokens, self.eos) | ((places + 1) % self.longest == 0)
        done: list[bool] = ended[:, 0].tolist()
        if self.completes is not None:
            rows = (places // self.longest)[:, 0].tolist()
            for at, (row, token) in enumerate(zip(rows, tokens[:, 0].tolist(), strict=True)):
                self.written[row].append(token)
                done[at] = done[at] or self.completes(self.written[row])
        return tokens, done

    def _drop(self, done: list[bool]) -> None:
        """Remove rows from the batch."""
        if any(done):
            order = self.cache.drop(done)
            self.places, self.tokens, self.positions = (
                of_rows[order] for of_rows in (self.places, self.tokens, self.positions)
            )
