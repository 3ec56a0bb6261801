"""Pairs of completions as token ids, from which a preference loss learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trlx_like.data.experience import Experience, padded
from trlx_like.data.text import Completion


def stacked(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Stack values of chosen [B, T, *] above those of rejected completions [B, U, *], with zeros. [2B, max(T, U), *]"""
    width, sides = max(chosen.shape[1], rejected.shape[1]), (chosen, rejected)
    return torch.cat([pad(side, (0, 0) * (side.dim() - 2) + (0, width - side.shape[1])) for side in sides])


@dataclass
class MultiTurnCompletion(Completion):
    """Hold completions that may include tokens of others, such as a user's turn between two answers."""

    assistant_mask: Tensor = padded(value=False)  # [B, R] bool

    @property
    def scored(self) -> Tensor:
        """Mask of the response tokens that a policy scores: those of the assistant. [B, R] bool"""
        return self.assistant_mask


@dataclass
class PreferenceExperience(Experience):
    """Hold prompts, each with a chosen and a rejected completion, and the reference's log-probabilities of both."""

    prompt: Tensor = padded("left", mask="prompt_mask")  # [B, P] int64, P >= 1
    prompt_mask: Tensor = padded("left", False, mask="prompt_mask")  # [B, P] bool
    chosen: Tensor = padded(mask="chosen_mask")  # [B, C] int64
    chosen_mask: Tensor = padded(value=False, mask="chosen_mask")  # [B, C] bool
    rejected: Tensor = padded(mask="rejected_mask")  # [B, J] int64
    rejected_mask: Tensor = padded(value=False, mask="rejected_mask")  # [B, J] bool
    chosen_assistant_mask: Tensor | None = padded(value=False, mask="chosen_mask", default=None)  # [B, C]; None: all
    rejected_assistant_mask: Tensor | None = padded(value=False, mask="rejected_mask", default=None)  # [B, J]
    ref_chosen: Tensor | None = padded(mask="chosen_mask", default=None)  # [B, C] log-probabilities
    ref_rejected: Tensor | None = padded(mask="rejected_mask", default=None)  # [B, J]
    chosen_choices: Tensor | None = padded(mask="chosen_choice_sizes", default=None, kw_only=True)  # as in `Completion`
    chosen_choice_sizes: Tensor | None = padded(mask="chosen_mask", default=None, kw_only=True)  # [B, C] int32
    rejected_choices: Tensor | None = padded(mask="rejected_choice_sizes", default=None, kw_only=True)
    rejected_choice_sizes: Tensor | None = padded(mask="rejected_mask", default=None, kw_only=True)  # [B, J] int32
    # As those of `Completion`; both completions follow the same prompt. [B, P, H], [B, C, H] and [B, J, H]
    prompt_trunk: Tensor | None = padded("left", mask="prompt_mask", default=None, kw_only=True)
    chosen_trunk: Tensor | None = padded(mask="chosen_mask", default=None, kw_only=True)
    rejected_trunk: Tensor | None = padded(mask="rejected_mask", default=None, kw_only=True)

    @property
    def scored(self) -> tuple[Tensor, Tensor]:
        """Masks of the tokens that the loss counts, in the chosen [B, C] and the rejected [B, J] completions."""
        return (
            self.chosen_mask if self.chosen_assistant_mask is None else self.chosen_assistant_mask,
            self.rejected_mask if self.rejected_assistant_mask is None else self.rejected_assistant_mask,
        )

    @property
    def choices(self) -> Tensor | None:
        """Sets of tokens that could be drawn in the chosen completions; None: all tokens."""
        return self.chosen_choices

    def completions(self) -> MultiTurnCompletion:
        """Return 2B completions, the chosen ones first, so that one forward pass scores both."""

        made = MultiTurnCompletion(
            self.prompt.repeat(2, 1),
            self.prompt_mask.repeat(2, 1),
            stacked(self.chosen, self.rejected),
            stacked(self.chosen_mask, self.rejected_mask),
            stacked(*self.scored),
        )
        if self.chosen_choices is not None and self.rejected_choices is not None:
            assert self.chosen_choice_sizes is not None and self.rejected_choice_sizes is not None
            made.choices = stacked(self.chosen_choices, self.rejected_choices)
            made.choice_sizes = stacked(self.chosen_choice_sizes, self.rejected_choice_sizes)
        if self.prompt_trunk is not None and self.chosen_trunk is not None and self.rejected_trunk is not None:
            made.prompt_trunk = self.prompt_trunk.repeat(2, 1, 1)
            made.response_trunk = stacked(self.chosen_trunk, self.rejected_trunk)
        return made

    def keep(self, trunk: Tensor) -> None:
        """Keep the states [2B, P + R, H] of `completions` that enter the lowest block that is not frozen."""
        prompts, responses = trunk.tensor_split([self.prompt.shape[1]], dim=1)
        self.prompt_trunk = prompts[: len(self)]
        self.chosen_trunk, self.rejected_trunk = self.sides(responses)

    def sides(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split values [2B, R] of `completions` into those of the chosen [B, C] and the rejected [B, J] tokens."""
        chosen, rejected = values.chunk(2)
        return chosen[:, : self.chosen.shape[1]], rejected[:, : self.rejected.shape[1]]
