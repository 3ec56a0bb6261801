"""Whether what samples is what learns, asked in every round before anything is learned from its samples.

Two checks, since neither sees everything. The checksum compares each weight that an engine generates with, bit by bit,
with what it should hold: the policy's, adapters merged, in the engine's number format. At a learning rate of 1e-5 a
layer that is a round old changes log-probabilities by less than their rounding error; its bits are others all the same.
The ratio compares what engine and learner think of the same tokens: it sees right weights that are used wrongly, and a
mistake in what both sides of the checksum take for the right ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from trlx_like.data import Completion, Sampled
from trlx_like.functional.digest import Digest, digest
from trlx_like.models import mismerged_weights, plain_weights
from trlx_like.samplers.engines import Engine

TOKENS, ENOUGH = 256, 64
"""Tokens of a response, at most, that the ratio is taken of; and of all, after which two responses do."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""How far the ratio of a token may be from 1 on average, by the coarsest numbers that it is computed with.

Rounding alone makes 6e-6 in float32 and .05 in bfloat16 (docs/audit.md has the measurements).
"""


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """The entry of `TOLERANCE` for the coarsest of the formats. Formats that are not there are coarse ones."""
    return max(TOLERANCE.get(dtype, 0.1) for dtype in dtypes if dtype != torch.float64)


def some_of(samples: Completion, drawn: Tensor | None) -> Sampled:
    """Two to four responses of a chunk, for the ratio. From all over it, since neighbours may share a prompt."""
    last = len(samples) - 1
    rows = list(dict.fromkeys([0, last, last // 3, 2 * last // 3]))
    tokens = samples.mask[rows].sum(dim=1).clamp(max=TOKENS).cumsum(dim=0)
    rows = rows[: max(2, 1 + int((tokens < ENOUGH).sum()))]
    few, drawn = samples[rows], None if drawn is None else drawn[rows, :TOKENS]
    return Sampled(few.prompt, few.prompt_mask, few.response[:, :TOKENS], few.mask[:, :TOKENS], drawn).trim()


class Canary:
    """The checksum. Remembers the digests of the last round, only to tell what went wrong."""

    def __init__(self) -> None:
        self.before: dict[str, Digest] = {}

    def weights(self, lm: nn.Module, engine: Engine) -> str | None:
        """What is wrong with the weights that an engine generates with, in words; None if nothing is.

        lm: the language model that learns.
        """
        held = engine.digests()
        if held is None:
            return None
        expected = {name: digest(_as(weight, engine.dtype)) for name, weight in plain_weights(lm)}
        before, self.before = self.before, expected
        wrong = [name for name in expected if held.get(name) != expected[name]]
        if not wrong:
            return None
        other = _mistakes(lm, engine.dtype, wrong)
        causes: defaultdict[str, list[str]] = defaultdict(list)
        for name in wrong:
            if name in before and before[name] != expected[name]:
                other[name] = {_STALE: before[name], **other[name]}
            causes[_cause(held.get(name), expected[name], other[name])].append(name)
        changed = [name for name in expected if before and before[name] != expected[name]]
        if wrong == changed and all(_STALE in cause for cause in causes):
            same = " and ".join(causes)
            return f"all {len(wrong)} weights that the last round changed are {same}: an update was skipped"
        told = (f"{_names(names)} {'is' if len(names) == 1 else 'are'} {cause}" for cause, names in causes.items())
        return f"of {len(expected)} weights {'; '.join(told)}"


_STALE = "as before the last round"


def _names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} (the first is {names[0]})"


def _as(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    return weight if dtype is None else weight.to(dtype)


def _cause(held: Digest | None, expected: Digest, other: Mapping[str, Digest]) -> str:
    if held is None:
        return "missing"
    found = [cause for cause, digested in other.items() if digested == held]
    if found:
        return " and ".join(found)
    if held.kind != expected.kind:
        return f"{held.kind}, not {expected.kind}"
    if held.unordered == expected.unordered:
        return "in another order, the right numbers at wrong places"
    return "of other numbers"


def _mistakes(lm: nn.Module, dtype: torch.dtype | None, names: Collection[str]) -> dict[str, dict[str, Digest]]:
    """What might be in the place of these weights by mistake: for each name, digests by the words for them."""
    found: dict[str, dict[str, Digest]] = {name: {} for name in names}
    for name, cause, weight in mismerged_weights(lm):
        if name in found:
            found[name][cause] = digest(_as(weight, dtype))
    for name, weight in plain_weights(lm):
        for coarse in (torch.bfloat16, torch.float16) if name in found else ():
            rounded = _as(weight.to(coarse).to(weight.dtype), dtype)
            found[name][f"rounded to {str(coarse).removeprefix('torch.')}"] = digest(rounded)
    return found
