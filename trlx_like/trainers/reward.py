"""Reward models: a classifier with one label that learns which of two answers is preferred.

Documented in docs/algorithms/reward.md. The model maps a sequence to one number. It generates no text and has no
reference, so its trainer derives from the base class and not from `TextTrainer`. `rewards/models.py` scores with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trlx_like.checkpoint import isolated_rng
from trlx_like.config.methods.reward import RewardConfig
from trlx_like.data import Completion, Experience, padded
from trlx_like.data.columns import Column, ColumnRows
from trlx_like.data.flat import FlatRows
from trlx_like.data.preference import stacked
from trlx_like.errors import ConfigError
from trlx_like.functional.bradley_terry import bradley_terry_loss, off_center
from trlx_like.models.compaction import compaction_of
from trlx_like.models.dropout import disable_dropout
from trlx_like.models.export import save_model
from trlx_like.models.loading import checkpoint_activations
from trlx_like.models.merging import has_adapter
from trlx_like.models.reward_model import (
    RewardNetwork,
    add_reward_adapter,
    inspect_reward_model,
    load_reward_model,
    with_own_pad_token,
)
from trlx_like.models.sources import check_fit
from trlx_like.models.tokenizer import load_tokenizer
from trlx_like.pipelines.preferences import Preference, configured_preferences
from trlx_like.pipelines.rows import named_sets
from trlx_like.pipelines.truncation import Truncation
from trlx_like.trainers.base import BaseRLTrainer, LossOutput, Metrics
from trlx_like.trainers.trunk import TrunkStates


@dataclass
class PreferencePair(Experience):
    """Hold pairs of answers as token ids; each answer includes its prompt."""

    margin: Tensor  # [B], by how much the chosen reward should be larger
    chosen: Tensor = padded(mask="chosen_mask")  # [B, T] int64
    chosen_mask: Tensor = padded(value=False, mask="chosen_mask")  # [B, T] bool
    rejected: Tensor = padded(mask="rejected_mask")  # [B, U] int64
    rejected_mask: Tensor = padded(value=False, mask="rejected_mask")  # [B, U] bool
    # The states that enter the lowest block that is not frozen, kept so that the frozen ones run once a sample.
    chosen_trunk: Tensor | None = padded(mask="chosen_mask", default=None, kw_only=True)  # [B, T, H]
    rejected_trunk: Tensor | None = padded(mask="rejected_mask", default=None, kw_only=True)  # [B, U, H]

    def both(self) -> tuple[Tensor, Tensor]:
        """Stack chosen above rejected answers; return token ids and mask. [2B, max(T, U)] each"""
        return stacked(self.chosen, self.rejected), stacked(self.chosen_mask, self.rejected_mask)

    def completions(self) -> Completion:
        """Return all answers, the chosen ones first, of which the first token is the prompt. [2B]"""
        (first, ids), (real, mask) = (part.tensor_split([1], dim=1) for part in self.both())
        return Completion(first, real, ids, mask)

    @property
    def trunk(self) -> Tensor | None:
        """The kept states of `both`. [2B, max(T, U), H]"""
        if self.chosen_trunk is None or self.rejected_trunk is None:
            return None
        return stacked(self.chosen_trunk, self.rejected_trunk)

    def keep(self, trunk: Tensor) -> None:
        """Keep the states [2B, max(T, U), H] of `both`."""
        chosen, rejected = trunk.chunk(2)
        self.chosen_trunk, self.rejected_trunk = (
            chosen[:, : self.chosen.shape[1]],
            rejected[:, : self.rejected.shape[1]],
        )

    def common(self) -> Tensor:
        """Count the tokens that both answers begin with; each has at least one more. [B] int64"""
        width = min(self.chosen.shape[1], self.rejected.shape[1])
        same = (self.chosen[:, :width] == self.rejected[:, :width]).long().cumprod(dim=1).sum(dim=1)
        lengths = torch.minimum(self.chosen_mask.sum(dim=1), self.rejected_mask.sum(dim=1))
        return torch.minimum(same, lengths - 1)


class RewardTrainer(BaseRLTrainer[PreferencePair]):
    """Train a reward model by maximum likelihood of the preferences under the Bradley-Terry model."""

    method_class = RewardConfig
    experience_class = PreferencePair
    offline = True
    uses = frozenset({"preferences", "eval_preferences"})
    needs = ("preferences",)
    method: RewardConfig
    model: RewardNetwork

    def read_inputs(self, tokenizer: Any = None) -> None:
        """Load the tokenizer and encode the pairs, before a model is loaded. `trlx-like check` calls it with one."""
        for argument in ("reward_fn", "metric_fn"):
            if getattr(self, argument) is not None:
                raise ConfigError(f"{argument}: RewardTrainer generates no text to score; pass eval_preferences.")
        self.tokenizer = load_tokenizer(self.config.tokenizer, self.config.model.model_path, tokenizer)
        encoded = partial(configured_preferences, self.config, tokenizer=self.tokenizer)
        preferences = encoded(self.data["preferences"], name="preferences")
        self.truncation = Truncation(preferences, len(self.data["preferences"]))
        self.pairs = _rows(preferences)
        self.eval_pairs = {
            name: _rows(encoded(rows, name=place))
            for name, place, rows in named_sets(self.data.get("eval_preferences"), "eval_preferences")
        }

    def inspect_models(self) -> None:
        """Check the model by the headers of its files; weights are not read."""
        check_fit(inspect_reward_model(self.config.model), self.config.train.seq_length, self.tokenizer)

    def build(self, tokenizer: Any = None) -> None:
        self.read_inputs(tokenizer)
        options = self.config.model
        with isolated_rng(self.config.train.seed):  # a path may name a function that trains a model first
            lm = load_reward_model(options.model_path, config=options)
        check_fit(lm.config, self.config.train.seq_length, self.tokenizer)
        self.tokenizer = with_own_pad_token(self.tokenizer, lm)
        if options.peft_config is not None:
            with isolated_rng(self.config.train.seed):
                add_reward_adapter(lm, options.peft_config, options.model_path)
        if self.method.disable_dropout:
            disable_dropout(lm)
        if self.config.backend.gradient_checkpointing:
            checkpoint_activations(lm)
        self.model = RewardNetwork(lm, -1 if has_adapter(lm) else options.num_layers_unfrozen)
        if hasattr(lm, "score"):  # not an encoder
            self.model.compaction = compaction_of(lm, self.run.backend.sharded, self.device)
        self.trunk = TrunkStates(self.run, self.model, self.passes, self.offline)

    def make_experience(self) -> Metrics:
        self.push_to_store(self.pairs, whole=True)
        sizes = self.pairs.sizes()
        return {"data/pairs": float(len(sizes)), "data/tokens": float(sizes.sum()), **self.truncation.metrics()}

    def loss(self, batch: PreferencePair) -> LossOutput:
        rewards = self.model(*batch.both(), batch.common().repeat(2), batch.trunk)
        chosen, rejected = rewards.chunk(2)
        loss = bradley_terry_loss(chosen, rejected, batch.margin)
        loss = loss + self.method.center_rewards_coefficient * off_center(chosen, rejected)
        metrics = {
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "rewards/mean": (chosen + rejected) / 2,
        }
        extremes = {"rewards/min": (rewards.min(), "min"), "rewards/max": (rewards.max(), "max")}
        return LossOutput(loss.sum(), {name: value.sum() for name, value in metrics.items()} | extremes)

    def evaluate(self) -> Metrics:
        """Measure loss and metrics of the held-out pairs, as `eval/<name>`."""
        return self.evaluate_held_out(self.eval_pairs)

    def export(self, directory: Path, merged: bool | None) -> None:
        """Write a folder that `AutoModelForSequenceClassification` and `AutoTokenizer` load.

        Args:
            directory: The folder.
            merged: None or True: the whole model, with an adapter merged into it. False: the adapter and the head
                alone, for `add_and_load_reward_modeling_adapter`.
        """
        save_model(self.model.lm, directory, merged is not False)
        self.tokenizer.save_pretrained(directory)


def _rows(pairs: FlatRows[Preference]) -> ColumnRows[PreferencePair]:
    """Return the element of each pair."""
    columns = {"margin": Column.single(torch.from_numpy(pairs.sums("margin")).float())}
    for side in ("chosen", "rejected"):
        columns[side] = Column.of(pairs, side)
        columns[f"{side}_mask"] = Column.true(torch.from_numpy(pairs.lengths(side)))
    return ColumnRows(PreferencePair, columns)
