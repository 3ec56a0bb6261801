"""No trainer mixes devices: whole runs on a device that is not the CPU, in a process that alone has it."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import few, ingredients, scenarios
from trlx_like.api import make_trainer
from trlx_like.distributed.setup import make_accelerator
from trlx_like.models.packed_rows import PackedRows
from trlx_like.trainers.base import BaseRLTrainer

SCENARIOS = scenarios()
IN_CI = ("DDPOTrainer", "DPOTrainer", "ILQLTrainer", "PPOTrainer", "RewardTrainer")
# Its weights are paired by their memory, of which a tensor that is not there has none.
LEFT_OUT = "DPOTrainer-moving reference"


@pytest.fixture(scope="module")
def apart() -> Iterator[Executor]:
    """A new process: torch takes up no device after its first gradient, so one that is forked would be too late."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield process


def train(name: str, folder: Path, changes: dict[str, Any], arguments: dict[str, Any]) -> list[int]:
    """Train on the device, without checkpoints, which need memory too. Return for each packed batch its pieces."""
    from tests.pretended import DEVICE, pretended

    packed: list[int] = []

    def there(config: Any) -> Any:
        accelerator = make_accelerator(config)
        accelerator.state.device = DEVICE
        return accelerator

    def noted(kind: Any, batch: Any, plan: Any, bias: Any = None, pieces: Any = ()) -> PackedRows:
        packed.append(len(pieces))
        rows: PackedRows = make_rows(kind, batch, plan, bias, pieces)
        return rows

    make_rows = PackedRows.of.__func__  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch, pretended():
        patch.setattr(PackedRows, "of", classmethod(noted))
        patch.setattr("trlx_like.models.compaction.KERNEL_CALL", 1)  # pieces of attention pay as in large models
        patch.setattr("trlx_like.trainers.context.make_accelerator", there)
        for method in ("save", "_save_beside"):
            patch.setattr(BaseRLTrainer, method, lambda *_: None)
        config, given = ingredients(name, folder, **changes)
        trainer = make_trainer(config, **{**given, **arguments})
        packed.clear()  # those of the tests of the model, on the CPU
        trainer.learn()
    assert {parameter.device for parameter in trainer.model.parameters()} == {DEVICE}
    assert trainer.progress.step and not trainer.progress.nonfinite_steps
    return packed


@pytest.mark.parametrize("case", few(sorted(SCENARIOS.keys() - {LEFT_OUT}), IN_CI))
def test_a_run_is_on_one_device(case: str, apart: Executor, tmp_path: Path) -> None:
    name, changes = SCENARIOS[case]
    apart.submit(train, name, tmp_path, changes, {}).result()


@pytest.mark.parametrize("unfrozen", [-1, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", few(("DPOTrainer", "RewardTrainer", "SFTTrainer")))
def test_packed_rows_have_a_mask_on_the_device(name: str, unfrozen: int, apart: Executor, tmp_path: Path) -> None:
    rng = random.Random(0)
    prompts, *answers = (["".join(rng.choices("abcdefgh ", k=rng.randint(2, 12))) for _ in range(16)] for _ in range(3))
    pairs = list(zip(prompts, *answers, strict=True))
    data: dict[str, Any] = {"preferences": pairs}
    if name == "SFTTrainer":
        data = {"samples": [pair[:2] for pair in pairs]}
    changes = {"train.batch_size": 16, "train.minibatch_size": None, "train.seq_length": 30}
    changes["model.num_layers_unfrozen"] = unfrozen
    packed = apart.submit(train, name, tmp_path, changes, data).result()
    assert packed and not any(packed)  # a mask is applied


def mix() -> None:
    from tests.pretended import DEVICE, pretended

    with pretended():
        linear = torch.nn.Linear(4, 3).to(DEVICE)
        linear(torch.ones(2, 4, device=DEVICE)).sum().backward()
        assert linear.weight.grad is not None and linear.weight.grad.device == DEVICE
        assert linear.weight.grad.cpu().tolist() == [[2.0] * 4] * 3
        with pytest.raises(RuntimeError, match=r"all tensors of aten::addmm.* to be on the same device"):
            linear(torch.ones(2, 4))
        with pytest.raises(RuntimeError, match=r"all tensors of aten::index.Tensor to be on the same device"):
            torch.ones(3)[torch.tensor([0], device=DEVICE)]
        with pytest.raises(TypeError, match="use Tensor.cpu"):
            linear.weight.numpy()


def test_devices_that_are_mixed_are_refused(apart: Executor) -> None:
    apart.submit(mix).result()
