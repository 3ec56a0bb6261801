"""A language model that scores what was sampled: log-probabilities, head outputs, reference log-probabilities.

Logits are made at real response tokens only and by chunks of rows, never as a [B, T, V].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trlx_like.data import Completion
from trlx_like.functional.logprobs import TokenStatistics, full_kl_from_hidden, score_tokens
from trlx_like.models.adapters import has_adapter, leave_out_frozen
from trlx_like.models.layout import (
    BlockInputs,
    TopBlocks,
    blocks,
    decoder_start,
    freeze_below,
    lm_head,
    run_base,
    use_eager_attention_if_biased,
)
from trlx_like.models.reference import Reference, make_reference


@dataclass
class PolicyOutput:
    """All at the response positions of a batch; zero where nothing is scored."""

    logprobs: Tensor  # [B, R]
    states: Tensor  # [B, R + 1, H]: last hidden states around the response tokens
    entropy: Tensor | None = None  # [B, R]
    heads: dict[str, Tensor] = field(default_factory=dict)  # [B, R + 1]: the states around the response tokens
    ref_logprobs: Tensor | None = None  # [B, R], no gradient
    full_kl: Tensor | None = None  # [B, R]
    statistics: TokenStatistics | None = None  # each [B, R]


class LanguagePolicy(nn.Module):
    """A language model, heads on its hidden states, and a frozen reference.

    An encoder-decoder reads the prompt with its encoder; its states are those of the decoder, which begins with a
    token of its own.

    num_layers_unfrozen: blocks from the top that are trained; -1 all, 0 none (only the heads). Of an encoder-decoder
        they are the decoder's, and unless all is trained the encoder is not.
    head_blocks: for a head's name, how many top blocks it gets as a trained copy of its own (0: it reads the policy's
        last hidden state).
    temperature, allowed: the distribution that is sampled from: logits are divided by the temperature, and
        `allowed[previous, next]` ([V, V] bool, True = allowed) takes forbidden tokens away. Sampler and learner
        score under this one.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        heads: dict[str, nn.Module] | None = None,
        head_blocks: dict[str, int] | None = None,
        num_layers_unfrozen: int = -1,
        temperature: float = 1.0,
        allowed: Tensor | None = None,
    ) -> None:
        super().__init__()
        use_eager_attention_if_biased(lm)
        self.num_layers_unfrozen = num_layers_unfrozen
        self.branch: int | None = None
        if num_layers_unfrozen == 0:
            lm.requires_grad_(False)
        elif num_layers_unfrozen > 0:
            self.branch = max(0, len(blocks(lm)) - num_layers_unfrozen)
            freeze_below(lm, self.branch)
        self.lm = lm
        self.start = decoder_start(lm)
        self.heads = nn.ModuleDict(heads or {})
        tops = {name: count for name, count in (head_blocks or {}).items() if count > 0}
        self.head_branch = {name: max(0, len(blocks(lm)) - count) for name, count in tops.items()}
        self.head_tops = nn.ModuleDict({name: TopBlocks(lm, at) for name, at in self.head_branch.items()})
        self.head_tops.requires_grad_(True)
        self.temperature = temperature
        self.allowed: Tensor | None
        self.register_buffer("allowed", allowed, persistent=False)
        # In a list, so that its parameters are neither trained nor saved with the policy's.
        self._reference: list[Reference] = []
        if has_adapter(lm):
            leave_out_frozen(self, lm)

    def add_reference(self, other: PreTrainedModel | None = None) -> None:
        """Freezes the present weights (or `other`) as the reference. Call it before the first update."""
        if other is not None:
            use_eager_attention_if_biased(other)
        self._reference = [make_reference(self.lm, self.num_layers_unfrozen, other)]

    def drop_reference(self) -> None:
        """Frees the reference, when all has been asked of it."""
        self._reference = []

    @torch.no_grad()
    def move_reference(self, share: float) -> None:
        """Mixes `share` of the policy's weights into the reference's; 1 makes them equal."""
        for reference, policy in self._reference[0].weight_pairs(self.lm):
            reference.lerp_(policy, share)

    def reference_modules(self) -> list[nn.Module]:
        return [module for reference in self._reference for module in reference.modules()]

    def forward(
        self,
        batch: Completion,
        *,
        reference: bool = False,
        entropy: bool = False,
        full_kl: bool = False,
        heads: bool = True,
        statistics: bool = False,
    ) -> PolicyOutput:
        """Scores the response tokens of a batch.

        reference: also under the reference. entropy: of the policy at each position. full_kl: the exact
        KL(policy || reference) at each position, with gradient to the policy. heads: also what the heads say.
        statistics: also what is only looked at.
        """
        inputs = batch.inputs(self.start)
        width = batch.response.shape[1]
        hidden, branches = self._run(inputs)
        real = batch.scored
        at_tokens = hidden[:, -width - 1 : -1][real]  # [N, H]: the states that the tokens were drawn from
        ids = batch.response[real]  # [N]
        sampling = self._sampling(batch.previous(self.start)[real])
        head = lm_head(self.lm)
        scores = score_tokens(at_tokens, ids, head, entropy=entropy, statistics=statistics, **sampling)
        output = PolicyOutput(
            logprobs=_spread(scores.logprobs, real),
            states=hidden[:, -width - 1 :],
            entropy=None if scores.entropy is None else _spread(scores.entropy, real),
            heads={n: self._head(n, hidden, branches, width + 1) for n in self.heads} if heads else {},
        )
        if scores.statistics is not None:
            columns = {name: _spread(column, real) for name, column in vars(scores.statistics).items()}
            output.statistics = TokenStatistics(**columns)
        if reference or full_kl:
            held = self._reference[0]
            with torch.no_grad():
                branch = None if self.branch is None else branches[self.branch]
                ref_tokens = held.hidden(inputs, hidden, branch)[:, -width - 1 : -1][real]
                ref_scores = score_tokens(ref_tokens, ids, held.head, **sampling)
            output.ref_logprobs = _spread(ref_scores.logprobs, real)
            if full_kl:
                exact = full_kl_from_hidden(at_tokens, ref_tokens, head, held.head, **sampling)
                output.full_kl = _spread(exact, real)
        return output

    def _sampling(self, previous: Tensor) -> dict[str, Any]:
        """The distribution that tokens were drawn from, after the previous tokens [N]."""
        table = {} if self.allowed is None else {"allowed": self.allowed, "previous": previous}
        return {"temperature": self.temperature, **table}

    def _run(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[int, BlockInputs]]:
        wanted = sorted({*self.head_branch.values(), *([] if self.branch is None else [self.branch])})
        return run_base(self.lm, inputs, wanted)

    def _head(self, name: str, hidden: Tensor, branches: dict[int, BlockInputs], states: int) -> Tensor:
        if name in self.head_branch:
            hidden = self.head_tops[name](branches[self.head_branch[name]])
        values: Tensor = self.heads[name](hidden[:, -states:])
        return values


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """Values of the real tokens [N] back at their places [B, R], zero elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
