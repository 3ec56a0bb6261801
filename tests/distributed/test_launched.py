"""What a launcher asks for is followed or refused, with the names of both sides."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin

from tests.contract.recipes import GENERATION, NO_DROPOUT, PROMPTS, ingredients, make
from tests.distributed.matrix import exported
from tests.distributed.ranks import on_ranks
from tests.tiny import save_tiny
from trlx_like.distributed.launched import check_launcher
from trlx_like.errors import ConfigError
from trlx_like.testing.compare import apart

ROOT = Path(__file__).resolve().parents[2]

REFUSED = {
    "bf16": ({"ACCELERATE_MIXED_PRECISION": "bf16"}, r"mixed_precision: bf16 .*, and backend.mixed_precision is 'no'"),
    "fsdp": ({"ACCELERATE_USE_FSDP": "true"}, r"fsdp: true \(ACCELERATE_USE_FSDP\), and backend.kind is ddp"),
    "deepspeed": ({"ACCELERATE_USE_DEEPSPEED": "True"}, r"deepspeed: True \(ACCELERATE_USE_DEEPSPEED\), and"),
    "megatron": ({"ACCELERATE_USE_MEGATRON_LM": "1"}, r"megatron_lm: 1 \(ACCELERATE_USE_MEGATRON_LM\), and trlx_like"),
    "compiler": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, r"dynamo_backend: INDUCTOR \(ACCELERATE_DYNAMO_BACKEND\)"),
    "accumulation": (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        r"gradient_accumulation_steps: 4 .*, and train.minibatch_size \(None\)",
    ),
    "processes": (
        {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"},
        "asked for several processes .* has started one.*--num-processes",
    ),
}
NOTHING = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_FSDP": "false"}


@pytest.mark.parametrize(("variables", "words"), REFUSED.values(), ids=list(REFUSED))
def test_a_setting_that_the_configuration_does_not_follow_is_refused(
    variables: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        make("SFTTrainer", tmp_path)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_launcher_that_asks_for_nothing_else_is_let_through(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = ingredients("SFTTrainer", tmp_path, **{"backend.mixed_precision": precision})
    check_launcher(config, {**NOTHING, "ACCELERATE_MIXED_PRECISION": precision})
    check_launcher(config, NOTHING)


DIVIDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"} | {
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
OTHERS = {
    "FSDP_VERSION": ("1", "fsdp_version: 1 .*, and the backend is FSDP2"),
    "FSDP_RESHARD_AFTER_FORWARD": ("false", "fsdp_reshard_after_forward: false .*, and backend.shard is full"),
    "FSDP_OFFLOAD_PARAMS": ("true", "fsdp_offload_params: true .*, and backend.offload is none"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("true", "true .*, and backend.gradient_checkpointing is false"),
    "FSDP_AUTO_WRAP_POLICY": ("SIZE_BASED_WRAP", "SIZE_BASED_WRAP .*, block by block as the model names its blocks"),
    "FSDP_IGNORED_MODULES": ("lm_head", "fsdp_ignored_modules: lm_head .*, and backend.kind: fsdp divides all weights"),
}


def test_options_of_fsdp_are_those_of_the_section_backend(tmp_path: Path) -> None:
    config, _ = ingredients("SFTTrainer", tmp_path, **{"backend.kind": "fsdp"})
    check_launcher(config, DIVIDED)
    for name, (value, words) in OTHERS.items():
        with pytest.raises(ConfigError, match=words):
            check_launcher(config, {**DIVIDED, name: value})
    other = {"backend.shard": "gradients", "backend.offload": "all", "backend.gradient_checkpointing": True}
    config, _ = ingredients("SFTTrainer", tmp_path, **{"backend.kind": "fsdp", **other})
    flipped = ("FSDP_RESHARD_AFTER_FORWARD", "FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING")
    check_launcher(config, {**DIVIDED, **{name: OTHERS[name][0] for name in flipped}})


ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"} | {
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_GRADIENT_CLIPPING": "1.0",
}
OTHER_ZERO = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("2", "zero_stage: 2 .*, and backend.shard is full"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("cpu", "cpu .*, and backend.offload is none"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("nvme", "nvme .*, and backend.offload is none"),
    "ACCELERATE_GRADIENT_CLIPPING": ("0.5", "gradient_clipping: 0.5 .*, and train.max_grad_norm is 1.0"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("ds.json", "config_file: ds.json .*, and that is not read"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("MoE", "moe_layer_cls_names: MoE"),
}


def test_options_of_deepspeed_are_those_of_the_section_backend(tmp_path: Path) -> None:
    own = {"backend.kind": "deepspeed", "train.max_grad_norm": 1.0}
    config, _ = ingredients("SFTTrainer", tmp_path, **own)
    check_launcher(config, ZERO)
    for name, (value, words) in OTHER_ZERO.items():
        with pytest.raises(ConfigError, match=words):
            check_launcher(config, {**ZERO, name: value})
    other = {"backend.shard": "gradients", "backend.offload": "optimizer", "train.max_grad_norm": 0.5}
    config, _ = ingredients("SFTTrainer", tmp_path, **{**own, **other})
    flipped = [name for name in list(OTHER_ZERO)[:4] if "PARAM" not in name]
    check_launcher(config, {**ZERO, **{name: OTHER_ZERO[name][0] for name in flipped}})


def with_own_accelerator(rank: int, folder: Path, arguments: dict[str, Any]) -> str:
    Accelerator(cpu=True, **arguments)
    with pytest.raises(ConfigError) as refused:
        make("SFTTrainer", folder)
    return str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}, "(ACCELERATE_USE_FSDP), and backend.kind"),
        ({"dynamo_backend": "eager"}, "an Accelerator with the dynamo_backend"),
        ({"mixed_precision": "bf16"}, "backend.mixed_precision ('no')"),
    ],
    ids=["fsdp", "compiler", "precision"],
)
def test_plugins_of_an_accelerator_that_the_program_made_are_refused(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in on_ranks(with_own_accelerator, tmp_path, arguments, processes=1)[0]


def alone(rank: int, folder: Path) -> str:
    os.environ["WORLD_SIZE"] = "1"
    Accelerator(cpu=True)  # it has seen one process
    os.environ["WORLD_SIZE"] = "2"
    with pytest.raises(ConfigError) as refused:
        make("SFTTrainer", folder)
    return str(refused.value)


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path: Path) -> None:
    assert on_ranks(alone, tmp_path, processes=1)[0].startswith("The launcher started 2 processes, and this one knows")


LAUNCHES = {
    "fsdp": ("fsdp.yml", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "ACCELERATE_USE_FSDP"),
    "bf16": ("bf16.yml", {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, "ACCELERATE_MIXED_PRECISION"),
    "one of two": ("cpu.yml", {"distributed_type": "MULTI_CPU"}, "asked for several processes"),
}


def launch(folder: Path, launcher: Path, **backend: str) -> subprocess.CompletedProcess[str]:
    """Train for two steps by `accelerate launch` with a YAML of accelerate and a section `backend`."""
    config = {
        "model": {"model_path": save_tiny(folder / "model", **NO_DROPOUT)},
        "method": {"name": "SFTConfig", "gen_kwargs": GENERATION},
        "optimizer": {"name": "adamw", "kwargs": {"lr": 3e-3, "eps": 1e-6}},
        "train": {"trainer": "SFTTrainer", "seq_length": 20, "batch_size": 2, "total_steps": 2, "epochs": 1},
        "backend": backend,
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    (folder / "run.py").write_text(f"import trlx_like\ntrlx_like.train('config.yml', samples={PROMPTS!r})\n")
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(launcher), "run.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )


def assert_launch_refused(folder: Path, run: subprocess.CompletedProcess[str], words: str) -> None:
    assert run.returncode, run.stdout
    assert run.stderr.count("trlx_like.errors.ConfigError: ") == 1 and words in run.stderr, run.stderr
    assert not (folder / "ckpts").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "words"), LAUNCHES.values(), ids=list(LAUNCHES))
def test_accelerate_launch_ends_with_the_exit_code_of_a_mistake(
    name: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    launcher = {"compute_environment": "LOCAL_MACHINE", "use_cpu": name != "fsdp.yml", "num_processes": 2}
    launcher |= {"num_machines": 1, "machine_rank": 0, "mixed_precision": "no", **settings}
    (tmp_path / name).write_text(yaml.safe_dump(launcher))
    assert_launch_refused(tmp_path, launch(tmp_path, tmp_path / name), words)


FOLLOWED = {"ddp": {"kind": "ddp"}, "fsdp2": {"kind": "fsdp"}}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), FOLLOWED.items())
def test_accelerate_launch_with_a_file_of_ours(name: str, backend: dict[str, str], tmp_path: Path) -> None:
    assert_launch_trains(tmp_path, name, backend)


def assert_launch_trains(folder: Path, name: str, backend: dict[str, str]) -> None:
    """With a file of `configs/accelerate` two processes end with the export of one that nobody launched."""
    run = launch(folder, ROOT / "configs" / "accelerate" / f"{name}.yaml", **backend)
    assert run.returncode == 0 and "SFTTrainer: 2 processes on cpu" in run.stdout + run.stderr, run.stderr
    two = exported(folder / "ckpts")
    shutil.rmtree(folder / "ckpts")
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "backend": {}}))
    subprocess.run([sys.executable, "run.py"], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert two and apart(two, exported(folder / "ckpts"), "export") < 2e-6


def test_an_error_that_a_program_does_not_catch_is_printed_by_one_process(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("import trlx_like\ntrlx_like.train(reward_fn=len, prompts=['a'], judge=3.5)\n")
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "run.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode and run.stderr.count("trlx_like.errors.ConfigError: ") == 1, run.stderr
