"""Check in every round, before its samples are trained on, that the engine samples from the policy that is trained.

Two checks, since neither detects everything. The checksum compares every weight of the engine bit by bit with the
weight that it should hold: the policy's, with adapters merged, in the engine's number format. It finds a layer that
missed one round of updates. At a learning rate of 1e-5 that changes log-probabilities by less than their rounding
error. The ratio compares the log-probabilities of engine and policy for the same tokens. It finds correct weights that
are used wrongly, and mistakes in the weights that the checksum expects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from trlx_like.data import Completion, Sampled
from trlx_like.functional.digest import Digest, digest
from trlx_like.models.merging import mismerged_weights, plain_weights
from trlx_like.samplers.engines import Engine

TOKENS, ENOUGH = 256, 64
"""Most tokens of a response for the ratio; total tokens with which two responses are enough."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""How far the ratio of a token may be from 1 on average, by the coarsest number format in its computation.

A format that is not listed counts as bfloat16, but for float64, which counts as float32.
Rounding alone makes 6e-6 in float32 and .05 in bfloat16 (docs/audit.md has the measurements).
"""


def some_of(samples: Completion, drawn: Tensor | None) -> Sampled:
    """Choose two to four responses of a chunk for the ratio, spread out because neighbours may share a prompt.

    Args:
        samples: The responses of a chunk.
        drawn: Log-probabilities that the engine reported for them, if it does. [B, R]

    Returns:
        The first `TOKENS` tokens of the chosen responses.
    """
    last = len(samples) - 1
    rows = list(dict.fromkeys([0, last, last // 3, 2 * last // 3]))
    tokens = samples.mask[rows].sum(dim=1).clamp(max=TOKENS).cumsum(dim=0)
    rows = rows[: max(2, 1 + int((tokens < ENOUGH).sum()))]
    few, drawn = samples[rows], None if drawn is None else drawn[rows, :TOKENS]
    sizes = None if few.choice_sizes is None else few.choice_sizes[:, :TOKENS]
    sets = {"choices": few.choices, "choice_sizes": sizes}
    return Sampled(few.prompt, few.prompt_mask, few.response[:, :TOKENS], few.mask[:, :TOKENS], drawn, **sets).trim()


class Canary:
    """Compare the weights of an engine with those of the policy by checksum.

    The digests of the last round are kept only to explain a difference.
    """

    def __init__(self) -> None:
        self.before: dict[str, Digest] = {}

    def weights(self, lm: nn.Module, engine: Engine) -> str | None:
        """Compare the weights that an engine generates with to those of the policy.

        Args:
            lm: The language model that is trained.
            engine: The engine.

        Returns:
            A description of the difference; None if there is none, or the engine gives no checksums.
        """
        held = engine.digests() if hasattr(engine, "digests") else None
        if held is None:
            return None
        expected = {name: digest(weight.to(dtype=engine.dtype)) for name, weight in plain_weights(lm)}
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


def _cause(held: Digest | None, expected: Digest, other: Mapping[str, Digest]) -> str:
    """Describe how a weight differs from the expected one, by comparing it with known mistakes."""
    if held is None:
        return "missing"
    if found := [cause for cause, digested in other.items() if digested == held]:
        return " and ".join(found)
    if held.kind != expected.kind:
        return f"{held.kind}, not {expected.kind}"
    if held.unordered == expected.unordered:
        return "in another order, the right numbers at wrong places"
    return "of other numbers"


def _mistakes(lm: nn.Module, dtype: torch.dtype | None, names: Collection[str]) -> dict[str, dict[str, Digest]]:
    """Return for each weight the digests of its likely mistakes, by their description."""
    found: dict[str, dict[str, Digest]] = {name: {} for name in names}
    for name, cause, weight in mismerged_weights(lm):
        if name in found:
            found[name][cause] = digest(weight.to(dtype=dtype))
    for name, weight in plain_weights(lm):
        for coarse in (torch.bfloat16, torch.float16) if name in found else ():
            rounded = weight.to(coarse).to(weight.dtype).to(dtype=dtype)
            found[name][f"rounded to {str(coarse).removeprefix('torch.')}"] = digest(rounded)
    return found
