"""Files of trlX, accelerate and Ray become files of this package, with a line for each change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.compat.test_trlx_yaml import PPO, SFT
from tests.tiny import tiny_lm, tiny_tokenizer
from trlx_like import AutoModelForCausalLMWithILQLHeads, AutoModelForCausalLMWithValueHead, TRLConfig
from trlx_like.cli import app
from trlx_like.compat.migrate import migrate
from trlx_like.errors import ConfigError
from trlx_like.models.loading import load_model
from trlx_like.sweep.spec import Range, read_sweep


def translated(text: str, folder: Path) -> tuple[Any, list[str]]:
    (folder / "old.yml").write_text(text)
    made, notes = migrate(folder / "old.yml")
    (folder / "new.yml").write_text(made)
    return yaml.safe_load(made), notes


def test_a_run_of_trlx(here: Path) -> None:
    values, notes = translated(
        PPO.replace('tracker: "wandb"', "save_optimizer: no").replace("save_optimizer: true", ""), here
    )
    config = TRLConfig.load_yaml(here / "new.yml")
    assert (config.train.trainer, config.method.name) == ("PPOTrainer", "PPOConfig")
    assert config.train.save_optimizer is False  # as YAML 1.1, which trlX reads, has it
    assert config.train.tracker == "wandb" and config.train.max_grad_norm is None
    assert config.optimizer.kwargs["lr"] == 3e-5 and config.scheduler.kwargs["eta_min"] == 3e-5
    assert "keep_checkpoints" not in values["train"]  # what trlX does not have is left to its default
    assert notes == [
        "added train.tracker: 'wandb' (trlX's default)",
        "added train.max_grad_norm: null (trlX clips no gradients)",
        "changed train.trainer: 'AcceleratePPOTrainer' -> 'PPOTrainer' (the name here)",
        "changed method.name: 'ppoconfig' -> 'PPOConfig' (the name here)",
        "changed method.scale_reward: 'ignored' -> null (the value that switches it off)",
        "changed method.cliprange_reward: false -> null (the value that switches it off)",
        "other meaning: train.batch_size (32) counts all processes together, and in trlX each: --num-processes N "
        "multiplies it for the same run",
        "other meaning: method.num_rollouts (128) counts all processes together, and in trlX each: --num-processes N "
        "multiplies it for the same run",
        "other meaning: train.minibatch_size no longer changes the gradient, which trlX made 4 times as large by it",
        "other meaning: method.target: the KL weight adapts once a round, and in trlX in each pass over it",
        "other meaning: the KL reference is the policy's own start; in trlX another network for num_layers_unfrozen -1 "
        "and 0",
    ]


def test_an_older_run_of_trlx(here: Path) -> None:
    """With the orchestrator of trlX 0.5, and top_k as its files have it."""
    older = PPO.replace("top_k: 0", "top_k: 0.0").replace(
        "  seq_length:", "  orchestrator: PPOOrchestrator\n  seq_length:"
    )
    values, notes = translated(older, here)
    assert "dropped train.orchestrator: 'PPOOrchestrator' (unknown key.)" in notes
    assert values["method"]["gen_kwargs"]["top_k"] == 0 and not [note for note in notes if note.startswith("to do")]


def test_the_batches_of_several_processes(here: Path) -> None:
    (here / "old.yml").write_text(PPO)
    one, made = TRLConfig.from_dict(yaml.safe_load(migrate(here / "old.yml")[0])), here / "new.yml"
    words = ["migrate", str(here / "old.yml"), "--num-processes", "4", "--to", str(made)]
    done = CliRunner().invoke(app, words)
    config = TRLConfig.load_yaml(made)
    assert (config.train.batch_size, config.method.to_dict()["num_rollouts"]) == (4 * 32, 4 * 128)
    assert config == one.evolve(train={"batch_size": 128}, method={"num_rollouts": 512})
    assert "changed train.batch_size: 32 -> 128 (trlX: on each of 4 processes)" in done.stdout
    assert "changed method.num_rollouts: 128 -> 512 (trlX: on each of 4 processes)" in done.stdout
    assert "counts all processes" not in done.stdout and "made 4 times as large" in done.stdout
    made.write_text("distributed_type: NO")
    for file in (made, here):
        done = CliRunner().invoke(app, ["migrate", str(file), "--num-processes", "4", "--to", str(here / "x")])
        assert done.exit_code == 2 and "--num-processes (4) is for the configuration of a run" in done.output


def test_what_a_run_of_trlx_cannot_take_along(here: Path) -> None:
    old = SFT.replace(
        "tracker: null", "tracker: null, resume_from_checkpoint: ckpts/x, trainer_kwargs: {a: 1}, lr_ramp: 3"
    )
    values, notes = translated(old, here)
    assert values["train"]["resume_from_checkpoint"] is None and "lr_ramp" not in values["train"]
    assert notes[2].startswith("dropped train.resume_from_checkpoint: ckpts/x (a run of trlX cannot be")
    assert notes[3] == "dropped train.trainer_kwargs: {'a': 1} (keywords of trlX's trainer)"
    assert "dropped train.lr_ramp: 3 (unknown key.)" in notes
    TRLConfig.load_yaml(here / "new.yml")
    _, notes = translated(PPO.replace("AcceleratePPOTrainer", "NeMoPPOTrainer"), here)
    assert notes[-1] == (
        "to do: train.trainer: trainer 'NeMoPPOTrainer' is not available: NeMo is not supported; use PPOTrainer or "
        "SFTTrainer (see MIGRATING.md)."
    )
    done = CliRunner().invoke(app, ["migrate", str(here / "old.yml"), "--to", str(here / "newest.yml")])
    assert done.exit_code == 2 and "to do: train.trainer" in done.stdout and (here / "newest.yml").is_file()


ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "num_processes": 8,
    "num_machines": 1,
    "mixed_precision": "bf16",
}
SHARDED = {
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_offload_params": True,
    "fsdp_activation_checkpointing": True,
}
NODES = {
    "num_machines": 2,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29500,
    "gpu_ids": "all",
}


@pytest.mark.parametrize(
    ("given", "made", "lines"),
    [
        (
            {"gpu_ids": "0,2", "num_processes": 2},
            {"backend": {"mixed_precision": "bf16"}},
            [
                "to count batches as trlX does: trlx-like migrate RUN.yml --num-processes 2",
                "run it with: CUDA_VISIBLE_DEVICES=0,2 trlx-like train FILE --num-processes 2",
            ],
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": SHARDED, "mixed_precision": False, **NODES},
            {"backend": {"kind": "fsdp", "shard": "gradients", "offload": "all", "gradient_checkpointing": True}},
            [
                "to count batches as trlX does: trlx-like migrate RUN.yml --num-processes 8",
                "run it with: trlx-like launch FILE --nodes 2 --gpus 4 --node 1 --address 10.0.0.1 --port 29500",
            ],
        ),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_reshard_after_forward": False},
                "mixed_precision": "fp8",
            },
            {"backend": {"kind": "fsdp", "shard": "gradients"}},
            [
                "dropped mixed_precision: fp8 (there is fp16 and bf16)",
                "to count batches as trlX does: trlx-like migrate RUN.yml --num-processes 8",
                "run it with: trlx-like train FILE --num-processes 8",
            ],
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "dynamo_backend": "INDUCTOR",
                "deepspeed_config": {
                    "zero_stage": 2,
                    "gradient_clipping": 0.5,
                    "gradient_accumulation_steps": 4,
                    "offload_optimizer_device": "cpu",
                    "offload_param_device": "nvme",
                },
            },
            {
                "backend": {
                    "kind": "deepspeed",
                    "shard": "gradients",
                    "offload": "optimizer",
                    "mixed_precision": "bf16",
                },
                "train": {"max_grad_norm": 0.5},
            },
            [
                "dropped offload_param_device: nvme (there is the CPU's memory)",
                "dropped gradient_accumulation_steps (train.minibatch_size says what goes through at once)",
                "dropped dynamo_backend: 'INDUCTOR' (nothing here follows it)",
                "to count batches as trlX does: trlx-like migrate RUN.yml --num-processes 8",
                "run it with: trlx-like train FILE --num-processes 8",
            ],
        ),
        (
            {"distributed_type": "MEGATRON_LM", "use_cpu": True, "mixed_precision": "no"},
            {"backend": {"device": "cpu"}},
            [
                "dropped distributed_type: MEGATRON_LM (there is ddp, fsdp and deepspeed)",
                "to count batches as trlX does: trlx-like migrate RUN.yml --num-processes 8",
                "run it with: trlx-like train FILE --num-processes 8",
            ],
        ),
    ],
)
def test_a_configuration_of_accelerate(given: dict[str, Any], made: Any, lines: list[str], here: Path) -> None:
    values, notes = translated(yaml.safe_dump({**ACCELERATE, **given}), here)
    assert (values, notes) == (made, lines)
    run: dict[str, Any] = {"model": {"model_path": "gpt2"}, "method": {"name": "SFTConfig"}}
    run["train"] = {"trainer": "SFTTrainer", "total_steps": 1, "epochs": 1, "batch_size": 8, **values.get("train", {})}
    TRLConfig.from_dict({**run, "backend": values["backend"]})  # every option of it exists


SWEEP = """
tune_config: {mode: max, metric: reward/mean, search_alg: bohb, scheduler: fifo, num_samples: 2, max_concurrent: 1}
optimizer.kwargs.lr: {strategy: loguniform, values: [1.0e-6, 1.0e-3]}
method.init_kl_coef: {strategy: quniform, values: [0.0, 1.0, 0.25]}
method.ppo_epochs: {strategy: randint, values: [1, 4]}
train.tags: {strategy: choice, values: [[a], [b, "it's"]]}
method.gamma: {strategy: grid, values: [0.9, 1.0]}
method.lam: {strategy: randn, values: [0.9, 0.01]}
train.batch_size: {strategy: qlograndint, values: [8, 64, 8]}
"""


def test_a_sweep(here: Path) -> None:
    (here / "sweep.yml").write_text(SWEEP)
    text, notes = migrate(here / "sweep.yml")
    assert notes == [
        "changed method.lam: randn -> uniform within two deviations, 0.88 to 0.92",
        "dropped the step 8 of train.batch_size (a logarithm has none)",
        "changed method.gamma: grid -> choice (search draws all options)",
        "dropped tune_config.max_concurrent: 1 (nothing here follows it)",
        "run it with: trlx-like sweep FILE --config CONFIG",
    ]
    (here / "new.yml").write_text(text)
    spec, none = read_sweep(here / "new.yml", Path("ppo.yml"))
    assert (spec.search, spec.trials, spec.mode, spec.metric, none) == ("tpe", 2, "max", "reward/mean", [])
    assert spec.spaces == {
        "optimizer.kwargs.lr": Range(low=1e-6, high=1e-3, log=True),
        "method.init_kl_coef": Range(low=0.0, high=1.0, step=0.25),
        "method.ppo_epochs": Range(low=1, high=3),  # Ray leaves the upper end out
        "train.tags": [["a"], ["b", "it's"]],
        "method.gamma": [0.9, 1.0],
        "method.lam": Range(low=0.88, high=0.92),
        "train.batch_size": Range(low=8, high=64, log=True),
    }
    grid = (
        "tune_config: {num_samples: 3, scheduler: hyperband}\nmethod.gamma: {strategy: grid_search, values: [0.9, 1.0]}"
    )
    (here / "grid.yml").write_text(grid)
    assert migrate(here / "grid.yml")[1][:2] == [
        "changed num_samples: 3 -> 1 (each point once; give seeds to repeat it)",
        "dropped tune_config.scheduler: hyperband (add halving: {first: STEP, factor: 3})",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tune_config: {}\na.b: {strategy: often, values: [1]}", "a.b: strategy 'often' is none of Ray's"),
        ("tune_config: {}\na.b: 3", "a.b: a sweep needs strategy and values, got 3"),
        ("just: text", "this is no configuration of trlX"),
    ],
)
def test_what_is_no_file_of_trlx(text: str, message: str, here: Path) -> None:
    (here / "some.yml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        migrate(here / "some.yml")


# Checkpoints.


def of_trlx(folder: Path, heads: dict[str, torch.Tensor], family: str = "gpt2") -> dict[str, torch.Tensor]:
    """Write a model as trlX does, in a checkpoint's `hf_model`, and return the weights of the language model."""
    lm = tiny_lm(family)
    inner = folder / "hf_model"
    lm.config.save_pretrained(inner)
    tiny_tokenizer().save_pretrained(inner)
    weights = {name: value.clone() for name, value in lm.state_dict().items()}
    state = {f"base_model.{name}": value for name, value in weights.items()}
    torch.save({**state, **heads}, inner / "pytorch_model.bin")
    return weights


def layers(prefix: str, out: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(prefix))
    sizes = {"0.weight": (32, 16), "0.bias": (32,), "2.weight": (out, 32), "2.bias": (out,)}
    return {f"{prefix}{name}": torch.randn(size, generator=generator) for name, size in sizes.items()}


def test_a_checkpoint_of_ppo(here: Path) -> None:
    frozen = {"frozen_head.decoder_blocks.0.weight": torch.zeros(2)}
    weights = of_trlx(here / "checkpoint_10", layers("v_head.", 1) | frozen)
    with pytest.raises(ConfigError, match="its weights have trlX's names; `trlx-like migrate FOLDER --to NEW_FOLDER`"):
        AutoModelForCausalLMWithValueHead.from_pretrained(here / "checkpoint_10" / "hf_model")
    done = CliRunner().invoke(app, ["migrate", str(here / "checkpoint_10"), "--to", str(here / "new")])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"changed base_model.* -> the names of transformers, in safetensors ({len(weights)} weights, torch.float32)",
        "changed v_head.* -> heads.safetensors; trlx_like.AutoModelFor...WithValueHead.from_pretrained loads it with "
        "the model. A new run on the folder makes new heads",
        "dropped frozen_head.* (a run makes its reference from the weights that it starts with)",
        "dropped optimizer, schedule and random numbers (pickled; a run of trlX cannot be continued)",
    ]
    plain = AutoModelForCausalLM.from_pretrained(here / "new").state_dict()
    assert all(torch.equal(plain[name], value) for name, value in weights.items())
    model = AutoModelForCausalLMWithValueHead.from_pretrained(here / "new")
    hidden = torch.linspace(-1, 1, 16)
    head = layers("v_head.", 1)
    inner = torch.relu(head["v_head.0.weight"] @ hidden + head["v_head.0.bias"])
    expected = head["v_head.2.weight"][0] @ inner + head["v_head.2.bias"][0]
    torch.testing.assert_close(model.v_head(hidden[None])[0], expected)
    assert not list((here / "new").glob("*.bin"))
    again = CliRunner().invoke(app, ["migrate", str(here / "checkpoint_10"), "--to", str(here / "new")])
    assert again.exit_code == 2 and "there is something already" in again.output


def test_a_checkpoint_of_ilql(here: Path) -> None:
    names = {"v_head.": 1, **{f"{kind}.{n}.": 32 for kind in ("q_heads", "target_q_heads") for n in (0, 1)}}
    heads = {k: v for name, out in names.items() for k, v in layers(f"ilql_heads.{name}", out).items()}
    of_trlx(here / "old", heads, "llama")
    file = here / "old" / "hf_model" / "pytorch_model.bin"  # in two parts, as large models are
    whole = torch.load(file, weights_only=True)
    parts = [{k: v for n, (k, v) in enumerate(whole.items()) if n % 2 == part} for part in (0, 1)]
    for number, part in enumerate(parts):
        torch.save(part, file.with_name(f"pytorch_model-{number}.bin"))
    file.unlink()
    places = {name: f"pytorch_model-{number}.bin" for number, part in enumerate(parts) for name in part}
    file.with_name("pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    done = CliRunner().invoke(app, ["migrate", str(here / "old"), "--to", str(here / "new")])
    assert done.exit_code == 0 and "WithILQLHeads" in done.output, done.output
    state = AutoModelForCausalLMWithILQLHeads.from_pretrained(here / "new").ilql_heads.state_dict()
    assert torch.equal(state["targets.1.layers.2.bias"], heads["ilql_heads.target_q_heads.1.2.bias"])
    assert torch.equal(state["qs.0.layers.0.weight"], heads["ilql_heads.q_heads.0.0.weight"])
    assert torch.equal(state["value.layers.2.weight"], heads["ilql_heads.v_head.2.weight"])
    assert len(state) == len(heads) == 20


def test_a_checkpoint_with_an_adapter(here: Path) -> None:
    base = here / "base"
    tiny_lm().save_pretrained(base)
    lm = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, init_lora_weights=False))
    lm.save_pretrained(str(here / "old"), safe_serialization=False)
    torch.save(layers("v_head.", 1), here / "old" / "pytorch_model.bin")
    done = CliRunner().invoke(app, ["migrate", str(here / "old"), "--to", str(here / "new")])
    assert done.exit_code == 2 and "to do: there is no tokenizer in the folder" in done.output, done.output
    found = AutoModelForCausalLMWithValueHead.from_pretrained(here / "new")
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(found(ids)[0], lm(ids).logits)
    assert torch.equal(found.v_head.state_dict()["layers.2.bias"], layers("v_head.", 1)["v_head.2.bias"])
    assert sorted(file.name for file in (here / "new").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "heads.safetensors",
    ]


def test_what_is_no_checkpoint_of_trlx(here: Path) -> None:
    branch = {"v_head.decoder_blocks.0.weight": torch.zeros(2), "other.x": torch.zeros(1)}
    weights = of_trlx(here / "old", branch)
    done = CliRunner().invoke(app, ["migrate", str(here / "old"), "--to", str(here / "new")])
    assert "dropped v_head.* (v_head.decoder_blocks.0.weight: a value branch" in done.stdout
    assert "dropped other (not a part of trlX's models)" in done.stdout
    load_model(str(here / "new"), TRLConfig.from_dict(yaml.safe_load(SFT)).model)
    lost = {name: value for name, value in weights.items() if "ln_f" not in name}
    torch.save({f"base_model.{k}": v for k, v in lost.items()}, here / "old" / "hf_model" / "pytorch_model.bin")
    for folder, message in {
        "old": "has no transformer.ln_f",
        "new": "no weight is named base_model.*. If transformers loads it, name it as model.model_path.",
        "nowhere": "there is no such file or folder",
    }.items():
        done = CliRunner().invoke(app, ["migrate", str(here / folder), "--to", str(here / f"{folder}2")])
        assert done.exit_code == 2 and message in done.output, done.output
    done = CliRunner().invoke(app, ["migrate", str(here / "old")])
    assert done.exit_code == 2 and "--to is missing" in done.output
