"""The estimate of memory against the allocator of a real run on the CPU."""

from __future__ import annotations

import copy
import gc
import time
from bisect import bisect, bisect_left
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from tests.contract.recipes import RECIPES, ingredients
from tests.tiny import tiny_config, tiny_tokenizer
from tests.tiny_pipelines import saved, sd, unet
from tests.unit.cli_support import ppo_file, run, said
from trlx_like.api import make_trainer
from trlx_like.checkpoint.beside import Beside
from trlx_like.config import TRLConfig
from trlx_like.data.text import Completion
from trlx_like.distributed.setup import make_accelerator
from trlx_like.errors import ConfigError
from trlx_like.estimate import estimate
from trlx_like.imagined import LiveBytes, imagined
from trlx_like.rehearsal import make_rehearsal
from trlx_like.savings import smallest_change
from trlx_like.trainers.probe import generate_longest

pytestmark = pytest.mark.usefixtures("number_format")

LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160}
MODEL = tiny_config("llama", layers=3, vocabulary=700, max_position_embeddings=256, **SIZES)
COMMON = {
    "model.model_path": MODEL,
    "train.seq_length": 96,
    "train.batch_size": 4,
    "train.minibatch_size": 2,
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("PPOTrainer", {}),
    "PPO, hydra and value branch": (
        "PPOTrainer",
        {"model.num_layers_unfrozen": 1, "method.num_value_layers_unfrozen": 1, "train.minibatch_size": 4},
    ),
    "PPO, adapter": ("PPOTrainer", {"model.peft_config": LORA}),
    "GRPO, checkpointed": ("GRPOTrainer", {"backend.gradient_checkpointing": True}),
    "SFT, bf16": ("SFTTrainer", {"backend.mixed_precision": "bf16", "train.undo_nonfinite_updates": False}),
    "DPO, two forwards": ("DPOTrainer", {"method.precompute_ref_log_probs": False}),
    "DPO, kept states": ("DPOTrainer", {"model.num_layers_unfrozen": 1, "train.epochs": 2}),
    "Online DPO": ("OnlineDPOTrainer", {}),
    "ILQL": ("ILQLTrainer", {"optimizer.name": "sgd", "optimizer.kwargs": {"lr": 1.0}}),
    "Reward": ("RewardTrainer", {}),
    "RFT": ("RFTTrainer", {"model.num_layers_unfrozen": 2}),
    "RLOO": ("RLOOTrainer", {"method.beta": 0.0}),
}
QUICK = ("PPO, hydra and value branch",)


def configuration(run: str, folder: Path) -> TRLConfig:
    name, changes = RUNS[run]
    options = dict(COMMON)
    if "gen_kwargs" in RECIPES[name].method:
        options["method.gen_kwargs"] = {"max_new_tokens": 48}
    return ingredients(name, folder, **{**options, **changes})[0]


def padded(batch: Any) -> Any:
    """A token of padding: without any, transformers leaves out the attention mask."""
    for value in vars(batch).values():
        if value is not None and value.dtype == torch.bool:
            value[0, -1] = False
    return batch


def most(made: profile, since: int = 0, until: int = 2**63 - 1) -> int:
    """The most bytes that the allocator gave out at one time. since, until: nanoseconds of the clock."""
    times, given_out = _given_out(made)
    return int(given_out[(since <= times) & (times <= until)].max())


def at_end(made: profile) -> int:
    """The bytes that were not given back."""
    return int(_given_out(made)[1][-1])


def _given_out(made: profile) -> tuple[torch.Tensor, torch.Tensor]:
    """The times at which the allocator gave or took memory, and the bytes that were given out then.

    The profiler does not see what gloo's threads give back: what lies where new memory is given out was given back.
    """
    profiler: Any = made.profiler
    events, found = list(profiler.kineto_results.experimental_event_tree()), []
    for event in events:  # it grows
        events += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    held: dict[int, int] = {}
    places: list[int] = []  # sorted
    totals, total = [], 0
    for _, place, size in sorted(found):
        if size > 0:
            first = bisect(places, place)
            first -= first > 0 and places[first - 1] + held[places[first - 1]] > place
            last = bisect_left(places, place + size)
            total += size - sum(held.pop(gone) for gone in places[first:last])
            places[first:last], held[place] = [place], size
        else:
            total += size
            if held.pop(place, 0):
                places.remove(place)
        totals.append(total)
    return torch.tensor([time for time, *_ in sorted(found)]), torch.tensor(totals)


def measured() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def allocated(
    config: TRLConfig, folder: Path, use: Callable[..., object], data: Callable[[Any], Any] | None = None
) -> int:
    """The most bytes while a trainer is used on data; what making both takes for a moment does not count."""
    gc.collect()  # what an earlier trainer leaves behind would count as given back
    with measured() as made:
        trainer = make_rehearsal(config, str(folder))
        given = [] if data is None else [data(trainer)]
        gc.collect()
        began = time.time_ns()
        use(trainer, *given)
    return most(made, since=began)


def samples(trainer: Any) -> list[Any]:
    """The micro-batches of 4 samples, with what frozen blocks make of them. The rest of the experience is not made."""
    size = trainer.run.microbatch_size
    parts = [padded(trainer.longest(size)) for _ in range(4 // size)]
    for part in parts if getattr(trainer.model, "trunk", None) is not None else ():
        part.keep(trainer.model.trunk.states(part.completions().inputs()).detach())
    return parts


def learn(trainer: Any, parts: list[Any]) -> None:
    for _ in range(3):  # the optimizer's state is there in the second step, and its copy in the third
        trainer.optimisation.step(parts, trainer.loss, trainer.units, lambda metrics: True)


def denoising_steps(trainer: Any) -> list[Any]:
    """The micro-batches of the images that a process trains on in a step."""
    trainer.model.eval()
    with trainer.run.backend.sampling():
        made = trainer.make_images(trainer.prompts.take(trainer.run.local_batch_size))
    return list(trainer.microbatches(trainer.experience(made)))


def remembered(trainer: Any) -> int:
    """Bytes of the prompts that were encoded ahead; they stay in the CPU's memory."""
    known = [value for prompt in trainer.sampler.encoded._known.values() for value in vars(prompt).values()]
    return sum({value.data_ptr(): value.untyped_storage().nbytes() for value in known if value is not None}.values())


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in RUNS])
def test_training_takes_what_the_estimate_says(name: str, tmp_path: Path) -> None:
    config = configuration(name, tmp_path / "run")
    found = estimate(config)
    training = max(found.table[phase].total() for phase in ("forward/backward", "step"))
    assert training == pytest.approx(allocated(config, tmp_path / "run", learn, samples), rel=0.1)


def test_scoring_a_chunk_takes_what_the_estimate_says(tmp_path: Path) -> None:
    """PPO scores sixteen responses in parts of four, the batch, when no `train.minibatch_size` is given."""
    changes = {**COMMON, "train.minibatch_size": None, "method.gen_kwargs": {"max_new_tokens": 48}}
    config, given = ingredients("PPOTrainer", tmp_path, **changes)
    gc.collect()  # what an earlier trainer leaves behind would count as given back
    with measured() as made:
        trainer: Any = make_trainer(config, **given)
        batch = padded(trainer.longest(16))
        gc.collect()
        began = time.time_ns()
        with torch.no_grad():
            completion = Completion(batch.prompt, batch.prompt_mask, batch.response, batch.mask)
            trainer.record(completion, batch.scores, [True] * 16)
    expected = estimate(config).table["reward"]
    del expected["optimizer"], expected["copies"]  # which are there after the first steps
    assert expected.total() == pytest.approx(most(made, since=began), rel=0.1)


KEPT: dict[str, dict[str, Any]] = {
    "PPOTrainer": {"backend.mixed_precision": "bf16"},
    "GRPOTrainer": {"method.num_iterations": 2},
    "DPOTrainer": {"train.epochs": 2},
    "SFTTrainer": {"train.epochs": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_what_frozen_blocks_make_takes_what_the_estimate_says(name: str, tmp_path: Path) -> None:
    """The bytes that the samples of a round hold, for as many tokens as the longest ones have."""
    config, given = ingredients(name, tmp_path, **COMMON, **{"model.num_layers_unfrozen": 1}, **KEPT[name])
    found = estimate(config)
    trainer = make_trainer(config, **given)
    trainer.make_experience()
    elements = trainer.store.elements
    states = [value for element in elements for field, value in vars(element).items() if field.endswith("_trunk")]
    held, tokens = sum(value.untyped_storage().nbytes() for value in states), int(trainer.store.sizes().sum())
    longest = int(trainer.experience_class.filled(1, 1, config.train.seq_length - 1).lengths())
    assert found.kept == pytest.approx(held / tokens * longest, rel=0.1)
    assert found.samples == (0 if trainer.offline else len(elements))


def test_generation_takes_what_the_estimate_says(tmp_path: Path) -> None:
    """Two rows at a time, whose places two others take: 140 tokens, and 13 so that the cache seldom moves."""
    options = {"max_new_tokens": 100, "eos_token_id": 699}
    changes = {"method.gen_kwargs": options, "train.seq_length": 140, "train.undo_nonfinite_updates": False}
    config = ingredients("PPOTrainer", tmp_path, **{**COMMON, **changes}, **{"sampler.batch_size": 2})[0]
    found = estimate(config).table["generate"]
    assert found["KV cache"] == 2 * 2 * 153 * 3 * 2 * 16 * 4  # keys and values, rows, tokens, layers, heads, width
    with measured() as made:
        assert generate_longest(make_rehearsal(config, str(tmp_path / "run"))) == (2, True)
    assert found.total() - found["optimizer"] == pytest.approx(most(made), rel=0.1)


def test_a_machine_with_a_gpu_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made on the CPU there, too, and what accelerate has chosen for this process stays."""
    config = ingredients("SFTTrainer", tmp_path, **COMMON)[0]
    expected = estimate(config).peak
    other = ingredients("SFTTrainer", tmp_path, **COMMON, **{"backend.mixed_precision": "bf16"})[0]
    make_accelerator(other)
    before = vars(AcceleratorState()).copy()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert estimate(config).peak == expected
    assert vars(AcceleratorState()) == before and before["_mixed_precision"] == "bf16"


@pytest.mark.slow  # two estimates
def test_servers_generate_in_memory_of_their_own(tmp_path: Path) -> None:
    config, served = (ingredients("PPOTrainer", tmp_path, **COMMON)[0] for _ in range(2))
    served.sampler.engine, served.sampler.kwargs = "vllm", {"url": "http://localhost:1", "folder": str(tmp_path)}
    one, other = estimate(config).table, estimate(served).table
    assert other["generate"] == other["rest"] and one["generate"].total() > one["rest"].total()
    assert {**other, "generate": one["generate"]} == one
    served.sampler.engine, served.sampler.kwargs = "vllm_colocated", {"gpu_memory_utilization": 0.5}
    beside = estimate(served, memory=2.0).table
    awake = ("generate", "reward")
    assert beside == {phase: row + Counter({"KV cache": 2**30 * (phase in awake)}) for phase, row in other.items()}


def test_quantized_layers_by_hand(tmp_path: Path) -> None:
    # Of each of 3 blocks: 64 x 64 (twice), 64 x 32 (twice), 64 x 160 (three times), in 2 bytes or in a half and 1/64.
    layers = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    changes = {"model.peft_config": LORA, "model.dtype": "bfloat16"}
    config = ingredients("SFTTrainer", tmp_path, **{**COMMON, **changes})[0]
    plain = estimate(config).table["rest"]
    quantized = estimate(config.evolve(model={"quantization": "nf4"})).table["rest"]
    saved = layers * (2 - 0.5 - 1 / 64 - 4 / 64 / 256)
    assert plain["weights"] - quantized["weights"] == pytest.approx(saved, abs=1)
    assert plain - Counter(weights=plain["weights"]) == quantized - Counter(weights=quantized["weights"])


@pytest.mark.slow
def test_several_processes(tmp_path: Path) -> None:
    config = ingredients("SFTTrainer", tmp_path, **{**COMMON, "train.minibatch_size": None})[0]
    one, two = estimate(config), estimate(config, gpus=2)
    assert two.table["rest"] == one.table["rest"]
    assert two.table["step"]["copies"] - one.table["step"]["copies"] == one.table["step"]["gradients"]
    assert two.table["forward/backward"]["logits"] < one.table["forward/backward"]["logits"]
    # Of 4 samples, one of 3 processes has 2, as one of 2 has.
    assert estimate(config, gpus=3).table == two.table


def test_weights_that_are_divided_over_processes(tmp_path: Path) -> None:
    config = ingredients("SFTTrainer", tmp_path, **{**COMMON, "train.batch_size": 8})[0]
    whole, divided = estimate(config, gpus=4).table, estimate(config.evolve(backend={"kind": "fsdp"}), gpus=4).table
    for kind in ("weights", "optimizer", "copies"):
        assert divided["rest"][kind] == pytest.approx(whole["rest"][kind] / 4, abs=1)
    assert divided["step"]["copies"] == divided["rest"]["copies"]
    # Outside of the blocks: embeddings and head [700, 64], the last norm. Of two blocks: all their weights.
    outside, block = 4 * (2 * 700 * 64 + 64), 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64)
    gathered = divided["forward/backward"]["weights"] - divided["rest"]["weights"]
    assert gathered == pytest.approx(outside + 2 * block, rel=0.001)  # and the frequencies of positions


@pytest.mark.parametrize(
    ("shard", "weights"),
    [*(pytest.param(part, 1.0, marks=pytest.mark.slow) for part in ("optimizer", "gradients")), ("full", 0.25)],
)
def test_states_that_zero_divides(shard: str, weights: float, tmp_path: Path) -> None:
    config = ingredients("SFTTrainer", tmp_path, **{**COMMON, "train.batch_size": 8})[0]
    whole = estimate(config, gpus=4).table["rest"]

    def rest(**backend: str) -> Counter[str]:
        return estimate(config.evolve(backend={"kind": "deepspeed", **backend}), gpus=4).table["rest"]

    trained = whole["optimizer"] / 2  # two moments of each weight, and a few counters
    divided = rest(shard=shard)
    assert divided["weights"] == pytest.approx(weights * whole["weights"], abs=1)
    assert divided["optimizer"] == pytest.approx((whole["optimizer"] + trained) / 4, rel=1e-3)
    assert rest(shard=shard, offload="optimizer")["optimizer"] == 0
    # The memory in which gradients are summed stays, as large as all of them here.
    assert sum(rest(offload="all").values()) == pytest.approx(trained, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("PPOTrainer", {}),
        pytest.param("PPOTrainer", {"model.peft_config": LORA}, marks=pytest.mark.slow),
        pytest.param("RewardTrainer", {"model.peft_config": LORA}, marks=pytest.mark.slow),
    ],
)
def test_what_async_save_copies(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**COMMON, **changes, "train.async_save": True, "train.checkpoint_interval": 1, "train.total_steps": 2}
    config, given = ingredients(name, tmp_path, **options)
    copied, write = [], Beside.write

    def count(self: Beside, folder: Path) -> None:
        copied.append(sum(map(len, self.files.values())))
        write(self, folder)

    monkeypatch.setattr(Beside, "write", count)
    make_trainer(config, **given).learn()
    assert estimate(config).copied == pytest.approx(copied[0], rel=0.1)
    divided = estimate(config.evolve(backend={"kind": "fsdp"}), gpus=4)
    assert "model.peft_config" in changes or divided.copied == pytest.approx(7 / 16 * copied[0], rel=0.1)


def test_the_command(here: Path) -> None:
    file = ppo_file(here)
    lines = said(0, "estimate", file).splitlines()
    assert lines[0].split()[:3] == ["GiB", "per", "GPU"] and lines[-1].startswith("It fits: 0.0 of 80 GiB")
    assert [line.split("  ")[0] for line in lines[1:-1]] == [
        *("load", "generate", "reward", "forward/backward", "step", "rest")
    ]
    peak = estimate(TRLConfig.load_yaml(Path(file))).peak / 2**30
    result = run("estimate", file, "--gpu-memory", 0.9 * peak)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].endswith("It would with --set backend.gradient_checkpointing=true")


@pytest.mark.parametrize("memory", ["0", "-1", "nan"])
def test_memory_of_nothing_is_refused(memory: str, here: Path) -> None:
    result = run("estimate", ppo_file(here), "--gpu-memory", memory)
    assert result.exit_code == 2 and f"--gpu-memory ({memory}) must be more than 0 GiB." in result.output


@pytest.mark.slow
def test_changes_together_and_none(tmp_path: Path) -> None:
    small = {**COMMON, "optimizer.name": "sgd", "optimizer.kwargs": {"lr": 1.0}, "train.minibatch_size": 1}
    config = ingredients("SFTTrainer", tmp_path, **{**small, "model.peft_config": LORA, "model.dtype": "bfloat16"})[0]
    config = config.evolve(model={"quantization": "nf4"})
    both = config.evolve(train={"undo_nonfinite_updates": False}, backend={"gradient_checkpointing": True})
    needed = estimate(both).peak / 2**30
    change = {"train.undo_nonfinite_updates": False, "backend.gradient_checkpointing": True}
    assert smallest_change(config, 1, needed) == change
    assert smallest_change(config, 1, needed * 0.99) is None


IMAGES: dict[str, dict[str, Any]] = {
    "adapter and reference": {"model.peft_config": LORA | {"target_modules": ["to_q", "to_v"]}, "method.beta": 0.1},
    "all weights": {"sampler.batch_size": 1},
    "checkpointed, in memory": {"backend.gradient_checkpointing": True, "method.guidance_scale": 1.0},
    "sdxl": {"model.model_path": saved("sdxl")},
    "sd3": {"model.model_path": saved("sd3"), "method.height": 16, "method.width": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_images_take_what_the_estimate_says(name: str, tmp_path: Path) -> None:
    pipeline = sd()
    pipeline.register_modules(unet=unet(block_out_channels=(32,)))
    path: Any = pipeline  # never saved, as a program makes it
    if "memory" not in name:
        path = str(tmp_path / "pipeline")
        pipeline.save_pretrained(path)
    options: dict[str, Any] = {"model.model_path": path, "method.height": 32, "method.width": 48, "train.batch_size": 4}
    options["method.num_inference_steps"] = 2  # as many as a rehearsal makes
    config = ingredients("DDPOTrainer", tmp_path, **{**options, **IMAGES[name], "train.minibatch_size": 2})[0]
    found = estimate(config).table
    beside = remembered(make_rehearsal(config, str(tmp_path / "beside")))
    later = sum(found["rest"][kind] for kind in ("optimizer", "copies"))
    generated = allocated(config, tmp_path / "generate", generate_longest) - beside
    assert found["generate"].total() - later == pytest.approx(generated, rel=0.1)
    training = max(found[phase].total() for phase in ("forward/backward", "step"))
    assert training == pytest.approx(allocated(config, tmp_path / "train", learn, denoising_steps) - beside, rel=0.1)


def test_a_pipeline_that_a_function_makes_is_refused_by_name(tmp_path: Path) -> None:
    config = ingredients("DDPOTrainer", tmp_path, **{"model.model_path": "module:function"})[0]
    with pytest.raises(ConfigError, match=r"model_path \(module:function\) is a function; name a folder"):
        estimate(config)


def test_a_copied_tensor_has_the_same_mode() -> None:
    """A copied mode has weak references to storages that nobody counted: freed twice, they corrupt the heap."""
    with imagined():
        weight: Any = torch.nn.Linear(2, 2).weight
        assert copy.deepcopy(weight).fake_mode is weight.fake_mode


@pytest.mark.parametrize("length", [100, 330, 1024])
def test_what_attention_works_with_counts(length: int) -> None:
    """The allocator gives out two blocks of scores beside results: of 32, 64 or 256 queries with 512 keys at most."""

    def attend() -> None:
        query, key, value = (torch.zeros(2, length, 4, 16, requires_grad=True).transpose(1, 2) for _ in range(3))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        out.transpose(1, 2).backward(torch.ones(2, length, 4, 16))

    with measured() as given_out:
        attend()
    with imagined(), LiveBytes() as live:
        attend()
    assert live.peak.total() == pytest.approx(most(given_out), rel=0.02)


WITHOUT: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("PPOTrainer", {}),
    "DPO, divided": ("DPOTrainer", {"backend.kind": "fsdp", "model.num_layers_unfrozen": 1}),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_no_weight_is_read_and_none_has_memory(case: str, tmp_path: Path) -> None:
    """Of a model of 65 MB, whose file has no weights."""
    folder, sizes = tmp_path / "model", {"hidden_size": 512, "intermediate_size": 2048}
    tiny_config("llama", layers=2, vocabulary=24_000, max_position_embeddings=256, **sizes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    name, changes = WITHOUT[case]
    config = ingredients(name, tmp_path / "run", **{**COMMON, **changes, "model.model_path": str(folder)})[0]
    with measured() as made:
        table = estimate(config, gpus=2).table
    assert table["load"].total() > 30 * 2**20
    assert most(made) < 2**18
