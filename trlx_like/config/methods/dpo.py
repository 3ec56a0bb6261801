"""Options of DPO: those of TRL's DPOTrainer, the ones it has dropped since included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from trlx_like.config.method import Sections, TextMethodConfig
from trlx_like.config.problems import Accepts, Problem, listed

LOSS_TYPES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
    *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)

# What each option acts on. Given beside other losses alone it would do nothing, or mean something else.
DIVERGENT = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")
SMOOTHED = ("sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired")
SORTED = ("aot", "aot_unpaired")


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _loss_types(names: list[str]) -> list[str]:
    if not names or any(name not in LOSS_TYPES for name in names):
        raise ValueError
    return names


class DPOConfig(TextMethodConfig):
    """Direct preference optimisation (Rafailov et al. 2023), and the losses that have followed it."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference (tau in IPO). A smaller value lets the policy go further."""
    loss_type: Annotated[
        list[str],
        BeforeValidator(_as_list),
        AfterValidator(_loss_types),
        Accepts(f"one of {', '.join(LOSS_TYPES)}, or a list of them"),
    ] = ["sigmoid"]
    """Name of the loss, or a list of losses to add up."""
    loss_weights: list[float] | None = None
    """Weight of each loss in `loss_type`; null: 1 for each."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a preference label is wrong; for sigmoid, sigmoid_norm, robust, exo_pair and aot."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence between policy and reference that the loss is derived from."""
    f_alpha_divergence_coef: float = 0.5
    """Coefficient of the alpha divergence: 1 equals reverse_kl, 0 equals forward_kl."""
    discopop_tau: float = Field(default=0.05, gt=0)
    """Temperature of the loss discopop."""
    ld_alpha: float | None = Field(default=None, ge=0, le=1)
    """Weight of the extra tokens of the longer completion of a pair (LD-DPO); null: 1."""
    use_weighting: bool = False
    """Weight each pair by the probability that the policy itself would write it (WPO)."""
    rpo_alpha: float | None = Field(default=None, gt=0)
    """Weight of an added negative log-likelihood of the chosen completions (RPO); null: none."""

    reference_free: bool = False
    """Use no reference model: every text has the same reference probability."""
    precompute_ref_log_probs: bool | None = None
    """Compute reference log-probabilities once, before training; null: do so unless the reference moves."""
    sync_ref_model: bool = False
    """Update the reference towards the policy during training (TR-DPO)."""
    ref_model_mixup_alpha: float = Field(default=0.6, gt=0, le=1)
    """Weight of the policy in each update of the reference; 1: the reference becomes the policy."""
    ref_model_sync_steps: int = Field(default=512, ge=1)
    """Number of optimizer steps between two updates of the reference."""
    disable_dropout: bool = True
    """Switch dropout off in training."""

    max_prompt_length: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of a prompt; null: limited by `train.seq_length` alone."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """What to keep of a pair that is longer than `train.seq_length`: its start or its end."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What to do with a pair that is longer than `train.seq_length`."""
    generate_during_eval: bool = False
    """Show completions of the reference beside those of the policy in evaluations."""

    @property
    def weights(self) -> dict[str, float]:
        """Return the losses with their weights; the term of RPO is the loss sft."""
        weights = dict(zip(self.loss_type, self.loss_weights or [1.0] * len(self.loss_type), strict=True))
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
        names = self.loss_type
        if len(set(names)) < len(names):
            yield _problem("loss_type", f"{names} names a loss twice; weigh it with method.loss_weights.")
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            yield _problem("loss_weights", f"has {len(self.loss_weights)} weights for {len(names)} losses.")
        if self.loss_weights is not None and (min(self.loss_weights, default=0) < 0 or not any(self.loss_weights)):
            yield _problem("loss_weights", f"{self.loss_weights} must be at least 0, and not all 0.")
        without = [name for name in names if name not in (*DIVERGENT, "sft")]
        if self.f_divergence_type != "reverse_kl" and without:
            yield _problem("f_divergence_type", f"{_these(without)} only reverse_kl; use {_any_of(DIVERGENT)}.")
        if self.label_smoothing > 0 and not set(names) & set(SMOOTHED):
            yield _problem("label_smoothing", f"{_these(names)} none; set it to 0, or use {_any_of(SMOOTHED)}.")
        if self.label_smoothing == 0 and "exo_pair" in names:
            yield _problem("label_smoothing", "exo_pair is infinite without; set it above 0, for example to 0.001.")
        sorting = [name for name in names if name in SORTED]
        if self.use_weighting and sorting:
            yield _problem("use_weighting", f"{_these(sorting)} no weights: sorting takes pairs apart.")
        if self.use_weighting and names == ["sft"]:
            yield _problem("use_weighting", "sft has no pairs to weigh; leave it out.")
        if self.rpo_alpha is not None and "sft" in names:
            yield _problem("rpo_alpha", "adds the same term as loss_type sft; give one of the two.")

    def _reference_problems(self) -> Iterator[Problem]:
        for name in ("reference_free", "sync_ref_model"):
            if getattr(self, name) and self.precompute_ref_log_probs:
                reason = "there is no reference" if name == "reference_free" else "the reference moves"
                yield _problem("precompute_ref_log_probs", f"true does not go with method.{name}: {reason}.")
        if self.reference_free and self.sync_ref_model:
            yield _problem("sync_ref_model", "true does not go with method.reference_free: there is no reference.")

    def conflicts_with(self, config: Sections) -> Iterable[Problem]:
        names = [name for name in self.loss_type if name in SORTED]
        if names and config.train.minibatch_size not in (None, config.train.batch_size):
            given = config.train.minibatch_size
            yield Problem(
                ("train", "minibatch_size"), f"{given} cuts the batch that {listed(names)} sorts as a whole; use null."
            )
        if self.reference_free and config.model.ref_model_path is not None:
            yield _problem("reference_free", "true does not go with model.ref_model_path; drop one of them.")
        if self.sync_ref_model and config.model.peft_config is not None:
            yield _problem("sync_ref_model", "true does not go with model.peft_config, whose reference cannot move.")

    def unused_options(self) -> list[str]:
        names, found = self.loss_type, []
        if self.f_divergence_type != "alpha_divergence":
            found.append("f_alpha_divergence_coef")
        if "discopop" not in names:
            found.append("discopop_tau")
        if not self.sync_ref_model:
            found += ["ref_model_mixup_alpha", "ref_model_sync_steps"]
        return [name for name in found if self.changed(name)]


def _problem(name: str, sentence: str) -> Problem:
    return Problem(("method", name), sentence)


def _these(names: Iterable[str]) -> str:
    names = list(names)
    return f"{' and '.join(names)} {'knows' if len(names) == 1 else 'know'}"


def _any_of(names: Iterable[str]) -> str:
    return listed(list(names))
