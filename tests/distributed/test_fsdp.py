"""Runs whose weights are divided over processes are the runs that hold them whole. `matrix.py` compares all recipes."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor

from tests.contract.recipes import LORA, RECIPES, ingredients, make
from tests.contract.runs import StopAfter, assert_same, rows
from tests.distributed import matrix
from tests.distributed.ranks import on_ranks, on_two_machines, whole
from tests.tiny import tiny_config
from tests.tiny_pipelines import sd, unet
from tests.unit import test_estimate
from trlx_like.errors import ConfigError
from trlx_like.estimate import estimate
from trlx_like.testing.compare import apart
from trlx_like.trainers.interrupt import Interrupted
from trlx_like.trainers.probe import generate_longest

CASES = {label: (name, changes) for label, name, changes in matrix.cases()}
ROUND = {"train.batch_size": 6, "optimizer.kwargs": {"lr": 3e-3, "eps": 1e-6}, "backend.kind": "fsdp"}
FAST = ("PPOTrainer", "ILQLTrainer")


def steps(
    rank: int, name: str, folder: Path, elements: Sequence[Any], changes: Mapping[str, Any], count: int = 6
) -> Any:
    """Weights and metrics after some steps on given experience, of which each process has its share."""
    on_two_machines(changes)
    trainer = make(name, folder, **changes)
    trainer.push_to_store(trainer.world.share(list(elements)))
    metrics: list[Any] = []
    while len(metrics) < count:  # in many more, training goes too far, and enlarges rounding errors with every step
        trainer.begin_round()
        trainer.progress.in_round = False  # of the second round it is not fresh, and ratios are not 1
        metrics += [trainer.optimize(batch) for batch in islice(trainer.round_batches(), count - len(metrics))]
    return {name: value.clone() for name, value in trainer.run.backend.weights(trainer.model)}, metrics


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES])
@pytest.mark.parametrize(
    ("count", "processes", "changes"),
    [
        pytest.param(5, 2, {"train.minibatch_size": 1, "train.batch_size": 3}, id="ragged"),
        pytest.param(1, 2, {}, id="an empty rank", marks=pytest.mark.slow),
        pytest.param(5, 4, {"train.minibatch_size": 1}, id="four", marks=pytest.mark.slow),
        pytest.param(5, 2, {"backend.gradient_checkpointing": True}, id="checkpointing", marks=pytest.mark.slow),
        pytest.param(5, 2, {"backend.shard": "gradients"}, id="gradients", marks=pytest.mark.slow),
        pytest.param(5, 2, {"backend.offload": "all"}, id="offload", marks=pytest.mark.slow),
        pytest.param(5, 4, {"backend.shard": "hybrid", "train.minibatch_size": 1}, id="hybrid", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_one_process(
    name: str, count: int, processes: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    source = make(name, tmp_path / "alone", **{**ROUND, "backend.kind": "ddp"})
    source.make_experience()
    elements = source.store.elements[:count]
    alone = {**ROUND, **{key: value for key, value in changes.items() if "shard" not in key and "offload" not in key}}
    expected, expected_metrics = steps(0, name, tmp_path / "one", elements, {**alone, "backend.kind": "ddp"})
    ranks = on_ranks(steps, name, tmp_path / "many", elements, {**ROUND, **changes}, processes=processes)
    for weights, metrics in ranks:
        assert apart(dict(expected), weights) < 2e-6
        assert apart(expected_metrics, metrics) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("label", "name", "changes"), list(matrix.cases()), ids=list(CASES))
def test_whole_runs_are_those_with_whole_weights(label: str, name: str, changes: dict[str, Any]) -> None:
    found = matrix.differences(name, changes)
    assert matrix.too_large(label, found) == [], found


BFLOAT16 = {"backend.kind": "fsdp", "backend.mixed_precision": "bf16", "train.minibatch_size": 1}
STEPPED: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {}),
    "four": (4, {}),
    "float32": (2, {"backend.mixed_precision": "no"}),
    "sums in bfloat16": (4, {"backend.reduce_dtype": "bfloat16"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_bfloat16_is_summed_in_float32(name: str, tmp_path: Path) -> None:
    """The gradients of each sample are the same on two and on four processes, so only their sums are rounded otherwise.

    They are found in the weights, after a step of SGD with a learning rate of 1.
    """
    source = make(name, tmp_path / "alone", **{**ROUND, "backend.kind": "ddp"})
    source.make_experience()
    elements = source.store.elements[:5]
    options = {**ROUND, **BFLOAT16, "optimizer.name": "sgd", "optimizer.kwargs": {"lr": 1.0}}
    found = {
        run: on_ranks(steps, name, tmp_path / run, elements, {**options, **changes}, 1, processes=processes)[0][0]
        for run, (processes, changes) in STEPPED.items()
    }
    distances = {run: apart(found["two"], found[run]) for run in STEPPED}
    print(name, distances)
    assert distances["four"] < 1e-6 and distances["sums in bfloat16"] > 1e-5
    assert 1e-5 < distances["float32"] < 2e-2
    rounded = [weight for weight in found["two"].values() if torch.equal(weight, weight.bfloat16().float())]
    assert len(rounded) < len(found["two"]) / 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"backend.mixed_precision": "fp16"}, "gradients would not be scaled; use bf16"),
    "optimizer": (
        {"optimizer.name": "adafactor"},
        r"optimizer.name \('adafactor'\) must be the name of an optimizer that treats",
    ),
    "hybrid": ({"backend.shard": "hybrid"}, r"there are 2 processes, \d of them on this machine"),
    "reference": (
        {"method.beta": 0.1},
        "a reference that takes the places of all trained weights needs an adapter",
    ),
}


def refused(rank: int, folder: Path, cases: Sequence[str]) -> dict[str, str]:
    said = {}
    for case in cases:
        name, changes = "DDPOTrainer" if case == "reference" else "SFTTrainer", REFUSED[case][0]
        with pytest.raises(ConfigError) as error:
            make(name, folder, **{"train.batch_size": 4, "backend.kind": "fsdp", **changes})
        said[case] = str(error.value)
    if torch.distributed.is_initialized():  # or the first to leave closes connections that the other still makes
        torch.distributed.barrier()
    return said


def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    alone = ["fp16"]  # accelerate remembers the first number format of a process
    said = on_ranks(refused, tmp_path, alone)[0] | on_ranks(refused, tmp_path, [*REFUSED.keys() - alone])[0]
    assert {case for case, (_, words) in REFUSED.items() if not re.search(words, said[case])} == set(), said


def test_one_process_holds_all_weights(tmp_path: Path) -> None:
    """So that the YAML of a cluster trains on a laptop; what several processes refuse is refused too."""
    trainer = make("SFTTrainer", tmp_path, **{"backend.kind": "fsdp"})
    assert not trainer.run.backend.sharded
    for changes, words in (
        ({"backend.offload": "all"}, r"backend.offload \(all\) needs several processes"),
        ({"optimizer.name": "adafactor"}, "must be the name of an optimizer that treats"),
    ):
        with pytest.raises(ConfigError, match=words):
            make("SFTTrainer", tmp_path, **{"backend.kind": "fsdp", **changes})


def live_bytes() -> int:
    """Bytes of all tensors that were made since `gc.freeze`."""
    held = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor):
            storage = (item.to_local() if isinstance(item, DTensor) else item).untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def measured(rank: int, folder: Path, name: str, changes: Mapping[str, Any]) -> dict[str, float]:
    """Bytes at rest, at most in forward passes and in steps, and what they may be, in halves."""
    on_two_machines(changes)
    gc.collect()
    gc.freeze()
    before = live_bytes()
    model = {"model.model_path": tiny_config(layers=6, n_embd=96, n_head=4), "train.undo_nonfinite_updates": False}
    trainer = make(name, folder, **{**matrix.SIX_STEPS, "train.minibatch_size": 1, **model, **changes})
    peaks = {"forward": 0, "step": 0}

    def look(*phases: str) -> None:
        if torch.is_grad_enabled() and trainer.model.training:  # not while all weights are gathered
            peaks.update({phase: max(peaks[phase], live_bytes() - before) for phase in phases})

    parts = list(trainer.model.modules())
    for part in parts:
        if type(part).__name__ == "GPT2MLP":
            part.register_forward_hook(lambda *_: look("forward", "step"))
            part.register_full_backward_hook(lambda *_: look("step"))
    trainer.learn()
    gc.collect()
    held = sum(w.numel() for part in (trainer.model, *references(trainer.model)) for w in part.parameters())
    trained = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    unit = max(sum(w.numel() for w in part.parameters()) for part in parts if type(part).__name__.endswith("GPT2Block"))
    return {
        "rest": live_bytes() - before,
        **peaks,
        "rest expected": 4 * (held + 2 * trained) / 2,
        "step at most": (4 * (held + 3 * trained) / 2 + 2 * 4 * unit) * 1.1,
    }


def references(model: Any) -> list[torch.nn.Module]:
    found: list[torch.nn.Module] = getattr(model, "reference_modules", list)()
    return found


HELD: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {}),
    "adapter": (2, {"model.peft_config": LORA}),
    "hybrid": (4, {"backend.shard": "hybrid"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "changes"), HELD.values(), ids=list(HELD))
@pytest.mark.parametrize("name", ["SFTTrainer", "PPOTrainer", "DPOTrainer"])
def test_each_process_holds_its_share_and_two_units(
    name: str, processes: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Half of weights, moments and reference, also on two machines of two processes; in a step of gradients, too.

    Activations are those of one process, in the second step or later, without gradients.
    """
    same = {key: value for key, value in changes.items() if key != "backend.shard"}
    alone = on_ranks(measured, tmp_path / "alone", name, {**same, "backend.kind": "ddp"}, processes=1)[0]
    activations = alone["forward"] - alone["rest"]
    changes = {**changes, "backend.kind": "fsdp"}
    for found in on_ranks(measured, tmp_path, name, changes, processes=processes, timeout=400):
        print(name, changes, activations, found)
        assert found["rest"] == pytest.approx(found["rest expected"], rel=0.1), found
        assert found["rest"] < found["step"] <= found["step at most"] + activations, found


def interrupted(rank: int, name: str, changes: Mapping[str, Any], folder: Path, stop: int | None) -> Any:
    """A run that is stopped after a step and continued, or not stopped."""
    on_two_machines(changes)
    if stop is not None:
        trainer = make(name, folder, **changes, callbacks=[StopAfter(stop)])
        with pytest.raises(Interrupted):
            trainer.learn()
    trainer = make(name, folder, **{**changes, "train.resume_from_checkpoint": "auto"})
    trainer.learn()
    states = {item: whole(trainer.run.backend, kept.item.state_dict()) for item, kept in trainer.state.items.items()}
    return states, rows(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes"), [("fsdp", 2), ("fsdp", 4), ("hybrid", 4)])
@pytest.mark.parametrize("case", ["PPOTrainer / plain", "ILQLTrainer / plain", "DPOTrainer / moving top"])
def test_a_run_that_is_resumed_is_the_run_that_was_not_stopped(
    case: str, kind: str, processes: int, tmp_path: Path
) -> None:
    name, changes = CASES[case]
    changes = {**changes, **matrix.KINDS[kind]}
    stopped = on_ranks(interrupted, name, changes, tmp_path / "stopped", 3, processes=processes)
    through = on_ranks(interrupted, name, changes, tmp_path / "through", None, processes=processes)
    assert_same([states for states, _ in stopped], [states for states, _ in through])
    assert stopped[0][1] == through[0][1]


def carried(rank: int, folder: Path, state: Any) -> Any:
    """Load the states of a model and its optimizer, and return them as this number of processes saves them."""
    trainer = make("PPOTrainer", folder, **{**CASES["PPOTrainer / plain"][1], "backend.kind": "fsdp"})
    if state is None:
        trainer.learn()
    for name, value in (state or {}).items():
        trainer.state.items[name].item.load_state_dict(value)
    backend, items = trainer.run.backend, trainer.state.items
    return {name: whole(backend, items[name].item.state_dict()) for name in ("model", "optimizer")}


@pytest.mark.slow
def test_a_state_of_two_processes_is_that_of_four(tmp_path: Path) -> None:
    of_two = on_ranks(carried, tmp_path / "two", None)[0]
    of_four = on_ranks(carried, tmp_path / "four", of_two, processes=4)[0]
    assert_same(of_four, of_two)


IMAGES: dict[str, dict[str, Any]] = {
    "all weights": {"method.height": 32, "method.width": 48},
    "sd3": test_estimate.IMAGES["sd3"],
}


def allocated(rank: int, folder: Path, changes: Mapping[str, Any]) -> dict[str, int]:
    """The most bytes that the allocator gives out while images are made, and in steps; live bytes at rest."""
    gc.collect()
    gc.freeze()
    before = live_bytes()
    with test_estimate.measured() as made:
        trainer = make("DDPOTrainer", folder, **changes)
        gc.collect()
        began = time.time_ns()
        with trainer.run.backend.sampling(), torch.no_grad():
            trainer.model.eval()
            generate_longest(trainer)
        generated, beside = time.time_ns(), test_estimate.remembered(trainer)
        parts = test_estimate.denoising_steps(trainer)
        gc.collect()
        stepped = time.time_ns()
        test_estimate.learn(trainer, parts)
    del parts
    gc.collect()
    return {
        "generate": test_estimate.most(made, began, generated) - beside,
        "train": test_estimate.most(made, stepped) - beside,
        "rest": live_bytes() - before - beside,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_images_take_what_the_estimate_says(name: str, tmp_path: Path) -> None:
    pipeline = sd()
    pipeline.register_modules(unet=unet(block_out_channels=(32,)))
    pipeline.save_pretrained(tmp_path / "pipeline")
    changes: dict[str, Any] = {"model.model_path": str(tmp_path / "pipeline"), "backend.kind": "fsdp"}
    changes |= {"train.batch_size": 8, "train.minibatch_size": 2, **IMAGES[name]}
    table = estimate(ingredients("DDPOTrainer", tmp_path, **changes)[0], gpus=2).table
    expected = {
        "generate": table["generate"].total() - sum(table["rest"][kind] for kind in ("optimizer", "copies")),
        "train": max(table[phase].total() for phase in ("forward/backward", "step")),
        "rest": table["rest"].total(),
    }
    counts = least(on_ranks(allocated, tmp_path / "run", changes, timeout=400) for _ in range(2))
    print(name, {kind: (expected[kind], counts[kind]) for kind in counts})
    assert counts == {kind: pytest.approx(value, rel=0.1) for kind, value in expected.items()}


def least(runs: Iterable[list[dict[str, int]]]) -> dict[str, int]:
    """The least of each count on any process in some runs: gloo's threads may hold what they send a little longer."""
    found = [counts for ranks in runs for counts in ranks]
    return {kind: min(counts[kind] for counts in found) for kind in found[0]}


def trained(rank: int, name: str, folder: Path, changes: Mapping[str, Any]) -> dict[str, int]:
    """The most bytes that the allocator gives out in a run of three steps, and the bytes that it has at the end."""
    with test_estimate.measured() as made:
        trainer = make(name, folder, **changes)
        parts = [test_estimate.padded(trainer.longest(trainer.run.microbatch_size)) for _ in range(2)]
        for _ in range(3):
            trainer.optimisation.step(parts, trainer.loss, trainer.units, lambda metrics: True)
    return {"train": test_estimate.most(made), "rest": test_estimate.at_end(made)}


def assert_training_as_estimated(name: str, folder: Path, changes: Mapping[str, Any]) -> int:
    """On two processes that make two micro-batches each in a step. Returns the most bytes of a process."""
    changes = {**test_estimate.COMMON, **changes, "train.batch_size": 8, "train.undo_nonfinite_updates": False}
    AcceleratorState._reset_state(reset_partial_state=True)  # it remembers the first number format of a process
    table = estimate(ingredients(name, folder, **changes)[0], gpus=2).table
    AcceleratorState._reset_state(reset_partial_state=True)
    counts = least(on_ranks(trained, name, folder, changes, timeout=400) for _ in range(4))
    training = max(table[phase].total() for phase in ("forward/backward", "step"))
    print(name, (training, counts["train"]), (table["rest"].total(), counts["rest"]))
    assert training == pytest.approx(counts["train"], rel=0.1)
    assert table["rest"].total() == pytest.approx(counts["rest"], rel=0.1)
    return counts["train"]


CHECKPOINTED = {"backend.gradient_checkpointing": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SFTTrainer", "PPOTrainer", "DPOTrainer"])
def test_activation_checkpointing_takes_less(name: str, tmp_path: Path) -> None:
    changes = {"backend.kind": "fsdp", "train.seq_length": 96}
    plain, checkpointed = (
        assert_training_as_estimated(name, tmp_path, {**changes, **more}) for more in ({}, CHECKPOINTED)
    )
    assert checkpointed < 0.8 * plain


@pytest.mark.slow
def test_bfloat16_takes_no_copy_of_all_weights(tmp_path: Path) -> None:
    """Autocast would keep a copy of each block in 16 bits until the forward pass ends: 1.5 MB of 13.2."""
    model = {"model.model_path": tiny_config(layers=12, n_embd=96, n_head=4), "train.seq_length": 24}
    changes = {**model, **CHECKPOINTED, "backend.kind": "fsdp"}
    float32, bfloat16 = (
        assert_training_as_estimated("SFTTrainer", tmp_path, {**changes, "backend.mixed_precision": given})
        for given in ("no", "bf16")
    )
    assert bfloat16 < 1.05 * float32


@pytest.mark.slow
@pytest.mark.parametrize("length", [24, 96])
@pytest.mark.parametrize("name", ["PPOTrainer", "DPOTrainer"])
def test_training_takes_what_the_estimate_says(name: str, length: int, tmp_path: Path) -> None:
    """What the reference has beside its blocks is gathered with the model's."""
    assert_training_as_estimated(name, tmp_path, {"backend.kind": "fsdp", "train.seq_length": length})
