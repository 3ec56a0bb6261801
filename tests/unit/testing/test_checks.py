"""The checks of trainers find trainers that break a promise, and say which one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from examples.plugin_reinforce import ReinforceTrainer, Rollout
from trlx_like import LossOutput
from trlx_like.config import TRAINERS
from trlx_like.errors import ConfigError
from trlx_like.functional.masked import masked_sum
from trlx_like.testing import GENERATION, PROMPTS, TrainerChecks, check_trainer, count_letters, tiny_run

METHOD = {"num_rollouts": 5, "gen_kwargs": GENERATION}
GIVEN: dict[str, Any] = {"prompts": PROMPTS, "reward_fn": count_letters}

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


class Mean(ReinforceTrainer):
    """Its loss is a mean."""

    def loss(self, batch: Rollout) -> LossOutput:
        return LossOutput(-masked_sum(self.model(batch).logprobs * batch.advantages, batch.mask) / len(batch))


class Single(ReinforceTrainer):
    """It counts one unit, however large the batch."""

    def units(self, batch: Rollout) -> float:
        return 1.0 if len(batch) == 10 else 0.2 * len(batch)


class Padded(ReinforceTrainer):
    """Its sum is divided by the length of the longest response of the micro-batch."""

    def loss(self, batch: Rollout) -> LossOutput:
        weighted = masked_sum(self.model(batch).logprobs * batch.advantages, batch.mask)
        return LossOutput(-weighted * 6 / batch.mask.shape[1])


class Counts(ReinforceTrainer):
    """Its loss depends on an attribute that no checkpoint holds, and it has generators of random numbers."""

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        self.factor = 1.0
        self.numbers = torch.Generator(), random.Random(0), np.random.default_rng(0)

    def make_experience(self) -> dict[str, float]:
        torch.rand((), generator=self.numbers[0]), self.numbers[1].random(), self.numbers[2].random()
        return super().make_experience()

    def after_step(self, metrics: dict[str, float]) -> None:
        self.factor += 1

    def loss(self, batch: Rollout) -> LossOutput:
        return LossOutput(-masked_sum(self.model(batch).logprobs * batch.advantages, batch.mask) * self.factor)


class Drawn(ReinforceTrainer):
    """It draws random numbers of its own."""

    source = torch.Generator()

    def after_step(self, metrics: dict[str, float]) -> None:
        metrics["drawn"] = float(torch.rand((), generator=self.source))


class Silent(ReinforceTrainer):
    """It exports the weights that it started from."""

    def build(self, tokenizer: Any = None) -> None:
        super().build(tokenizer)
        self.start = {name: value.clone() for name, value in self.model.lm.state_dict().items()}

    def export(self, directory: Any, merged: bool | None) -> None:
        trained = {name: value.clone() for name, value in self.model.lm.state_dict().items()}
        self.model.lm.load_state_dict(self.start)
        super().export(directory, merged)
        self.model.lm.load_state_dict(trained)


class Local(ReinforceTrainer):
    """Each process compares with the mean of its own samples."""

    def make_experience(self) -> dict[str, float]:
        world = self.run.world
        exchange, world.sum = world.sum, lambda values: list(values)  # type: ignore[method-assign]
        try:
            return super().make_experience()
        finally:
            world.sum = exchange  # type: ignore[method-assign]


BROKEN: list[tuple[type[Any], Callable[[TrainerChecks], Any], str]] = [
    (Mean, TrainerChecks.gradients, r"Mean: the gradient depends on train.minibatch_size \(here 1\)"),
    (Single, TrainerChecks.gradients, "Single: twice the same samples have another gradient"),
    (Padded, TrainerChecks.gradients, "Padded: the gradient depends on"),
    (Counts, TrainerChecks.resume, "Counts: a run that was stopped and resumed is another run"),
    (
        Counts,
        TrainerChecks.state,
        r"Counts: \.factor, \.numbers\.0, \.numbers\.1, \.numbers\.2 of the trainer changes in training and is in no",
    ),
    (Drawn, TrainerChecks.seed, "Drawn: a run with the same seed is another run"),
    (Silent, TrainerChecks.export, "Silent: plain transformers do not load what was exported as it was trained"),
    (Local, TrainerChecks.run_on_processes, "Local: the run on 2 processes is not that on one"),
]


def checks_of(trainer: type[Any], monkeypatch: pytest.MonkeyPatch, **train: Any) -> TrainerChecks:
    monkeypatch.setattr(TRAINERS, "get", lambda _: trainer)
    return TrainerChecks(trainer, tiny_run(ReinforceTrainer, METHOD, train=train), **GIVEN)


@pytest.mark.parametrize(("trainer", "check", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_named(
    trainer: type[Any], check: Callable[[TrainerChecks], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=words):
        check(checks_of(trainer, monkeypatch))


@pytest.mark.slow
def test_a_trainer_that_keeps_its_promises_passes_all() -> None:
    check_trainer(ReinforceTrainer, tiny_run(ReinforceTrainer, METHOD), processes=True, **GIVEN)


def test_an_attribute_that_needs_no_saving_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = checks_of(Counts, monkeypatch)
    checks.not_state = {".factor", ".numbers"}
    checks.state()


def test_a_run_that_is_too_short_to_say_anything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="the run has 1 steps, and this check needs two"):
        checks_of(ReinforceTrainer, monkeypatch, total_steps=1).resume()


def test_a_configuration_of_another_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.trainer \(ReinforceTrainer\) is another class than Mean"):
        TrainerChecks(Mean, tiny_run(ReinforceTrainer, METHOD), **GIVEN)
