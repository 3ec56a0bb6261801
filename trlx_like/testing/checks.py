"""Check what every trainer promises on tiny runs: `check_trainer` makes all checks, `TrainerChecks` each alone."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trlx_like.api import make_trainer
from trlx_like.config import TRAINERS, TRLConfig
from trlx_like.errors import ConfigError
from trlx_like.testing.attributes import Watch, changing
from trlx_like.testing.compare import (
    StopAfter,
    apart,
    assert_same,
    assert_same_run,
    must,
    rows,
    run_until_stopped,
)
from trlx_like.testing.exports import Remember, check_export, logits
from trlx_like.testing.ranks import OnFirst, on_ranks
from trlx_like.trainers.callbacks import Callback
from trlx_like.trainers.verbs import entries

ROUNDING = {"gradients": 1e-6, "weights": 2e-6, "metrics": 1e-5}
"""How far numbers may differ that are summed in another order."""
SMALLEST = 1e-3
"""A gradient whose largest entry is below this is too small to be compared."""
# Plain gradient descent on the whole round: one process and two step on the same global batch whatever their order, and
# Adam, which divides by roots of squares, would make much of a rounding error near 0. So would steps that go too far:
# with a rate of .1 a diffusion model is .3 nats from the sampler after a round, and an error grows tenfold in a step.
WHOLE_ROUND: dict[str, Any] = {"train.batch_size": 6, "optimizer.name": "sgd", "optimizer.kwargs": {"lr": 0.03}}
UNSPLIT: dict[str, Any] = {"train.max_grad_norm": None, "train.minibatch_size": None}
AUTO: dict[str, Any] = {"train.resume_from_checkpoint": "auto"}
SIX_STEPS: dict[str, Any] = {
    **{"train.batch_size": 4, "train.total_steps": 6, "train.epochs": 20, "train.eval_interval": 3},
    # The same with Adam: where a gradient is all but 0, eps bounds what it makes of a rounding error.
    "optimizer.kwargs": {"lr": 5e-4, "eps": 1e-6},
}


def check_trainer(
    trainer: type[Any], config: TRLConfig, *, processes: bool = False, not_state: Collection[str] = (), **arguments: Any
) -> None:
    """Check what every trainer promises, on tiny runs: gradients, seeds, resuming, saved state and the export.

    Args:
        trainer: The trainer class, registered with `register_trainer`.
        config: The configuration of a run of seconds that makes at least four steps, such as one of `tiny_run`.
        processes: Also compare runs on two processes with the run on one. Linux and macOS only.
        not_state: Attributes that change in training and need no saving, each with a dot before its name.
        arguments: Those of `trlx_like.train`, such as prompts and reward_fn. They are used by many runs, so a reward
            has to depend on the sample alone.

    Raises:
        AssertionError: With a sentence that says which promise is broken, and where it was seen.
    """
    checks = TrainerChecks(trainer, config, not_state=not_state, **arguments)
    checks.gradients()
    checks.seed()
    checks.resume()
    checks.state()
    checks.export()
    if processes:
        checks.processes()


class TrainerChecks:
    """Check one trainer with one configuration; every method is a check of its own.

    The arguments are those of `check_trainer`. Runs are written to a temporary folder.
    """

    def __init__(
        self, trainer: type[Any], config: TRLConfig, *, not_state: Collection[str] = (), **arguments: Any
    ) -> None:
        self.name, self.not_state, self.arguments = trainer.__name__, not_state, arguments
        if _trainer(config) is not trainer:
            raise ConfigError(f"train.trainer ({config.train.trainer}) is another class than {self.name}.")
        self.config = config
        self._folder = tempfile.TemporaryDirectory(prefix="trlx_like_checks_")
        self.folder = Path(self._folder.name)

    def make(self, folder: str, callbacks: Sequence[Callback] = (), **changes: Any) -> Any:
        """Make the trainer, its run in a folder of that name.

        Args:
            folder: Name of the folder in the temporary folder.
            callbacks: Callbacks beside those of the arguments.
            changes: Options with dotted keys, and arguments of `trlx_like.train`.
        """
        options = {key: value for key, value in changes.items() if "." in key}
        arguments = {**self.arguments, **{key: value for key, value in changes.items() if "." not in key}}
        config = TRLConfig.update(self.config, {"train.checkpoint_dir": str(self.folder / folder), **options})
        if not isinstance(config.model.model_path, str):
            config.model.model_path = copy.deepcopy(config.model.model_path)  # a model is trained in place
        return make_trainer(config, **{**arguments, "callbacks": [*arguments.get("callbacks", ()), *callbacks]})

    def run(self, folder: str, callbacks: Sequence[Callback] = (), **changes: Any) -> Any:
        """Make the trainer as `make` does, and train to the end."""
        trainer = self.make(folder, callbacks, **changes)
        trainer.learn()
        return trainer

    @cached_property
    def whole(self) -> Any:
        """The trainer after a run that nothing interrupted, in the folder `whole`; it is made once."""
        return self.run("whole")

    # The checks.

    def gradients(self) -> None:
        """Check that gradients are those of the mean over the batch, however it is split, padded or repeated."""
        trainer = self.make("gradients", **UNSPLIT)
        trainer.make_experience()
        elements, collate = sorted(trainer.store.elements, key=entries), trainer.experience_class.collate
        self._must(len(elements) > 2, f"a round has {len(elements)} samples, and this check needs three.")
        batch = collate(elements)
        whole = _gradients(trainer, batch)
        largest = max((float(gradient.abs().max()) for gradient in whole.values()), default=0.0)
        self._must(largest > SMALLEST, f"the largest gradient is {largest:.1g}, too small to compare with others.")

        def compare(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], sentence: str) -> None:
            self._must(list(got) == list(expected), f"{sentence} Parameters with a gradient are not the same.")
            for name, gradient in expected.items():
                by = float((got[name] - gradient).abs().max())
                self._must(
                    by <= ROUNDING["gradients"] * max(1.0, largest), f"{sentence} That of {name} differs by {by:.2g}."
                )

        for size in (1, 2, 3):
            trainer.config.train.minibatch_size = size
            compare(
                _gradients(trainer, batch),
                whole,
                f"the gradient depends on train.minibatch_size (here {size}). loss() has to return sums over the units "
                "that units() counts, not means, and may depend on its batch and the weights alone.",
            )
        twice = collate(elements * 2)
        for repeated in (None, 2):
            trainer.config.train.minibatch_size = repeated
            compare(
                _gradients(trainer, twice),
                whole,
                "twice the same samples have another gradient. units() has to grow with the batch as the sums of "
                "loss() do.",
            )
        trainer.config.train.minibatch_size = None
        if any("side" in column.metadata for column in fields(trainer.experience_class)):
            few, wider = collate(elements[:2]), collate([*elements[:2], elements[-1]])[:2]
            pairs = zip(vars(few).values(), vars(wider).values(), strict=True)
            padded = any(one.shape != other.shape for one, other in pairs if one is not None)
            self._must(padded, "all samples have the same length, so padding cannot be checked: use longer prompts.")
            compare(
                _gradients(trainer, wider),
                _gradients(trainer, few),
                "the gradient depends on the padding. Sums have to leave out what the mask of the batch leaves out.",
            )

    def seed(self) -> None:
        """Check that the seed says everything about a run: the same one is the same run, another one is not."""
        again, losses = self.make("again"), "losses/total_loss"
        whole = self.whole
        again.learn()
        with self._says("a run with the same seed is another run. Random numbers have to follow from train.seed."):
            assert_same_run(again, whole, self.folder / "again", self.folder / "whole")
        self.run("seed", **{"train.seed": whole.config.train.seed + 1})
        found = [[row.get(losses) for row in rows(self.folder / name)] for name in ("seed", "whole")]
        self._must(found[0] != found[1], "another train.seed is the same run. Is anything drawn or shuffled?")

    def resume(self, stops: int | None = None) -> None:
        """Check that a run which is stopped and resumed is, bit by bit, the run that never stopped.

        Args:
            stops: Number of stops, at even distances; by default the run is stopped after every step.
        """
        total = self.whole.progress.step
        self._must(total > 1, f"the run has {total} steps, and this check needs two.")
        count = total - 1 if stops is None else min(stops, total - 1)
        with self._says(
            "a run that was stopped and resumed is another run. What changes in training has to be registered: "
            'self.state.register("name", fields(self, "attribute")).'
        ):
            for step in (total * (number + 1) // (count + 1) for number in range(count)):
                stopped = self.make("stopped", [StopAfter(step)], **AUTO)  # "auto" without a checkpoint starts
                run_until_stopped(stopped)
                must(stopped.progress.step == step, f"the run stopped at step {stopped.progress.step}, not {step}")
            resumed = self.run("stopped", **AUTO)
            assert_same_run(resumed, self.whole, self.folder / "stopped", self.folder / "whole")

    def state(self) -> None:
        """Check that every attribute which changes in training is in checkpoints."""
        found = self.unsaved()
        first = ", ".join(sorted(found)[:5])
        self._must(
            not found,
            f"{first} of the trainer changes in training and is in no checkpoint. Register it "
            '(self.state.register("name", fields(self, "attribute"))), or list it in not_state if a resumed run does '
            "not need it.",
        )

    def unsaved(self) -> set[str]:
        """Return the places under a trainer that differ between two steps of a run and are in no checkpoint."""
        watch = Watch()
        self.run("watched", [watch], **{"train.eval_interval": 2, "train.checkpoint_interval": 3})
        self._must(len(watch.seen) > 3, f"the run has {len(watch.seen)} steps, and this check needs four.")
        return changing(watch.seen, self.not_state)

    def export(self, loads_as: Any = None) -> list[str]:
        """Check that plain transformers load what a run exports, and compute the logits that the policy computed.

        A trainer without a language model (`model.lm`) only has to write files.

        Args:
            loads_as: The auto class of transformers that loads it; by default the one for language models.

        Returns:
            The names of the checkpoints whose exports were compared.
        """
        remember = Remember()
        trainer = self.run("exported", [remember], **{"train.checkpoint_interval": 2, "train.eval_interval": 1})
        own = self.folder / "exported" / "own"
        trainer.save_pretrained(own)
        self._must(any(own.iterdir()), "save_pretrained() wrote no file; the method `export` has to.")
        if not hasattr(trainer.model, "lm"):
            return []
        expected = {**remember.scores, "own": logits(trainer.model.lm, trainer.tokenizer)}
        for name, scores in expected.items():
            with self._says("plain transformers do not load what was exported as it was trained."):
                check_export(own if name == "own" else own.parent / name / "hf_model", trainer, scores, loads_as)
        first = next(scores for name, scores in remember.scores.items() if name.startswith("checkpoint_"))
        self._must(not torch.equal(first, expected["own"]), "the exported model is the same after the first steps.")
        return list(remember.scores)

    def processes(self) -> None:
        """Check that two processes train as one does: on given samples, in whole runs, and if one has nothing."""
        self.steps_on_processes()
        self.steps_on_processes(1)
        self.run_on_processes()
        if "reward_fn" in self.arguments and not _trainer(self.config).offline:
            self.abstaining_on_one()

    def steps_on_processes(self, samples: int | None = None, minibatch_size: int | None = None) -> None:
        """Check that two processes which share given samples make the steps of one process.

        Args:
            samples: Number of samples, by default those of a round; of one sample the second process gets nothing.
            minibatch_size: `train.minibatch_size` on two processes.
        """
        source = self.make("source", **WHOLE_ROUND)
        source.make_experience()
        elements = source.store.elements[:samples]
        alone = self._steps(0, elements, None)
        first, second = on_ranks(self._steps, elements, minibatch_size)
        shared = f"{len(elements)} samples that two processes share"
        with self._says(f"after steps on {shared}, the two differ."):
            assert_same(second, first)
        self._close(first, alone, f"steps on {shared} are not those of one process.")

    def run_on_processes(self, processes: int = 2) -> None:
        """Check that a whole run on several processes is the run on one: the same samples, metrics and weights."""
        alone = self._learned(0, "on 1")
        for found in on_ranks(self._learned, f"on {processes}", processes=processes):
            self._close(
                found,
                alone,
                f"the run on {processes} processes is not that on one. What is compared with all samples has to be "
                "summed or gathered by self.world, and samples have to keep their `place`.",
            )

    def abstaining_on_one(self) -> None:
        """Check that a run goes on, the same on both processes, if the reward function of one abstains (None)."""
        changes = {"reward_fn": OnFirst(self.arguments["reward_fn"]), "reward.max_abstained": 1.0}
        first, second = on_ranks(self._learned, "abstaining", changes)
        with self._says("if the second process has no samples with a reward, the two differ."):
            assert_same(second, first)

    # Parts of the checks.

    def _steps(self, rank: int, elements: Sequence[Any], minibatch_size: int | None) -> dict[str, Any]:
        """Make two rounds of steps on given experience, of which each process has its share."""
        options: dict[str, Any] = {**WHOLE_ROUND, "train.minibatch_size": minibatch_size}
        trainer = self.make("steps", **options)
        trainer.push_to_store(trainer.world.share(list(elements)))
        metrics = []
        for _ in range(2):
            trainer.begin_round()
            trainer.progress.in_round = False  # of the second round it is not fresh, and ratios are not 1
            metrics += [trainer.optimize(batch) for batch in trainer.round_batches()]
        return {"weights": trainer.model.state_dict(), "metrics": metrics}

    def _learned(self, rank: int, folder: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        trainer = self.run(folder, **SIX_STEPS, **(changes or {}))
        metrics = {name: value for name, value in trainer.last_metrics.items() if not name.startswith("time/")}
        return {"weights": trainer.model.state_dict(), "metrics": metrics, "rows": rows(self.folder / folder)}

    def _close(self, found: Mapping[str, Any], alone: Mapping[str, Any], sentence: str) -> None:
        with self._says(sentence):
            for part, values in alone.items():
                by = apart(found[part], values, part)
                must(by <= ROUNDING["weights" if part == "weights" else "metrics"], f"{part} differ by {by:.2g}.")

    def _must(self, claim: bool, sentence: str) -> None:
        must(claim, f"{self.name}: {sentence}")

    @contextmanager
    def _says(self, sentence: str) -> Iterator[None]:
        """Put a sentence before the AssertionError of a comparison."""
        try:
            yield
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {sentence} {error}") from None


def _trainer(config: TRLConfig) -> Any:
    return TRAINERS.get(config.train.trainer)


def _gradients(trainer: Any, batch: Any) -> dict[str, Tensor]:
    """Return the gradients of a step as the optimiser would see them. The step is refused, so the weights stay."""
    seen: dict[str, Tensor] = {}

    def look(metrics: Mapping[str, float]) -> bool:
        seen.update((n, p.grad.clone()) for n, p in trainer.model.named_parameters() if p.grad is not None)
        return False

    trainer.accept = look
    trainer.optimize(batch)
    return seen
