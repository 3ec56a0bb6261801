"""Options of DPO: those of TRL's DPOTrainer, including some that TRL has removed since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from trlx_like.config.method import DropoutMethodConfig, Sections, TextMethodConfig
from trlx_like.config.problems import Accepts, Problem, at, listed, only
from trlx_like.config.resume import Applied, OfData, OfReference

# The options of each loss in addition to beta. `trainers/dpo_losses.py` has the formulas under the same names. If only
# other losses are used, an option would have no effect or another meaning.
LOSSES: dict[str, frozenset[str]] = {
    "sigmoid": frozenset({"f_divergence_type", "label_smoothing", "use_weighting"}),
    "hinge": frozenset({"f_divergence_type", "use_weighting"}),
    "ipo": frozenset({"f_divergence_type", "use_weighting"}),
    "exo_pair": frozenset({"f_divergence_type", "label_smoothing", "use_weighting"}),
    "nca_pair": frozenset({"use_weighting"}),
    "robust": frozenset({"f_divergence_type", "label_smoothing", "use_weighting"}),
    "bco_pair": frozenset({"use_weighting"}),
    "sppo_hard": frozenset({"use_weighting"}),
    "aot": frozenset({"label_smoothing", "whole_batch"}),
    "aot_unpaired": frozenset({"label_smoothing", "whole_batch"}),
    "apo_zero": frozenset({"use_weighting"}),
    "apo_down": frozenset({"use_weighting"}),
    "discopop": frozenset({"f_divergence_type", "discopop_tau", "use_weighting"}),
    "sft": frozenset(),
    "sigmoid_norm": frozenset({"f_divergence_type", "label_smoothing", "use_weighting"}),
}
SORTED = [name for name, takes in LOSSES.items() if "whole_batch" in takes]
"""Losses that sort the batch: they need the whole batch at once, and their values do not belong to single pairs."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class DPOConfig(DropoutMethodConfig, TextMethodConfig):
    """Direct preference optimisation (Rafailov et al. 2023), and the losses that have followed it."""

    beta: Applied[float] = Field(default=0.1, gt=0)
    """Strength of the pull to the reference (tau in IPO). A smaller value lets the policy go further."""
    loss_type: Applied[
        Annotated[
            str | list[str],
            BeforeValidator(_as_list),
            only(lambda names: names and LOSSES.keys() >= set(names)),
            Accepts(f"one of {', '.join(LOSSES)}, or a list of them"),
            WithJsonSchema(
                {"anyOf": [{"enum": [*LOSSES]}, {"type": "array", "items": {"enum": [*LOSSES]}, "minItems": 1}]}
            ),
        ]
    ] = ["sigmoid"]
    """Name of the loss, or a list of losses to add up."""
    loss_weights: Applied[list[float] | None] = None
    """Weight of each loss in `loss_type`; null: 1 for each."""
    label_smoothing: Applied[float] = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a preference label is wrong; for sigmoid, sigmoid_norm, robust, exo_pair and aot."""
    f_divergence_type: Applied[Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]] = "reverse_kl"
    """Divergence between policy and reference that the loss is derived from."""
    f_alpha_divergence_coef: Applied[float] = 0.5
    """Coefficient of the alpha divergence: 1 equals reverse_kl, 0 equals forward_kl."""
    discopop_tau: Applied[float] = Field(default=0.05, gt=0)
    """Temperature of the loss discopop."""
    ld_alpha: Applied[float | None] = Field(default=None, ge=0, le=1)
    """Weight of the extra tokens of the longer completion of a pair (LD-DPO); null: 1."""
    use_weighting: Applied[bool] = False
    """Weight each pair by the probability that the policy itself would write it (WPO)."""
    rpo_alpha: Applied[float | None] = Field(default=None, gt=0)
    """Weight of an added negative log-likelihood of the chosen completions (RPO); null: none."""

    reference_free: OfReference[bool] = False
    """Use no reference model: every text has the same reference probability."""
    precompute_ref_log_probs: OfReference[bool | None] = None
    """Compute reference log-probabilities once, before training; null: do so unless the reference moves."""
    sync_ref_model: OfReference[bool] = False
    """Update the reference towards the policy during training (TR-DPO)."""
    ref_model_mixup_alpha: Applied[float] = Field(default=0.6, gt=0, le=1)
    """Weight of the policy in each update of the reference; 1: the reference becomes the policy."""
    ref_model_sync_steps: Applied[int] = Field(default=512, ge=1)
    """Number of optimizer steps between two updates of the reference."""

    max_prompt_length: OfData[int | None] = Field(default=None, ge=1)
    """Maximum number of tokens of a prompt; null: limited by `train.seq_length` alone."""
    truncation_mode: OfData[Literal["keep_start", "keep_end"]] = "keep_start"
    """What to keep of a pair that is longer than `train.seq_length`: its start or its end."""
    too_long: OfData[Literal["truncate", "drop"]] = "truncate"
    """What to do with a pair that is longer than `train.seq_length`."""
    generate_during_eval: Applied[bool] = False
    """Show completions of the reference beside those of the policy in evaluations."""

    @property
    def losses(self) -> list[str]:
        """Return the names in `loss_type` as a list."""
        return [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type

    @property
    def weights(self) -> dict[str, float]:
        """Return the losses with their weights; the term of RPO is the loss sft."""
        weights = dict(zip(self.losses, self.loss_weights or [1.0] * len(self.losses), strict=True))
        return weights if self.rpo_alpha is None else {**weights, "sft": self.rpo_alpha}

    @property
    def precomputes(self) -> bool:
        """Return whether reference log-probabilities are computed once and not in every step."""
        fixed = not (self.sync_ref_model or self.reference_free)
        return fixed if self.precompute_ref_log_probs is None else self.precompute_ref_log_probs

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        yield from self._loss_problems()
        yield from self._reference_problems()

    def _loss_problems(self) -> Iterator[Problem]:
        names = self.losses
        if len(set(names)) < len(names):
            yield at("method.loss_type", f"{names} names a loss twice; weigh it with method.loss_weights.")
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            yield at("method.loss_weights", f"has {len(self.loss_weights)} weights for {len(names)} losses.")
        if self.loss_weights is not None and (min(self.loss_weights, default=0) < 0 or not any(self.loss_weights)):
            yield at("method.loss_weights", f"{self.loss_weights} must be at least 0, and not all 0.")
        divergent, smoothed = _taking("f_divergence_type"), _taking("label_smoothing")
        without = [name for name in names if name not in (*divergent, "sft")]
        if self.f_divergence_type != "reverse_kl" and without:
            yield at("method.f_divergence_type", f"{_these(without)} only reverse_kl; use {listed(divergent)}.")
        if self.label_smoothing > 0 and not set(names) & set(smoothed):
            yield at("method.label_smoothing", f"{_these(names)} none; set it to 0, or use {listed(smoothed)}.")
        if self.label_smoothing == 0 and "exo_pair" in names:
            yield at("method.label_smoothing", "exo_pair is infinite without; set it above 0, for example to 0.001.")
        sorting = [name for name in names if name in SORTED]
        if self.use_weighting and sorting:
            yield at("method.use_weighting", f"{_these(sorting)} no weights: sorting takes pairs apart.")
        if self.use_weighting and names == ["sft"]:
            yield at("method.use_weighting", "sft has no pairs to weigh; leave it out.")
        if self.rpo_alpha is not None and "sft" in names:
            yield at("method.rpo_alpha", "adds the same term as loss_type sft; give one of the two.")

    def _reference_problems(self) -> Iterator[Problem]:
        for name in ("reference_free", "sync_ref_model"):
            if getattr(self, name) and self.precompute_ref_log_probs:
                reason = "there is no reference" if name == "reference_free" else "the reference moves"
                yield at("method.precompute_ref_log_probs", f"true does not go with method.{name}: {reason}.")
        if self.reference_free and self.sync_ref_model:
            yield at("method.sync_ref_model", "true does not go with method.reference_free: there is no reference.")

    def conflicts_with(self, config: Sections) -> Iterable[Problem]:
        names = [name for name in self.losses if name in SORTED]
        if names and config.train.minibatch_size not in (None, config.train.batch_size):
            given = config.train.minibatch_size
            yield at("train.minibatch_size", f"{given} cuts the batch that {listed(names)} sorts as a whole; use null.")
        if self.reference_free and config.model.ref_model_path is not None:
            yield at("method.reference_free", "true does not go with model.ref_model_path; drop one of them.")
        if self.sync_ref_model and config.model.peft_config is not None:
            yield at("method.sync_ref_model", "true does not go with model.peft_config, whose reference cannot move.")

    def acting(self) -> dict[str, bool]:
        return {
            "f_alpha_divergence_coef": self.f_divergence_type == "alpha_divergence",
            "discopop_tau": bool(set(self.losses) & set(_taking("discopop_tau"))),
            **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), self.sync_ref_model),
        }


def _these(names: Iterable[str]) -> str:
    names = list(names)
    return f"{' and '.join(names)} {'knows' if len(names) == 1 else 'know'}"


def _taking(option: str) -> list[str]:
    return [name for name, takes in LOSSES.items() if option in takes]
