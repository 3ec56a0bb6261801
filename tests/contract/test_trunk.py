"""Runs that keep what the frozen blocks compute against runs that compute it in every pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import LORA, NO_DROPOUT, make
from tests.contract.runs import StopAfter, assert_same, assert_same_run, run_until_stopped, state_of
from tests.tiny import tiny_config
from trlx_like.models.layout import blocks

TOP = {"model.num_layers_unfrozen": 1, "model.model_path": tiny_config(layers=3, **NO_DROPOUT)}
ADAPTER = {"model.peft_config": LORA | {"layers_to_transform": [2]}, "model.model_path": TOP["model.model_path"]}
# Attention's biases of keys have gradients that are rounding alone, which Adam would scale up without this eps.
STEADY = {"optimizer.kwargs": {"lr": 3e-3, "eps": 1e-6}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("PPOTrainer", {**TOP, "train.batch_size": 4, "train.minibatch_size": 2}),
    "PPO, value branch": ("PPOTrainer", {**TOP, "method.num_value_layers_unfrozen": 2}),
    "PPO, checkpointed": ("PPOTrainer", {**TOP, "backend.gradient_checkpointing": True}),
    "PPO, adapter": ("PPOTrainer", ADAPTER),
    "GRPO": ("GRPOTrainer", TOP),
    "RLOO": ("RLOOTrainer", TOP),
    "DPO": ("DPOTrainer", TOP),
    "DPO, live reference": ("DPOTrainer", {**TOP, "method.precompute_ref_log_probs": False}),
    "SFT": ("SFTTrainer", TOP),
    "SFT, packed": ("SFTTrainer", {**TOP, "method.packing": True}),
    "ILQL": ("ILQLTrainer", TOP),
}


def without_trunk(value: Any) -> Any:
    """The state of a run without the kept states of its experience."""
    if isinstance(value, dict):
        return {name: without_trunk(part) for name, part in value.items() if not str(name).endswith("_trunk")}
    return value


def rows_are_alone(trainer: Any) -> bool:
    """Whether rows have the same bits in any batch. On some processors they depend on its rows and its padding."""
    mask = torch.arange(20) >= torch.arange(0, 12, 2)[:, None]  # [6, 20], longer than rows of the runs
    ids, places = torch.arange(6 * 20).reshape(6, 20) % 13, (mask.cumsum(dim=1) - 1).clamp(min=0)

    def logits(first: int, last: int) -> torch.Tensor:
        at = slice(first, last), slice(2 * first, None)
        return trainer.model.lm(ids[at], attention_mask=mask[at].long(), position_ids=places[at]).logits[mask[at]]

    with torch.no_grad():
        whole = torch.split(logits(0, 6), mask.sum(dim=1).tolist())
        parts = [(first, last) for last in range(1, 7) for first in range(last)]
        return all(torch.equal(logits(first, last), torch.cat(whole[first:last])) for first, last in parts)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_ends_with_the_same_bits(run: str, tmp_path: Path) -> None:
    name, changes = RUNS[run]
    kept, plain = (
        make(name, tmp_path / word, **STEADY, **changes, **{"train.keep_trunk": word == "kept"})
        for word in ("kept", "plain")
    )
    exact = rows_are_alone(plain) and not run.startswith("DPO")  # whose states come from batches of other lengths
    assert plain.model.trunk is None and kept.model.trunk is not None
    ran = [count_blocks(trainer) for trainer in (kept, plain)]
    kept.learn()
    plain.learn()
    if exact:
        assert_same(without_trunk(state_of(kept)), without_trunk(state_of(plain)), "state")
    for got, expected in zip(kept.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert 0 < ran[0].total() < ran[1].total()


def count_blocks(trainer: Any) -> Counter[int]:
    """Counts the forward passes of each block that score or train."""
    ran: Counter[int] = Counter()
    for number, block in enumerate(blocks(trainer.model.lm)):
        block.register_forward_hook(lambda *_, number=number: ran.update([number]))
    return ran


def test_a_round_of_ppo_runs_the_frozen_blocks_once(tmp_path: Path) -> None:
    trainer = make(
        "PPOTrainer", tmp_path, **TOP, **{"method.ppo_epochs": 4, "method.chunk_size": 5, "train.batch_size": 5}
    )
    trainer.make_experience()
    trainer.begin_round()
    ran = count_blocks(trainer)
    assert len(list(trainer.optimize_round())) == 4 * trainer.round_steps / 4 > 0
    assert set(ran) == {2}


def test_a_run_that_is_stopped_in_a_round_resumes_with_the_kept_states(tmp_path: Path) -> None:
    options = {**TOP, "train.batch_size": 4, "train.minibatch_size": 2}
    whole = make("PPOTrainer", tmp_path / "whole", **options)
    whole.learn()
    run_until_stopped(make("PPOTrainer", tmp_path / "run", **options, callbacks=[StopAfter(2)]))
    resumed = make("PPOTrainer", tmp_path / "run", **options, **{"train.resume_from_checkpoint": "auto"})
    resumed.load(tmp_path / "run")
    assert resumed.progress.in_round and resumed.store.elements[0].prompt_trunk is not None
    resumed.learn()
    assert_same_run(resumed, whole, tmp_path / "run", tmp_path / "whole")
