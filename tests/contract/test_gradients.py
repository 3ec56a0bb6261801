"""The gradient is that of the global batch, however it is cut, padded and scaled."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.recipes import kinds, make

# The steps here are refused, so the optimiser never gets to the first.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def elements_of(trainer: Any) -> list[Any]:
    """One round's experience, the longest element last."""
    trainer.make_experience()
    return sorted(trainer.store.elements, key=lambda e: sum(v.numel() for v in vars(e).values() if v is not None))


def gradients(trainer: Any, batch: Any) -> dict[str, Tensor]:
    """Of one step on a batch, as the optimiser would see them. The step is refused, so the weights stay."""
    seen: dict[str, Tensor] = {}

    def look(metrics: dict[str, float]) -> bool:
        seen.update((n, p.grad.clone()) for n, p in trainer.model.named_parameters() if p.grad is not None)
        return False

    trainer.accept = look
    trainer.optimize(batch)
    return seen


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3  # a thousand times the tolerance
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-6, msg=(name + ": {}").format)


@pytest.fixture(params=list(kinds().values()), ids=list(kinds()))
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    name, changes = request.param
    return make(name, tmp_path, **{**changes, "train.max_grad_norm": None})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_microbatches_do_not_change_the_gradient(trainer: Any, size: int) -> None:
    batch = trainer.experience_class.collate(elements_of(trainer))
    whole = gradients(trainer, batch)
    trainer.config.train.minibatch_size = size
    assert_close(gradients(trainer, batch), whole)


def test_padding_does_not_change_the_gradient(trainer: Any) -> None:
    if not any("side" in column.metadata for column in fields(trainer.experience_class)):
        pytest.skip("its elements are all of one shape")
    first, second, *_, longest = elements_of(trainer)
    batch = trainer.experience_class.collate([first, second])
    wider = trainer.experience_class.collate([first, second, longest])[:2]
    pairs = zip(vars(batch).values(), vars(wider).values(), strict=True)
    assert any(value.shape != padded.shape for value, padded in pairs if value is not None)
    assert_close(gradients(trainer, wider), gradients(trainer, batch))


def test_a_batch_of_equal_parts_has_the_gradient_of_a_part(trainer: Any) -> None:
    """The gradient is a mean: twice the same data is the same gradient, and not the double."""
    elements = elements_of(trainer)
    once, twice = (trainer.experience_class.collate(elements * times) for times in (1, 2))
    expected = gradients(trainer, once)
    assert_close(gradients(trainer, twice), expected)
    trainer.config.train.minibatch_size = 2
    assert_close(gradients(trainer, twice), expected)
