"""Runs under ZeRO are the runs that hold all weights on every process. `matrix.py` compares all recipes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.contract.recipes import RECIPES, make
from tests.contract.runs import assert_same
from tests.distributed import matrix, test_async_save, test_launched, test_own_reading
from tests.distributed.ranks import on_ranks
from tests.distributed.test_any_ranks import assert_close, learned, state_at
from tests.distributed.test_fsdp import CASES, assert_training_as_estimated, interrupted
from tests.tiny import save_tiny
from trlx_like.distributed import zero_engine
from trlx_like.errors import ConfigError

STAGES = [kind for kind in matrix.KINDS if kind not in ("fsdp", "hybrid", "layers")]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"backend.mixed_precision": "fp16"}, "gradients would not be scaled; use bf16"),
    "optimizer": (
        {"optimizer.name": "adafactor"},
        r"optimizer.name \('adafactor'\) must be the name of an optimizer that treats",
    ),
    "hybrid": ({"backend.shard": "hybrid"}, "'hybrid' needs backend.kind: fsdp; it is deepspeed"),
    "offload": (
        {"backend.shard": "gradients", "backend.offload": "all"},
        r"backend.offload \(all\) needs backend.shard: full.*set backend.offload: optimizer",
    ),
    "stage": (
        {"backend.deepspeed_config": {"zero_optimization": {"stage": 2}}},
        r"backend.deepspeed_config.zero_optimization.stage follows from backend.shard: set that option",
    ),
    "nvme": (
        {"backend.deepspeed_config": {"zero_optimization": {"offload_param": {"device": "nvme"}}}},
        "zero_optimization.offload_param.device follows from backend.offload",
    ),
    "bf16": ({"backend.deepspeed_config": {"bf16": {"enabled": True}}}, "bf16 follows from backend.mixed_precision"),
    "quantized": (
        {"backend.deepspeed_config": {"zero_optimization": {"zero_quantized_gradients": True}}},
        "zero_quantized_gradients cannot be followed: gradients would be rounded",
    ),
    "unknown": ({"backend.deepspeed_config": {"wall_clock_breakdown": True}}, "only zero_optimization is passed on"),
}
WITH_DEEPSPEED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (
        {"model.dtype": "bfloat16", "model.peft_config": {"peft_type": "LORA", "r": 2}},
        r"needs all weights in float32: leave model.dtype \(bfloat16\) out",
    ),
    "typo": (
        {"backend.deepspeed_config": {"zero_optimization": {"overlap_com": True}}},
        "backend.deepspeed_config.*overlap_com",
    ),
}


def said(rank: int, folder: Path, cases: Sequence[str]) -> dict[str, str]:
    found = {}
    for case in cases:
        changes = {**REFUSED, **WITH_DEEPSPEED}[case][0]
        with pytest.raises(ConfigError) as error:
            make("SFTTrainer", folder, **{"train.batch_size": 4, "backend.kind": "deepspeed", **changes})
        found[case] = str(error.value)
    return found


def assert_refused(folder: Path, cases: dict[str, tuple[dict[str, Any], str]], processes: int) -> None:
    alone = [case for case in cases if case == "fp16"]  # accelerate remembers the first number format of a process
    found: dict[str, str] = {}
    for together in (alone, [case for case in cases if case not in alone]):
        found |= on_ranks(said, folder, together, processes=processes)[0]
    assert [case for case, (_, words) in cases.items() if not re.search(words, found[case])] == [], found


def test_what_cannot_be_followed_is_refused_by_name(tmp_path: Path) -> None:
    """On one process too, and before DeepSpeed is needed."""
    assert_refused(tmp_path, REFUSED, processes=1)


def test_what_several_processes_cannot_follow_is_refused_by_name(tmp_path: Path) -> None:
    matrix.import_deepspeed()
    assert_refused(tmp_path, WITH_DEEPSPEED, processes=2)


def test_one_process_holds_all_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trlx_like.distributed.zero.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"backend.kind: deepspeed needs DeepSpeed: pip install .*deepspeed"):
        make("SFTTrainer", tmp_path, **{"backend.kind": "deepspeed"})
    monkeypatch.setattr("trlx_like.distributed.zero.find_spec", lambda name: True)
    assert not make("SFTTrainer", tmp_path, **{"backend.kind": "deepspeed"}).run.backend.sharded
    with pytest.raises(ConfigError, match=r"backend.offload \(all\) needs several processes"):
        make("SFTTrainer", tmp_path, **{"backend.kind": "deepspeed", "backend.offload": "all"})


def test_checkpoints_of_every_stage_are_read_by_every_other(tmp_path: Path) -> None:
    """From FSDP2 on four processes to one process: weights, moments and experience bit by bit."""
    matrix.import_deepspeed()
    found = [on_ranks(state_at, tmp_path, matrix.KINDS["fsdp"], 2, None, processes=4)[0]]
    place = tmp_path / "checkpoint_3"
    for number, (stage, processes) in enumerate((("zero3", 2), ("zero1", 4), ("zero2", 2))):
        name = f"checkpoint_{number + 4}"
        found.append(on_ranks(state_at, place, matrix.KINDS[stage], 0, name, processes=processes)[0])
        place = place / name
        files = {path.name for path in (place / "state" / "shared").iterdir()}
        assert {f"{item}.rank_{processes - 1}.safetensors" for item in ("model", "optimizer")} < files
        assert not [file for file in files if file.endswith((".pt", ".bin", ".pkl"))]
    found.append(state_at(0, place, matrix.KINDS["ddp"], 0, None))
    for state in found[1:]:
        assert_same(state, found[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_goes_on_under_other_backends(name: str, tmp_path: Path) -> None:
    """Begun under FSDP2 on four processes, continued on one, and ended under ZeRO-2 on two."""
    matrix.import_deepspeed()
    alone = learned(0, name, tmp_path / "1")
    for kind, processes, stop in (("fsdp", 4, 2), ("ddp", 1, 4)):
        codes = on_ranks(
            learned, name, tmp_path / "n", stop, matrix.KINDS[kind], processes=processes, exits=True, timeout=300
        )
        assert codes == [143] * processes
    ended = on_ranks(learned, name, tmp_path / "n", 0, matrix.KINDS["zero2"], timeout=300)
    assert_close(ended, alone, tmp_path / "n", tmp_path / "1")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", ["PPOTrainer / plain", "ILQLTrainer / plain", "DPOTrainer / moving top"])
def test_a_run_that_is_resumed_is_the_run_that_was_not_stopped(case: str, stage: str, tmp_path: Path) -> None:
    matrix.import_deepspeed()
    name, changes = CASES[case]
    changes = {**changes, **matrix.KINDS[stage]}
    stopped = on_ranks(interrupted, name, changes, tmp_path / "stopped", 3)
    through = on_ranks(interrupted, name, changes, tmp_path / "through", None)
    assert_same([states for states, _ in stopped], [states for states, _ in through])
    assert stopped[0][1] == through[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("label", list(CASES))
def test_whole_runs_are_those_with_whole_weights(label: str, stage: str) -> None:
    matrix.import_deepspeed()
    if label not in {case for case, *_ in matrix.cases(kind=stage)}:
        pytest.skip("an option of fsdp")
    found = matrix.differences(*CASES[label], kind=stage)
    assert matrix.too_large(label, found) == [], found


def test_a_run_of_zero_3_is_that_with_whole_weights() -> None:
    """A short one of a trainer whose targets are moved outside of the optimizer."""
    matrix.import_deepspeed()
    name, changes = CASES["ILQLTrainer / plain"]
    found = matrix.differences(name, {**changes, "train.total_steps": 2}, kind="zero3")
    assert matrix.too_large("ILQLTrainer / plain", found) == [], found


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_checkpoints_that_are_written_beside_training_are_the_same(stage: str, tmp_path: Path) -> None:
    matrix.import_deepspeed()
    test_async_save.same(stage, tmp_path)


@pytest.mark.parametrize("name", ["PPOTrainer", pytest.param("ILQLTrainer", marks=pytest.mark.slow)])
def test_weights_are_those_of_a_whole_load(name: str, tmp_path: Path) -> None:
    """With ZeRO-3 the main process reads one weight at a time."""
    matrix.import_deepspeed()
    path = save_tiny(tmp_path / "model", "llama")
    cases: dict[str, dict[str, Any]] = {
        "all": {"model.model_path": path},
        "adapter": {"model.model_path": path, "model.peft_config": {"peft_type": "LORA", "r": 2}},
    }
    alone = test_own_reading.loaded(
        0, name, tmp_path, {case: {**c, "backend.kind": "ddp"} for case, c in cases.items()}
    )
    divided = {case: {**changes, **matrix.KINDS["zero3"]} for case, changes in cases.items()}
    for found in on_ranks(test_own_reading.loaded, name, tmp_path, divided):
        for case in cases:
            assert_same(found[case], alone[case])


@pytest.mark.slow
@pytest.mark.parametrize("layers", [-1, 1])
def test_a_run_whose_weights_were_read_one_by_one(layers: int, tmp_path: Path) -> None:
    matrix.import_deepspeed()
    changes = {"model.model_path": save_tiny(tmp_path / "model"), "model.num_layers_unfrozen": layers}
    found = matrix.differences("PPOTrainer", {**matrix.SIX_STEPS, **changes}, kind="zero3")
    assert matrix.too_large("PPOTrainer", found) == [], found


def loading(rank: int, name: str, folder: Path, path: str) -> dict[str, int]:
    """The most bytes of live tensors until DeepSpeed makes its own buffers, and what they may be."""
    start, found = zero_engine.start, {}
    with test_own_reading.Storages() as storages, pytest.MonkeyPatch.context() as patch:

        def look(*arguments: Any) -> Any:
            found["peak"] = storages.peak.total()
            return start(*arguments)

        patch.setattr(zero_engine, "start", look)
        trainer = make(name, folder, **{**matrix.SIX_STEPS, **matrix.KINDS["zero3"], "model.model_path": path})
    modules = [trainer.model, *trainer.model.reference_modules()]
    sizes = [4 * math.prod(zero_engine.shape(weight)) for module in modules for weight in module.parameters()]
    return {**found, "state": sum(sizes), "largest": max(sizes)}


@pytest.mark.parametrize("name", ["PPOTrainer", pytest.param("DPOTrainer", marks=pytest.mark.slow)])
def test_loading_with_zero_3_takes_a_share_and_two_weights(name: str, tmp_path: Path) -> None:
    matrix.import_deepspeed()
    path = save_tiny(tmp_path / "model", n_embd=96, n_head=4, layers=12)
    for found in on_ranks(loading, name, tmp_path / "run", path):
        print(name, found)
        assert found["state"] / 2 < found["peak"] <= 1.1 * (found["state"] / 2 + 2 * found["largest"]), found


def unreadable(rank: int, folder: Path, path: str) -> str:
    with pytest.raises(ConfigError) as error:
        make("SFTTrainer", folder, **{**matrix.SIX_STEPS, **matrix.KINDS["zero3"], "model.model_path": path})
    return str(error.value)


def test_what_the_main_process_cannot_read_ends_all(tmp_path: Path) -> None:
    matrix.import_deepspeed()
    path = Path(save_tiny(tmp_path / "model", layers=2))
    weights = load_file(path / "model.safetensors")
    weights["transformer.h.1.mlp.c_fc.weight"][-1] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    said = on_ranks(unreadable, tmp_path / "run", str(path))
    assert "the weight transformer.h.1.mlp.c_fc.weight has NaN" in said[0]
    assert "another process cannot read it" in said[1]


@pytest.mark.slow
@pytest.mark.parametrize("length", [24, 96])
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_training_takes_what_the_estimate_says(stage: str, length: int, tmp_path: Path) -> None:
    """Long samples take more than the buffers of DeepSpeed, short ones less."""
    matrix.import_deepspeed()
    assert_training_as_estimated("SFTTrainer", tmp_path, {**matrix.KINDS[stage], "train.seq_length": length})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shard"), [("zero2", "gradients"), ("zero3", "full")])
def test_accelerate_launch_with_a_file_of_ours(name: str, shard: str, tmp_path: Path) -> None:
    matrix.import_deepspeed()
    test_launched.assert_launch_trains(tmp_path, name, {"kind": "deepspeed", "shard": shard})


MISMATCHES = {
    "zero3": ({"kind": "ddp"}, "deepspeed: true (ACCELERATE_USE_DEEPSPEED), and backend.kind is ddp"),
    "zero2": ({"kind": "deepspeed"}, "zero_stage: 2 (ACCELERATE_DEEPSPEED_ZERO_STAGE), and backend.shard is full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISMATCHES)
def test_accelerate_launch_with_a_file_of_another_backend(name: str, tmp_path: Path) -> None:
    matrix.import_deepspeed()
    backend, words = MISMATCHES[name]
    run = test_launched.launch(tmp_path, test_launched.ROOT / "configs" / "accelerate" / f"{name}.yaml", **backend)
    test_launched.assert_launch_refused(tmp_path, run, words)
