"""A language model that scores sampled text: log-probabilities, head outputs and reference log-probabilities.

Logits are computed at response tokens only and in chunks of rows, never as one [B, T, V].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trlx_like.data import Completion
from trlx_like.errors import ConfigError
from trlx_like.functional.choices import Choices, spans
from trlx_like.functional.logprobs import Divergence, Sampling, TokenStatistics, divergence_from_hidden, score_tokens
from trlx_like.models.adapters import leave_out_frozen
from trlx_like.models.compaction import Compaction
from trlx_like.models.last_states import Reading, last_block, last_states, read_at
from trlx_like.models.layout import (
    decoder_start,
    lm_head,
    run_base,
    top_from,
    use_eager_attention_if_biased,
)
from trlx_like.models.merging import has_adapter
from trlx_like.models.packed_rows import PackedRows
from trlx_like.models.reference import Reference, make_reference
from trlx_like.models.shared_prompts import SharedPrompts
from trlx_like.models.top_blocks import copied_top, freeze_below, reads_below, tell_frozen_before
from trlx_like.models.trunk import Trunk, lowest_trained, make_trunk


@dataclass
class PolicyOutput:
    """Hold scores at the response positions of a batch; zero at tokens that are not scored."""

    logprobs: Tensor  # [B, R]
    states: Tensor | None = None  # [B, R + 1, H]: last hidden states around the response tokens
    entropy: Tensor | None = None  # [B, R]
    heads: dict[str, Tensor] = field(default_factory=dict)  # [B, R + 1]: the states around the response tokens
    ref_logprobs: Tensor | None = None  # [B, R], no gradient
    divergence: Tensor | None = None  # [B, R]
    trunk: Tensor | None = None  # [B, P + R, H], no gradient: what enters the lowest block that is not frozen
    statistics: TokenStatistics | None = None  # each [B, R]


class LanguagePolicy(nn.Module):
    """Combine a language model, heads on its hidden states, and a frozen reference.

    The encoder of an encoder-decoder reads the prompt. Its states here are those of the decoder, which starts with a
    token of its own.

    Args:
        lm: The language model. Its lower blocks are frozen in place.
        heads: Networks on the last hidden states, by name.
        head_blocks: How many top blocks a head gets as a trained copy of its own, by the head's name; 0 or missing: it
            reads the policy's last hidden states.
        num_layers_unfrozen: How many blocks from the top are trained; -1 all, 0 none (only the heads). Of an
            encoder-decoder they are those of the decoder, and the encoder is trained only with -1.
        temperature: Divides the logits of the distribution that tokens are sampled from. Sampler and learner both use
            it.
        allowed: `allowed[previous, next]` is True if `next` may follow `previous` when sampling; None allows all.
            [V, V] bool
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
        tell_frozen_before(lm, num_layers_unfrozen)
        if num_layers_unfrozen == 0:
            lm.requires_grad_(False)
        elif num_layers_unfrozen > 0:
            self.branch = top_from(lm, num_layers_unfrozen)
            freeze_below(lm, self.branch)
        self.lm = lm
        self.start = decoder_start(lm)
        self.heads = nn.ModuleDict(heads or {})
        tops = {name: count for name, count in (head_blocks or {}).items() if count > 0}
        self.head_branch = {name: top_from(lm, count) for name, count in tops.items()}
        self.head_tops = nn.ModuleDict()
        for name, at in self.head_branch.items():
            top = copied_top(lm, at)
            if top is None:
                raise ConfigError(
                    f"method.num_value_layers_unfrozen ({tops[name]}): {reads_below(lm)}, so the value function cannot "
                    "have top layers for itself. Set it to 0."
                )
            self.head_tops[name] = top.requires_grad_(True)
        self.temperature = temperature
        self.allowed: Tensor | None
        self.register_buffer("allowed", allowed, persistent=False)
        self._reference: list[Reference] = []  # at most one
        self.trunk: Trunk | None = None
        self.compaction: Compaction | None = None  # None: every row is read whole, with its padding
        # With frozen blocks all tokens are read, whether states are kept or not: results have the same bits.
        self.trains_all = last_block(lm) is not None and lowest_trained(lm) == 0
        if has_adapter(lm):
            leave_out_frozen(self, lm)

    def add_trunk(self) -> str | None:
        """Let `forward` start from the states that a batch has kept, where it has. Call it before the first update.

        Returns:
            None; or the reason, in words, why that cannot be.
        """
        made = make_trunk(self.lm, list(self.head_branch.values()))
        self.trunk = None if isinstance(made, str) else made
        return made if isinstance(made, str) else None

    def add_reference(self, other: PreTrainedModel | None = None) -> None:
        """Freeze the present weights, or another model, as the reference. Call it before the first update.

        After `add_trunk`, the reference of an adapter runs only the blocks above the frozen ones.

        Args:
            other: The reference, if it is not the policy's own start.
        """
        if other is not None:
            use_eager_attention_if_biased(other)
            self.compaction = self.compaction and self.compaction.also_of(other)
        self._reference = [make_reference(self.lm, self.num_layers_unfrozen, other, self.trunk)]

    def drop_reference(self) -> None:
        """Free the reference's memory, once it is not needed any more."""
        self._reference = []

    def followed(self) -> list[tuple[Tensor, Tensor]]:
        """Return the weights of the reference, each with the policy's weight that it follows if it moves.

        Raises:
            ConfigError: If the reference cannot follow the policy.
        """
        return list(self._reference[0].weight_pairs(self.lm))

    def reference_modules(self) -> list[nn.Module]:
        """Return the modules that hold the reference's own weights; empty without any."""
        return [module for reference in self._reference for module in reference.modules]

    def forward(
        self,
        batch: Completion,
        *,
        reference: bool = False,
        entropy: bool = False,
        divergence: Divergence | None = None,
        heads: bool = True,
        states: bool = False,
        statistics: bool = False,
    ) -> PolicyOutput:
        """Score the response tokens of a batch.

        Args:
            batch: Prompts and responses.
            reference: Also compute log-probabilities under the reference.
            entropy: Also compute the policy's entropy at each position, with gradient.
            divergence: Also compute this divergence of policy and reference at each position, with gradient to the
                policy; `functional.kl.full_kl` is the exact KL(policy || reference).
            heads: Also compute the outputs of the heads.
            states: Also return the last hidden states.
            statistics: Also compute `TokenStatistics`, without gradient.

        Returns:
            What was requested.
        """
        width = batch.response.shape[1]
        lowest = None if self.trunk is None else self.trunk.lowest
        # The blocks at which reference, heads and kept states branch off.
        wanted = sorted({at for at in (*self.head_branch.values(), self.branch, lowest) if at is not None})
        around_all = states or (heads and len(self.heads) > 0)  # the states after the last tokens are read too
        read = batch
        if self.compaction is not None and self.trains_all and not (around_all or wanted):
            read = self.compaction.without_last(batch)
        compact = self.compaction and self.compaction.of(read, branches=bool(wanted))
        packed = compact if isinstance(compact, PackedRows) else None
        shared = compact if isinstance(compact, SharedPrompts) else None
        inputs = read.inputs(self.start) if packed is None else packed.inputs
        places = None
        if self.compaction is not None and self.compaction.skips_unread:
            places = shared.ends if shared else self._places(batch, read, around_all, packed)
        reading = Reading(inputs, shared, places)
        if wanted:
            with read_at(self.lm, last_block(self.lm), places):
                if self.trunk is None or batch.trunk is None:
                    last, branches = run_base(self.lm, inputs, wanted)
                else:
                    kept = batch.trunk if packed is None else packed.pack(batch.trunk)
                    last, branches = self.trunk(kept, inputs, wanted)
        else:
            last, branches = last_states(self.lm, reading), {}

        def whole(states: Tensor) -> Tensor:
            """Return states of packed rows as those of the batch, and others unchanged."""
            return states if packed is None else packed.unpack(states)

        def around(states: Tensor) -> Tensor:
            """Return the states around the response tokens. [B, R + 1, H]"""
            return whole(states)[:, -width - 1 :]

        real = batch.scored
        numbers = torch.arange(last.shape[:2].numel(), device=last.device).view(last.shape[:2])
        around_read = (numbers if packed is None else packed.places)[:, -read.response.shape[1] - 1 :]
        drawn_from = around_read[:, :width][real]  # [N]
        at_tokens = last.flatten(0, 1).index_select(0, drawn_from)  # [N, H]
        ids = batch.response[real]  # [N]
        sampling = self._sampling(batch, real)
        head = lm_head(self.lm)
        scores = score_tokens(at_tokens, ids, head, entropy=entropy, statistics=statistics, **sampling)
        output = PolicyOutput(
            logprobs=_spread(scores.logprobs, real),
            states=around(last) if states else None,
            entropy=None if scores.entropy is None else _spread(scores.entropy, real),
            trunk=None if lowest is None else whole(branches[lowest].hidden.detach()),
        )
        for name in self.heads if heads else ():
            of_head = last
            if name in self.head_branch:
                of_head = self.head_tops[name](branches[self.head_branch[name]], places)
            output.heads[name] = self.heads[name](around(of_head))
        if scores.statistics is not None:
            columns = {name: _spread(column, real) for name, column in vars(scores.statistics).items()}
            output.statistics = TokenStatistics(**columns)
        if reference or divergence is not None:
            held = self._reference[0]
            with torch.no_grad():
                ref_tokens = held.hidden(reading, last, branches).flatten(0, 1).index_select(0, drawn_from)
                if reference:
                    ref_scores = score_tokens(ref_tokens, ids, held.head, **sampling)
                    output.ref_logprobs = _spread(ref_scores.logprobs, real)
            if divergence is not None:
                sides = at_tokens, ref_tokens, head, held.head
                output.divergence = _spread(divergence_from_hidden(*sides, divergence=divergence, **sampling), real)
        return output

    def _places(self, batch: Completion, read: Completion, around: bool, packed: PackedRows | None) -> Tensor:
        """Find the tokens whose last hidden states are read, among all that the model computes. [S]

        Args:
            batch: The batch.
            read: What the model reads of it.
            around: Whether all states around the response tokens are read, not only those that scored ones follow.
            packed: The batch as packed rows; None: it is read as it is.
        """
        first = torch.ones_like(batch.mask[:, :1])
        wanted = torch.cat([first, batch.mask] if around else [batch.scored, ~first], dim=1)  # [B, R + 1]
        wanted = wanted[:, : read.response.shape[1] + 1]
        if self.start is None:
            wanted = nn.functional.pad(wanted, (batch.prompt.shape[1] - 1, 0))  # [B, P + R]
        if packed is not None:  # where a token may stand for those of several rows
            places = packed.places[wanted]
            wanted = torch.zeros_like(packed.source, dtype=torch.bool).flatten().index_fill_(0, places, True)
        return wanted.flatten().nonzero()[:, 0]

    def _sampling(self, batch: Completion, real: Tensor) -> Sampling:
        """Return the settings of the distribution that the tokens of a mask [B, R] were sampled from."""
        if batch.choices is not None and batch.choice_sizes is not None:  # they leave out what is not allowed
            places = spans(batch.choices, batch.choice_sizes)[real]
            return {"temperature": self.temperature, "choices": Choices(batch.choices.flatten(), places)}
        if self.allowed is None:
            return {"temperature": self.temperature}
        previous = batch.previous(self.start)[real]
        return {"temperature": self.temperature, "allowed": self.allowed, "previous": previous}


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """Put values of the real tokens [N] back at their positions [B, R], with zeros elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
