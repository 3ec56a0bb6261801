"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the losses that have followed it.

The implicit reward of a completion is beta times the log-ratio of policy to reference. The loss is that of a
classifier which picks the chosen completion of each pair. No reward model, no sampling. Documented in
docs/algorithms/dpo.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trlx_like.checkpoint import fields
from trlx_like.config.methods.dpo import SORTED, DPOConfig
from trlx_like.data import Completion, PreferenceExperience
from trlx_like.data.columns import Column, ColumnRows
from trlx_like.data.flat import FlatRows
from trlx_like.errors import ConfigError
from trlx_like.functional.sequences import policy_weights, sequence_sums
from trlx_like.models.loading import load_model
from trlx_like.models.policy import PolicyOutput
from trlx_like.pipelines.preferences import Preference, configured_preferences
from trlx_like.pipelines.rows import named_sets
from trlx_like.pipelines.truncation import Truncation
from trlx_like.samplers.engines import TransformersEngine
from trlx_like.samplers.text import TextSampler
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.dpo_losses import FORMULAS, Pairs
from trlx_like.trainers.evaluation import texts
from trlx_like.trainers.optimise import Term
from trlx_like.trainers.precomputed import Precomputed
from trlx_like.trainers.text import TextTrainer

FIELDS = ("prompt", "chosen", "rejected", "chosen_mask", "rejected_mask")
"""What a resumed run must have in common with the pairs of its beginning."""


class DPOTrainer(TextTrainer[PreferenceExperience]):
    """Train a policy on given preference pairs, relative to a reference: the initial policy or another model."""

    method_class = DPOConfig
    experience_class = PreferenceExperience
    offline = True
    uses = frozenset({"preferences", "eval_preferences", "eval_prompts"})
    needs = ("preferences",)
    method: DPOConfig

    def build(self, tokenizer: Any = None) -> None:
        names = [name for name in self.method.losses if name in SORTED]
        if names and self.world.size > 1:
            raise ConfigError(
                f"method.loss_type ({names[0]}) sorts the whole batch, which {self.world.size} processes do not have "
                "in one place; run it on one."
            )
        super().build(tokenizer)
        self.precomputed: Precomputed[PreferenceExperience] | None = None
        if self.method.precomputes:
            other = None if self.config.model.ref_model_path is None else self.load_reference
            given = {"preferences": [self.preferences], "eval_preferences": list(self.eval_preferences.values())}
            parts = self.run, self.model, self.trunk, self.store
            self.precomputed = Precomputed(*parts, other, _add_reference, given, FIELDS)
        elif not self.method.reference_free:
            self.add_reference(moving=self.method.sync_ref_model)
        if self.method.sync_ref_model:
            self.model.followed()  # refuses a reference of another kind
        self.reference_texts: dict[str, list[str]] = {}
        self.state.register("dpo", fields(self, "reference_texts"))

    def read_data(self) -> None:
        encoded = partial(configured_preferences, self.config, tokenizer=self.tokenizer)
        self.preferences = encoded(self.data["preferences"], name="preferences")
        held_out = named_sets(self.data.get("eval_preferences"), "eval_preferences")
        self.eval_preferences = {name: encoded(rows, name=place) for name, place, rows in held_out}

    def make_experience(self) -> Metrics:
        pairs = self.preferences
        rows = _rows(pairs)
        if self.precomputed is not None:
            self.push_to_store(self.precomputed.share(rows))
        elif self.model.trunk is not None:  # each process computes its part
            self.push_to_store(rows[self.world.rank :: self.world.size])
        else:
            self.push_to_store(rows, whole=True)
        tokens = pairs.sizes().sum() - 2 * pairs.values("prompt").sum()
        truncation = Truncation(pairs, len(self.data["preferences"]))
        return {"data/pairs": float(len(pairs)), "data/tokens": float(tokens), **truncation.metrics()}

    def loss(self, batch: PreferenceExperience) -> LossOutput:
        method = self.method
        live = not (method.precomputes or method.reference_free)
        out = self.model(batch.completions(), reference=live, statistics=True)
        pairs = self.pairs(batch, out)
        losses = {name: FORMULAS[name](pairs, method) for name in method.weights if name != "sft"}  # each [B]
        if method.use_weighting:
            weights = self.pair_weights(batch, out)
            losses = {name: weights * loss for name, loss in losses.items()}
        sums = {name: (loss.sum(), "pairs") for name, loss in losses.items()}
        if "sft" in method.weights:
            logprobs, _ = batch.sides(out.logprobs)
            sums["sft"] = (-sequence_sums(logprobs, batch.scored[0]).sum(), "chosen_tokens")
        terms = {name: (weight * sums[name][0], sums[name][1]) for name, weight in method.weights.items()}
        metrics = {f"losses/{name}": term for name, term in sums.items()}
        return LossOutput(terms, {**metrics, **self.metrics(batch, out, pairs)})

    def units(self, batch: PreferenceExperience) -> dict[str, float]:
        chosen, rejected = (float(scored.sum()) for scored in batch.scored)
        return {
            "pairs": len(batch),
            "chosen_tokens": chosen,
            "rejected_tokens": rejected,
            "tokens": chosen + rejected,
        }

    def after_step(self, metrics: Metrics) -> None:
        if self.method.sync_ref_model and self.progress.step % self.method.ref_model_sync_steps == 0:
            alpha = self.method.ref_model_mixup_alpha
            self.run.backend.write(self.model.followed(), lambda reference, policy: reference.lerp(policy, alpha))

    # Parts of the loss.

    def pairs(self, batch: PreferenceExperience, out: PolicyOutput) -> Pairs:
        """Sum the log-probabilities of each completion under policy and reference."""
        if out.ref_logprobs is not None:
            reference = batch.sides(out.ref_logprobs)
        elif batch.ref_chosen is not None and batch.ref_rejected is not None:
            reference = batch.ref_chosen, batch.ref_rejected
        else:
            reference = batch.sides(torch.zeros_like(out.logprobs))
        alpha = 1.0 if self.method.ld_alpha is None else self.method.ld_alpha
        return Pairs.of(batch.sides(out.logprobs), reference, batch.scored, alpha)

    def pair_weights(self, batch: PreferenceExperience, out: PolicyOutput) -> Tensor:
        """Weight each pair by how likely the policy is to sample both of its completions (WPO). [B]"""
        assert out.statistics is not None
        sides = zip(batch.sides(out.logprobs), batch.sides(out.statistics.log_collision), strict=True)
        first, second = (policy_weights(*side, mask) for side, mask in zip(sides, batch.scored, strict=True))
        return first * second

    @torch.no_grad()
    def metrics(self, batch: PreferenceExperience, out: PolicyOutput, pairs: Pairs) -> dict[str, Tensor | Term]:
        """Return the metrics beside the loss, as sums over pairs or over tokens."""
        assert out.statistics is not None
        mean_logits = batch.sides(out.statistics.mean_logit)
        right, _ = batch.sides(out.statistics.is_likeliest.float())
        return {
            **{name: column.sum() for name, column in pairs.metrics(self.method.beta).items()},
            "logits/chosen": (mean_logits[0].sum(), "chosen_tokens"),
            "logits/rejected": (mean_logits[1].sum(), "rejected_tokens"),
            "entropy": (out.statistics.entropy.sum(), "tokens"),
            "mean_token_accuracy": (right.sum(), "chosen_tokens"),
        }

    # Evaluation.

    def evaluate(self) -> Metrics:
        """Evaluate responses to the evaluation prompts, and log the metrics of held-out pairs as `eval/<name>`."""
        start = self.progress.step == 0  # the policy is its own reference
        if start and self.method.generate_during_eval:
            sampler, options = self._reference_sampler(), self.method.gen_kwargs
            self.reference_texts = texts(self.run, sampler, self.eval_batches(), options)
        held_out: Mapping[str, Sequence[PreferenceExperience]]
        held_out = {name: _rows(pairs) for name, pairs in self.eval_preferences.items()}
        if self.precomputed is not None:
            held_out = self.precomputed.held_out(held_out)
        return self.evaluate_prompts(self.reference_texts) | self.evaluate_held_out(held_out)

    def _reference_sampler(self) -> TextSampler:
        """Return a sampler that generates with the reference."""
        path = self.config.model.ref_model_path
        if path is None:
            self.sync_sampler()
            return self.sampler
        lm = load_model(path, self.config.model).to(self.device).eval()  # type: ignore[arg-type]
        return self.sampler_of(TransformersEngine(lm, self.tokenizer, self.model.allowed))  # engines hold the policy


def _rows(pairs: FlatRows[Preference]) -> ColumnRows[PreferenceExperience]:
    """Return the element of each pair."""
    asked = torch.from_numpy(pairs.values("prompt"))  # lengths [N]
    columns = {"prompt": Column.of(pairs, "chosen").part(0, asked), "prompt_mask": Column.true(asked)}
    for side in ("chosen", "rejected"):
        rest = torch.from_numpy(pairs.lengths(side)) - asked
        columns[side] = Column.of(pairs, side).part(asked, rest)
        columns[f"{side}_mask"] = whole = Column.true(rest)
        columns[f"{side}_assistant_mask"] = Column.of(pairs, f"{side}_mask").either(whole)
    return ColumnRows(PreferenceExperience, columns)


def _add_reference(part: PreferenceExperience, under_reference: Callable[[Completion], Tensor]) -> None:
    part.ref_chosen, part.ref_rejected = part.sides(under_reference(part.completions()))
