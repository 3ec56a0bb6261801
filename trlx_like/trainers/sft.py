"""Supervised fine-tuning: next-token prediction on given texts, or on the outputs of dialogues.

Documented in docs/algorithms/sft.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trlx_like.config.methods.sft import PackingOption, SFTConfig
from trlx_like.data import Completion, padded
from trlx_like.data.columns import Column, ColumnRows, MadeRows
from trlx_like.data.flat import FlatRows
from trlx_like.errors import ConfigError
from trlx_like.functional.masked import masked_sum
from trlx_like.imports import import_name
from trlx_like.models.layout import keeps_packed_apart
from trlx_like.models.neftune import noisy_embeddings
from trlx_like.models.policy import LanguagePolicy
from trlx_like.models.unread import lowest_blocks
from trlx_like.pipelines.dialogues import Dialogue, columns_of, encode_dialogues, first_outputs
from trlx_like.pipelines.formatting import formatted
from trlx_like.pipelines.packing import Packing, fill_blocks, fit_best
from trlx_like.pipelines.rows import named_sets
from trlx_like.pipelines.truncation import Truncation
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.context import EMBEDDINGS
from trlx_like.trainers.text import TextTrainer

MOST_NATS = 700.0
"""Largest loss whose exponential, the perplexity, is a finite float."""


@dataclass
class SFTExperience(Completion):
    """Hold rows of one sample, or of several packed samples: the first token is the prompt, the others the response.

    For an encoder-decoder, prompt and response are those of the sample.
    """

    target: Tensor = padded(value=False)  # [B, R] bool, the tokens that are trained on
    segment: Tensor | None = padded(value=-1, default=None)  # [B, R] int64, number of the packed sample of each token

    @property
    def scored(self) -> Tensor:
        """The tokens that are trained on. [B, R] bool"""
        return self.target

    def inputs(self, start: int | None = None) -> dict[str, Tensor]:
        """Return the arguments of a model's forward pass.

        Packed rows have position ids that restart with each sample, in place of an attention mask.

        Args:
            start: First token of the decoder, for an encoder-decoder; None for a causal model.
        """
        inputs = super().inputs(start)
        if self.segment is None:
            return inputs
        segment = torch.cat([torch.zeros_like(self.prompt), self.segment], dim=1)  # [B, 1 + R]
        index = torch.arange(segment.shape[1], device=segment.device).expand_as(segment)
        begins = torch.cat([torch.ones_like(segment[:, :1]), segment.diff(dim=1)], dim=1) != 0
        first = torch.where(begins, index, 0).cummax(dim=1).values
        return {"input_ids": inputs["input_ids"], "position_ids": index - first}

    def without_last(self) -> Completion:
        """Return what a causal model has to read: all of rows that hold several samples."""
        return super().without_last() if self.segment is None else self


class SFTTrainer(TextTrainer[SFTExperience]):
    """Fine-tune a policy by maximum likelihood of the samples' outputs."""

    method_class = SFTConfig
    experience_class = SFTExperience
    offline = True
    keep_dropout = True
    uses = frozenset({"samples", "eval_samples", "eval_prompts"})
    needs: ClassVar[tuple[str, ...]] = ("samples",)
    method: SFTConfig

    def build(self, tokenizer: Any = None) -> None:
        option = "packing" if self.method.packing else "eval_packing" if self.method.eval_packing else None
        if self.seq2seq and option:
            raise ConfigError(f"method.{option}: an encoder-decoder would mix packed samples; set it to false.")
        super().build(tokenizer)
        if option and not keeps_packed_apart(lowest_blocks(self.model.lm, 2)):
            family = type(self.model.lm).__name__
            raise ConfigError(f"method.{option}: {family} would mix the samples of a packed row; set it to false.")
        if self.method.neftune_noise_alpha is not None:
            if self.model.trunk is not None:
                self.trunk.drop("method.neftune_noise_alpha adds other noise in each step")
            self.model.compaction = None  # as it does to each row

    def read_data(self) -> None:
        packing = self.method.held_out_packing
        self.dialogues = self._encoded(self.data["samples"], "samples", self.method.packing)
        self.held_out: dict[str, Sequence[SFTExperience]] = {}
        for name, place, samples in named_sets(self.data.get("eval_samples"), "eval_samples"):
            rows = self._in_rows(self._encoded(samples, place, packing), packing)
            self.held_out[name] = rows.taken(torch.arange(len(rows)))  # made once, as each evaluation reads all of them

    def make_experience(self) -> Metrics:
        dialogues = self.dialogues
        rows = self._in_rows(dialogues, self.method.packing)
        self.push_to_store(rows, whole=True)
        learned = dialogues.values("is_output").sum()  # packing loses and repeats no output
        sizes = {"data/samples": len(dialogues), "data/rows": len(rows), "data/tokens": learned}
        lost = Truncation(dialogues).metrics()
        return {name: float(size) for name, size in sizes.items()} | lost

    def loss(self, batch: SFTExperience) -> LossOutput:
        alpha = self.method.neftune_noise_alpha
        if alpha is None or not self.model.training:
            return negative_log_likelihood(self.model, batch)
        with noisy_embeddings(self.model.lm, batch, alpha, self.run.stream(EMBEDDINGS, self.progress.step)):
            return negative_log_likelihood(self.model, batch)

    def units(self, batch: SFTExperience) -> float:
        return float(batch.target.sum())

    def after_step(self, metrics: Metrics) -> None:
        metrics["perplexity"] = _perplexity(metrics["losses/total_loss"])

    def evaluate(self) -> Metrics:
        """Evaluate responses to the evaluation prompts, and log loss and perplexity of the held-out samples."""
        metrics = self.evaluate_held_out(self.held_out)
        losses = {name: value for name, value in metrics.items() if name.startswith("eval/losses/total_loss")}
        perplexities = {name.replace("losses/total_loss", "perplexity"): _perplexity(losses[name]) for name in losses}
        return self.evaluate_prompts() | metrics | perplexities

    def _encoded(self, rows: Sequence[Any], name: str, packing: PackingOption) -> FlatRows[Dialogue]:
        function = self.method.formatting_func
        if isinstance(function, str):
            function = import_name(function, "method.formatting_func")
        samples = rows if function is None else formatted(rows, function)
        longest = None if packing else self.config.train.seq_length
        return encode_dialogues(
            samples, self.tokenizer, longest, seq2seq=self.seq2seq, template=self.chat_options, name=name
        )

    def _in_rows(
        self, dialogues: FlatRows[Dialogue], packing: PackingOption
    ) -> ColumnRows[SFTExperience] | MadeRows[SFTExperience]:
        """Return the element of each sample, or of each row of `train.seq_length` tokens into which they are packed."""
        if packing:
            fill = fill_blocks if packing == "blocks" else fit_best
            return _packed(fill(dialogues, self.config.train.seq_length))
        return _rows(dialogues, self.seq2seq)


def negative_log_likelihood(model: LanguagePolicy, batch: Completion) -> LossOutput:
    """Return the loss of maximum likelihood: the sum of -log p over the trained tokens (`scored`) of a batch."""
    return LossOutput(masked_sum(-model(batch).logprobs, batch.scored))


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, MOST_NATS))


def _rows(dialogues: FlatRows[Dialogue], seq2seq: bool = False) -> ColumnRows[SFTExperience]:
    """Return the element of each sample."""
    columns = columns_of(dialogues, first_outputs(dialogues) if seq2seq else None)
    return ColumnRows(SFTExperience, {**columns, "target": columns["response"].beside(dialogues, "is_output")})


def _packed(packing: Packing) -> MadeRows[SFTExperience]:
    """Return the element of each packed row."""

    def made(rows: Tensor) -> ColumnRows[SFTExperience]:
        columns, rest = packing.taken(rows), packing.sizes[rows] - 1
        one = torch.ones_like(rest)
        names = {"response": "ids", "target": "learned", "segment": "piece"}
        shifted = {name: columns[of].part(1, rest) for name, of in names.items()}
        prompt = {"prompt": columns["ids"].part(0, one), "prompt_mask": Column.true(one)}
        return ColumnRows(SFTExperience, {**prompt, "mask": Column.true(rest), **shifted})

    return MadeRows(made, packing.sizes)
