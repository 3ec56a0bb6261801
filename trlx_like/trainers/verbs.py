"""The verbs: methods that every algorithm implements, and hooks with defaults. The loop in `base.py` calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

from trlx_like.checkpoint import TrainState
from trlx_like.config import MethodConfig, TRLConfig
from trlx_like.config.elsewhere import answers
from trlx_like.data import Experience, RolloutStore
from trlx_like.data.columns import batch_of
from trlx_like.data.flat import View
from trlx_like.distributed import World
from trlx_like.errors import ConfigError
from trlx_like.samplers.agreement import Agreement
from trlx_like.trainers.clock import Clock
from trlx_like.trainers.context import Metrics, Run
from trlx_like.trainers.optimise import LossOutput, Optimisation, Units
from trlx_like.trainers.progress import Progress
from trlx_like.trainers.trunk import TrunkStates

E = TypeVar("E", bound=Experience)


class OfRun:
    """The parts of `self.run` under short names, which plugins and callbacks use."""

    run: Run
    accelerator: Accelerator
    """The `accelerate.Accelerator` of this process."""
    device: torch.device
    """The device of this process."""
    world: World
    """The processes of the run, with the collective operations between them."""
    clock: Clock
    """Measures the seconds spent in each phase."""
    progress: Progress
    """How many steps and rounds are done."""
    state: TrainState
    """Everything that a checkpoint holds."""

    if not TYPE_CHECKING:  # for a type checker, what is missing is missing

        def __getattr__(self, name: str) -> Any:
            """Answer a method of another library's trainer with the name here."""
            if words := answers("methods").get(name):
                raise AttributeError(f"{type(self).__name__} has no {name}. Here this is {words}.")
            return object.__getattribute__(self, name)  # raises the first error again


class Verbs(OfRun, ABC, Generic[E]):
    """Define what one algorithm does in the loop: `build`, `make_experience`, `loss`, `units`."""

    method_class: ClassVar[type[MethodConfig]]
    experience_class: type[E]
    offline: ClassVar[bool] = False
    """True if experience is made once, from given data; `train.epochs` then counts the passes over it."""
    uses: ClassVar[frozenset[str]] = frozenset()
    """The data arguments of `train` that this trainer takes."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Arguments that `learn` requires, `reward_fn` included. Offline trainers require them on construction."""

    config: TRLConfig
    method: Any
    model: nn.Module
    tokenizer: Any
    store: RolloutStore[E]
    optimisation: Optimisation
    agreement: Agreement
    trunk: TrunkStates | None = None
    """Keeps what frozen blocks make of a sample, for trainers whose models have such blocks."""

    # The four verbs.

    @abstractmethod
    def build(self, tokenizer: Any = None) -> None:
        """Make `self.model` and whatever produces samples. The optimiser is made from the model afterwards."""

    @abstractmethod
    def make_experience(self) -> Metrics:
        """Fill `self.store` with this process's share of a round, and return what to log about it.

        A RewardError or SamplerError must be raised on all processes; they save the run as it was before the round.
        """

    @abstractmethod
    def loss(self, batch: E) -> LossOutput:
        """Return the loss of a micro-batch as sums over its units. It depends on the batch and the weights alone."""

    def units(self, batch: E) -> Units:
        """Count the units of a micro-batch: one number, or several by name if the loss has several terms."""
        return len(batch)

    # Hooks with defaults.

    statistics: Any = None  # the type of a method that subclasses may have would forbid them to be without
    """What the loss has to know of the whole global batch, such as the mean of a divergence; None: nothing.

    A method `statistics(batch: E) -> Mapping[str, Tensor | Term]` returns sums over the units of a micro-batch, as the
    metrics of a `LossOutput`. It is called on all micro-batches before the first backward pass, without gradients. The
    means over the global batch are given to `loss` as keyword arguments of the same names.
    """

    @property
    def passes(self) -> int:
        """How many times a round passes over the store."""
        return self.config.train.epochs if self.offline else 1

    def microbatches(self, batch: E) -> Iterator[E]:
        """Cut a batch to what fits into memory: `train.minibatch_size` rows of similar length."""
        for _, part in batch.microbatches(self.config.train.minibatch_size):
            yield part

    def longest(self, rows: int) -> E:
        """Make a micro-batch of the longest samples that the trainer may meet, to see what memory it needs.

        Offline these are the longest elements of the store or, while it is empty, rows of `train.seq_length` tokens.
        """
        if elements := self.store.elements:
            by_length = self.store.sizes().argsort(stable=True)
            return batch_of(self.experience_class, elements, by_length[-rows:].tolist())
        return self.experience_class.filled(rows, 1, self.config.train.seq_length - 1)

    def push_to_store(self, experience: Sequence[E], *, whole: bool = False) -> None:
        """Add this process's share of elements to the store, or with `whole` the same elements on every process."""
        self.store.push(experience if self.trunk is None else self.trunk.fill(experience, whole), whole=whole)

    def accept(self, metrics: Metrics) -> bool:
        """Decide whether to make a step; False drops its gradients.

        The metrics are those of the global batch, so all processes agree. If they include `policy/ratio_deviation`, the
        first step on fresh experience checks that the samples came from the policy that is trained.
        """
        if not self.offline and "policy/ratio_deviation" in metrics and self.progress.fresh:
            self.agreement.check_step(metrics["policy/ratio_deviation"], self.model)
        return True

    def after_step(self, metrics: Metrics) -> None:
        """Act after each optimiser step, before its metrics are logged."""

    def evaluate(self) -> Metrics:
        """Evaluate the current model and return metrics. The random state is isolated, so training is unaffected."""
        return {}

    def evaluate_held_out(self, sets: Mapping[str, Sequence[E]]) -> Metrics:
        """Compute the metrics of a step on held-out elements, which all processes have and share.

        Args:
            sets: The elements of each set by its name.

        Returns:
            The metrics over all sets as `eval/<name>` and, if there are several, of each as `eval/<name>@<set>`.
        """
        size, found = self.run.microbatch_size, dict[str, float]()
        first = next(iter(sets.values()), [])
        every = first if len(sets) < 2 else [element for elements in sets.values() for element in elements]
        for suffix, elements in [("", every), *((f"@{name}", part) for name, part in sets.items() if len(sets) > 1)]:
            sizes = [entries(element) for element in elements]
            own = sorted(self.world.share(list(range(len(sizes)))), key=sizes.__getitem__)  # saves padding
            chunks = [own[start : start + size] for start in range(0, len(own), size)]
            parts = View(chunks, partial(batch_of, self.experience_class, elements))  # each is made when it is read
            metrics = self.optimisation.measure(parts, self.loss, self.units)
            found |= {f"eval/{name}{suffix}": value for name, value in metrics.items()}
        return found

    def export(self, directory: Path, merged: bool | None) -> None:
        """Write the trained model to a folder. Only the main process calls it, through `save_pretrained`.

        Args:
            directory: The folder.
            merged: Whether an adapter is merged into the model's weights; None: what fits the trainer best.
        """

    @property
    def optimizer(self) -> Any:
        """The optimiser of the trained parameters, as accelerate wraps it."""
        return self.optimisation.optimizer

    def generate(self, prompts: Sequence[Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Generate from prompts with the current model: token ids, or images from a diffusion model."""
        raise ConfigError(f"{type(self).__name__} trains a model that does not generate.")


def entries(element: Experience) -> int:
    """Count the numbers of an element."""
    return sum(value.numel() for value in vars(element).values() if value is not None)
