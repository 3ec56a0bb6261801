"""The verbs that a trainer fills, and hooks with defaults. `base.py` calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from trlx_like.config import MethodConfig, TRLConfig
from trlx_like.data import Experience, RolloutStore
from trlx_like.errors import ConfigError
from trlx_like.samplers.agreement import Agreement
from trlx_like.trainers.context import Metrics, OfRun
from trlx_like.trainers.optimise import LossOutput, Optimisation, Units

E = TypeVar("E", bound=Experience)


class Verbs(OfRun, ABC, Generic[E]):
    """Define what one algorithm does in the loop: `build`, `make_experience`, `loss`, `units`."""

    method_class: ClassVar[type[MethodConfig]]
    experience_class: type[E]
    offline: ClassVar[bool] = False
    """True: experience is made once, from data, and `train.epochs` are passes over it."""
    uses: ClassVar[frozenset[str]] = frozenset()
    """The data arguments of `train` that this trainer takes."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Which of them, and of `reward_fn`, `learn` cannot do without; an offline trainer is not made without them."""

    config: TRLConfig
    model: nn.Module
    tokenizer: Any
    store: RolloutStore[E]
    optimisation: Optimisation
    agreement: Agreement

    # The four verbs.

    @abstractmethod
    def build(self, tokenizer: Any = None) -> None:
        """Make `self.model` and whatever produces samples. The optimiser is made from the model afterwards."""

    @abstractmethod
    def make_experience(self) -> Metrics:
        """Fill `self.store` with this process's share of a round, and return what to log about it.

        A RewardError or SamplerError must come on all processes, which then save the run as it was before the round.
        """

    @abstractmethod
    def loss(self, batch: E) -> LossOutput:
        """Return the loss of a micro-batch as sums over its units. It depends on the batch and the weights alone."""

    def units(self, batch: E) -> Units:
        """Count the units of a micro-batch: one number, or several by name if the loss has several terms."""
        return len(batch)

    # Hooks with defaults.

    @property
    def passes(self) -> int:
        """Passes over the store in a round."""
        return self.config.train.epochs if self.offline else 1

    def microbatches(self, batch: E) -> Iterator[E]:
        """Cut a batch to what fits into memory: `train.minibatch_size` rows of similar length."""
        for _, part in batch.microbatches(self.config.train.minibatch_size):
            yield part

    def accept(self, metrics: Metrics) -> bool:
        """Decide whether a step is made; False drops its gradients.

        The metrics are those of the global batch, so all processes agree. Where they have `policy/ratio_deviation`,
        the first step on fresh experience must find the policy that the samples came from.
        """
        if not self.offline and "policy/ratio_deviation" in metrics and self.progress.fresh:
            self.agreement.check_step(metrics["policy/ratio_deviation"], self.model)
        return True

    def after_step(self, metrics: Metrics) -> None:
        """Act after each optimiser step, before its metrics are logged."""

    def evaluate(self) -> Metrics:
        """Measure the model as it is. It is called with random numbers of its own, so it changes nothing."""
        return {}

    def evaluate_held_out(self, elements: Sequence[E]) -> Metrics:
        """Measure on this process's held-out elements what a step would log; return it under `eval/<name>`."""
        size, collate = self.run.microbatch_size, self.experience_class.collate
        parts = [collate(elements[start : start + size]) for start in range(0, len(elements), size)]
        metrics = self.optimisation.measure(parts, self.loss, self.units)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def save_pretrained(self, directory: str | Path) -> None:
        """Write what is used after training to a folder, without the trainer's state."""

    def generate(self, prompts: Sequence[Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Generate from prompts with the model as it is: token ids, or images from a diffusion model."""
        raise ConfigError(f"{type(self).__name__} trains a model that does not generate.")
