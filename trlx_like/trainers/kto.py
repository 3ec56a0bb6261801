"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306).

The data are single completions, each liked or disliked. The implicit reward of a completion, beta times the log-ratio
of policy to reference, is compared with a reference point: the KL divergence of the two. It is estimated on completions
of other prompts, over the whole batch. No pairs, no reward model, no sampling. Documented in docs/algorithms/kto.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trlx_like.config.methods.kto import KTOConfig
from trlx_like.data import Completion, padded
from trlx_like.data.columns import Column, ColumnRows
from trlx_like.data.flat import FlatRows, View
from trlx_like.data.preference import MultiTurnCompletion
from trlx_like.errors import DataError
from trlx_like.functional.preference import unpaired_loss
from trlx_like.functional.sequences import sequence_sums
from trlx_like.pipelines.dialogues import Dialogue, columns_of, encode_dialogues, first_outputs
from trlx_like.pipelines.forms import reward_of
from trlx_like.pipelines.returns import RowRewards, SampleReward, check_rewards
from trlx_like.pipelines.rows import named_sets
from trlx_like.pipelines.truncation import Truncation
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.optimise import Term
from trlx_like.trainers.precomputed import Precomputed
from trlx_like.trainers.text import TextTrainer

FIELDS = ("ids", "is_output")
"""What a resumed run must have in common with the samples of its beginning."""


@dataclass
class LabelledExperience(MultiTurnCompletion):
    """Hold completions with their labels, and with each prompt a completion of another prompt."""

    other: Tensor = padded(mask="other_mask")  # [B, K] int64
    other_mask: Tensor = padded(value=False, mask="other_mask")  # [B, K] bool
    other_scored: Tensor = padded(value=False, mask="other_mask")  # [B, K] bool, see `MultiTurnCompletion.scored`
    label: Tensor = field(kw_only=True, metadata={"value": False})  # [B] bool, True: desirable
    ref_response: Tensor | None = padded(default=None, kw_only=True)  # [B, R] log-probabilities under the reference
    ref_other: Tensor | None = padded(mask="other_mask", default=None, kw_only=True)  # [B, K]

    def mismatched(self) -> MultiTurnCompletion:
        """Return the prompts with completions that do not belong to them."""
        return MultiTurnCompletion(self.prompt, self.prompt_mask, self.other, self.other_mask, self.other_scored)


class KTOTrainer(TextTrainer[LabelledExperience]):
    """Train a policy on completions that were liked or disliked, relative to a reference."""

    method_class = KTOConfig
    experience_class = LabelledExperience
    offline = True
    uses = frozenset({"samples", "rewards", "eval_samples", "eval_prompts"})
    needs = ("samples", "rewards")
    method: KTOConfig

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        self.precomputed: Precomputed[LabelledExperience] | None = None
        if self.method.precompute_ref_log_probs:
            other = None if self.config.model.ref_model_path is None else self.load_reference
            given = {"samples": [self.dialogues], "eval_samples": self.held_out_dialogues}
            parts = self.run, self.model, self.trunk, self.store
            self.precomputed = Precomputed(*parts, other, _add_reference, given, FIELDS)
        else:
            self.add_reference()

    def read_data(self) -> None:
        self.dialogues = self._encoded(self.data["samples"], self.data["rewards"], "samples", "rewards")
        self.held_out: dict[str, Sequence[LabelledExperience]] = {}
        self.held_out_dialogues = []
        for name, place, rows in named_sets(self.data.get("eval_samples"), "eval_samples"):
            self.held_out_dialogues.append(self._encoded(rows, View(rows, reward_of), place, f"the labels of {place}"))
            self.held_out[name] = self._rows(self.held_out_dialogues[-1])

    def make_experience(self) -> Metrics:
        rows = self._rows(self.dialogues)
        if self.precomputed is None:
            self.push_to_store(rows, whole=True)
        else:
            self.push_to_store(self.precomputed.share(rows))
        truncation = Truncation(self.dialogues)
        share = float(labels_in(self.dialogues).double().mean())
        return {"data/samples": float(len(rows)), "data/desirable": share, **truncation.metrics()}

    def statistics(self, batch: LabelledExperience) -> Mapping[str, Tensor | Term]:
        """Estimate the KL divergence of policy and reference, on completions of other prompts."""
        if self.method.loss_type != "kto":
            return {}
        return {"kl": self.log_ratios(batch.mismatched(), batch.ref_other).sum()}

    def loss(self, batch: LabelledExperience, kl: float = 0.0) -> LossOutput:
        method, desirable = self.method, batch.label
        log_ratios, kl = self.log_ratios(batch, batch.ref_response), max(kl, 0.0)
        rewards = method.beta * log_ratios  # [B]
        weights = torch.where(desirable, method.desirable_weight, method.undesirable_weight)
        losses = weights * unpaired_loss(rewards, desirable, method.beta * kl)
        rewards = rewards.detach()
        metrics: dict[str, Tensor | Term] = {
            "kl": losses.new_tensor(kl * len(batch)),
            "rewards/chosen": (rewards[desirable].sum(), "desirable"),
            "rewards/rejected": (rewards[~desirable].sum(), "undesirable"),
        }
        return LossOutput({"kto": (losses.sum(), "samples")}, metrics)

    def units(self, batch: LabelledExperience) -> dict[str, float]:
        desirable = float(batch.label.sum())
        return {"samples": len(batch), "desirable": desirable, "undesirable": len(batch) - desirable}

    def after_step(self, metrics: Metrics) -> None:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]

    def evaluate(self) -> Metrics:
        """Evaluate responses to the evaluation prompts, and log the metrics of held-out samples as `eval/<name>`."""
        held_out = self.held_out if self.precomputed is None else self.precomputed.held_out(self.held_out)
        metrics = self.evaluate_held_out(held_out)
        for name in [name for name in metrics if name.startswith("eval/rewards/chosen")]:
            rejected = metrics.get(name.replace("chosen", "rejected"), 0.0)
            metrics[name.replace("chosen", "margins")] = metrics[name] - rejected
        return self.evaluate_prompts() | metrics

    def _encoded(self, rows: Sequence[Any], labels: Sequence[Any], name: str, labels_name: str) -> FlatRows[Dialogue]:
        """Encode samples, of which the desirable ones have a reward of 1."""

        def checked() -> list[SampleReward]:
            return list(map(float, labels_of(labels, len(rows), labels_name)))

        given = RowRewards.of(labels, rows, checked, "labels of the rows")
        longest, seq2seq = self.config.train.seq_length, self.seq2seq
        return encode_dialogues(
            rows, self.tokenizer, longest, given, seq2seq=seq2seq, template=self.chat_options, name=name
        )

    def _rows(self, dialogues: FlatRows[Dialogue]) -> ColumnRows[LabelledExperience]:
        """Return the element of each sample, with the completion of another, cut to the length that is left."""
        at = first_outputs(dialogues)
        columns = columns_of(dialogues, at)
        response, prompt = columns["response"], columns["prompt"]
        tokens, places = prompt.values.numpy(), zip(prompt.starts.tolist(), at.tolist(), strict=True)
        others = response.taken(torch.tensor(mismatches([tokens[start : start + n].tobytes() for start, n in places])))
        for column, name, mask, scored in (
            (response, "response", "mask", "assistant_mask"),
            (others, "other", "other_mask", "other_scored"),
        ):
            assert column.lengths is not None
            lengths = column.lengths.minimum(self.config.train.seq_length - at)
            ids = column.part(0, lengths)
            columns |= {name: ids, mask: Column.true(lengths), scored: ids.beside(dialogues, "is_output")}
        return ColumnRows(LabelledExperience, {**columns, "label": Column.single(labels_in(dialogues))})

    def log_ratios(self, batch: Completion, reference: Tensor | None = None) -> Tensor:
        """Sum the log-ratio of policy to reference over the tokens of each completion. [B]

        Args:
            batch: The completions.
            reference: Their log-probabilities under the reference; None: the reference computes them. [B, R]
        """
        out = self.model(batch, reference=reference is None)
        known = out.ref_logprobs if reference is None else reference
        assert known is not None
        return sequence_sums(out.logprobs - known, batch.scored)


def labels_of(rewards: Sequence[Any], samples: int, name: str = "rewards") -> list[bool]:
    """Return whether each sample is desirable: its label is true, or its reward above 0.

    Raises:
        DataError: If there are more or fewer labels than samples, or one is no number.
    """
    rewards = list(rewards)  # those in rows are read once
    if missing := [row for row, reward in enumerate(rewards) if reward is None]:
        raise DataError(
            f"{name}: row {missing[0]} has none; a label is true or false, or 1 or 0, and a reward is a number "
            "(above 0: desirable)."
        )
    numbers = [float(reward) if isinstance(reward, bool) else reward for reward in rewards]
    checked = check_rewards(numbers, samples)
    for row, reward in enumerate(checked):
        if isinstance(reward, list):
            raise DataError(
                f"{name}: row {row} has {reward!r}; a label is true or false, or a number (above 0: desirable)."
            )
    return [reward > 0 for reward in checked]  # type: ignore[operator]


def labels_in(dialogues: FlatRows[Dialogue]) -> Tensor:
    """Return whether each encoded sample is desirable. [N] bool"""
    return torch.from_numpy(dialogues.sums("rewards") > 0)


def mismatches(prompts: Sequence[Any]) -> list[int]:
    """Return for each sample the number of the next one that has another prompt; if there is none, of the next one."""
    count = len(prompts)
    found = [(row + 1) % count for row in range(count)]
    if any(prompt != prompts[0] for prompt in prompts):
        for row in reversed(range(2 * count - 1)):  # twice around: a run of equal prompts may go on at the beginning
            row, following = row % count, (row + 1) % count
            if prompts[row] == prompts[following]:
                found[row] = found[following]
    return found


def _add_reference(part: LabelledExperience, under_reference: Callable[[Completion], Tensor]) -> None:
    part.ref_response = under_reference(part)
    part.ref_other = under_reference(part.mismatched())
