"""Runs that keep what the frozen blocks compute against runs that compute it in every pass."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig

from tests.contract.recipes import LORA, NO_DROPOUT, make
from tests.contract.runs import StopAfter, assert_same, assert_same_run, run_until_stopped, state_of
from tests.tiny import tiny_config
from trlx_like.data import PreferenceExperience
from trlx_like.models.layout import blocks
from trlx_like.trainers import trunk
from trlx_like.trainers.trunk import mapped

TOP = {"model.num_layers_unfrozen": 1, "model.model_path": tiny_config(layers=3, **NO_DROPOUT)}
ADAPTER = {"model.peft_config": LORA | {"layers_to_transform": [2]}, "model.model_path": TOP["model.model_path"]}
# Attention's biases of keys have gradients that are rounding alone, which Adam would scale up without this eps.
STEADY = {"optimizer.kwargs": {"lr": 3e-3, "eps": 1e-6}}
SIZES: dict[str, Any] = {
    "num_labels": 1,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
NO_BERT_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = BertConfig(vocab_size=32, pad_token_id=1, **SIZES, **NO_BERT_DROPOUT)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("PPOTrainer", {**TOP, "train.batch_size": 4, "train.minibatch_size": 2}),
    "PPO, value branch": ("PPOTrainer", {**TOP, "method.num_value_layers_unfrozen": 2}),
    "PPO, checkpointed": ("PPOTrainer", {**TOP, "backend.gradient_checkpointing": True}),
    "PPO, adapter": ("PPOTrainer", ADAPTER),
    "GRPO": ("GRPOTrainer", TOP),
    "RLOO": ("RLOOTrainer", TOP),
    "DPO": ("DPOTrainer", TOP),
    "DPO, live reference": ("DPOTrainer", {**TOP, "method.precompute_ref_log_probs": False}),
    "DPO, adapter and live reference": ("DPOTrainer", {**ADAPTER, "method.precompute_ref_log_probs": False}),
    "SFT": ("SFTTrainer", TOP),
    "SFT, packed": ("SFTTrainer", {**TOP, "method.packing": True}),
    "ILQL": ("ILQLTrainer", TOP),
    "Reward": ("RewardTrainer", TOP),
    "PPO, one pass": ("PPOTrainer", {**TOP, "method.ppo_epochs": 1}),
    "GRPO, one pass of several steps": ("GRPOTrainer", {**TOP, "method.num_iterations": 1, "train.batch_size": 2}),
    "PPO, heads alone": ("PPOTrainer", {**TOP, "model.num_layers_unfrozen": 0}),
    "ILQL, heads alone": ("ILQLTrainer", {**TOP, "model.num_layers_unfrozen": 0}),
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
    # The states of pairs come from batches of other lengths.
    exact = not run.startswith(("DPO", "Reward")) and rows_are_alone(plain)
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


def test_the_live_reference_of_an_adapter_does_not_run_the_frozen_blocks(tmp_path: Path) -> None:
    trainer = make("DPOTrainer", tmp_path, **ADAPTER, **{"method.precompute_ref_log_probs": False})
    trainer.make_experience()
    batch = PreferenceExperience.collate(trainer.store.elements)
    assert batch.prompt_trunk is not None
    ran = count_blocks(trainer)
    trainer.model(batch.completions(), reference=True)
    assert ran == {2: 2}
    ran.clear()
    batch.prompt_trunk = None
    trainer.model(batch.completions(), reference=True)
    assert ran == {0: 1, 1: 1, 2: 2}


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


IN_FILES = [
    run for run, (name, _) in RUNS.items() if name in ("SFTTrainer", "ILQLTrainer", "DPOTrainer", "RewardTrainer")
]


@pytest.mark.parametrize("run", IN_FILES)
def test_states_that_are_too_much_for_memory_are_in_a_file(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends with the bits of a run in memory, its checkpoints have no states, and the file has no name."""
    name, changes = RUNS[run]
    held = make(name, tmp_path / "memory", **STEADY, **changes)
    held.learn()
    monkeypatch.setattr(trunk, "OF_MEMORY", 0.0)
    filed = make(name, tmp_path / "file", **STEADY, **changes)
    files: list[Path] = []

    def noted(folder: Path, *given: Any) -> torch.Tensor:
        files.append(folder)
        return mapped(folder, *given)

    monkeypatch.setattr(trunk, "mapped", noted)
    with caplog.at_level("INFO"):
        filed.learn()
    assert (
        set(files) == {tmp_path / "file"}
        and "kept in a file in train.checkpoint_dir: 0.000 GiB, where memory" in caplog.text
    )
    assert caplog.text.count("kept in a file") == 1
    state = state_of(filed)
    assert not any(str(key).endswith("_trunk") for key in state.get("store", {}).get("columns", {}))
    if name != "DPOTrainer":  # which takes states in memory from the pass that scores
        assert_same(without_trunk(state), without_trunk(state_of(held)), "state")
    for got, expected in zip(filed.model.parameters(), held.model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert not [path for path in (tmp_path / "file").iterdir() if path.name.startswith("tmp")]


@pytest.mark.parametrize("run", IN_FILES)
def test_a_run_with_states_in_a_file_resumes_bitwise(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk, "OF_MEMORY", 0.0)
    name, changes = RUNS[run]
    whole = make(name, tmp_path / "whole", **changes)
    whole.learn()
    run_until_stopped(make(name, tmp_path / "run", **changes, callbacks=[StopAfter(2)]))
    resumed = make(name, tmp_path / "run", **changes, **{"train.resume_from_checkpoint": "auto"})
    ran = count_blocks(resumed)
    resumed.learn()
    assert any(column.endswith("_trunk") for column in resumed.store.elements.columns)
    assert ran[0] < ran[len(blocks(resumed.model.lm)) - 1]
    assert_same_run(resumed, whole, tmp_path / "run", tmp_path / "whole")


def test_without_room_all_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trunk, "OF_MEMORY", 0.0)
    monkeypatch.setattr(trunk, "OF_DISK", 0.0)
    trainer = make("SFTTrainer", tmp_path, **TOP)
    ran = count_blocks(trainer)
    with caplog.at_level("INFO"):
        trainer.learn()
    assert ran[0] == ran[2]
    lines = [line for line in caplog.messages if "All blocks" in line]
    assert len(lines) == 1 and lines[0].endswith("GiB on the disk of train.checkpoint_dir.")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("RFTTrainer", TOP, "each sample is learned from once a round"),
        ("SFTTrainer", {**TOP, "method.neftune_noise_alpha": 5.0}, "method.neftune_noise_alpha adds other noise"),
        ("RewardTrainer", {**TOP, "train.epochs": 1}, "each sample is learned from once"),
        ("RewardTrainer", {**TOP, "model.model_path": ENCODER}, "the head of an encoder cannot be read apart"),
        ("SFTTrainer", {"model.num_layers_unfrozen": 1, "model.model_path": tiny_config(layers=3)}, "dropout is on"),
    ],
)
def test_why_all_blocks_run(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        make(name, tmp_path, **changes)
    assert [line for line in caplog.messages if f"All blocks of the model run in every pass: {reason}" in line]


@pytest.mark.parametrize("run", ["SFT", "DPO, adapter and live reference"])
def test_a_disk_that_takes_no_file(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one with a quota: all blocks run, and no page of a file finds no room later."""

    def full(*given: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(trunk, "OF_MEMORY", 0.0)
    monkeypatch.setattr(os, "posix_fallocate", full)
    name, changes = RUNS[run]
    trainer = make(name, tmp_path, **changes)
    ran = count_blocks(trainer)
    with caplog.at_level("INFO"):
        trainer.learn()
    assert ran[0] == ran[2] and "takes no file ([Errno" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_in_a_file(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = mapped(tmp_path, (3, 5), dtype)
    tensor[torch.tensor([2, 0])] = torch.arange(10).view(2, 5).to(dtype)
    assert tensor[2].tolist() == [0, 1, 2, 3, 4] and tensor[1].tolist() == [0] * 5 and not list(tmp_path.iterdir())
