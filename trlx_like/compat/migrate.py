"""Turns files of trlX into files of this package, and says what was changed and why: `trlx-like migrate`.

A configuration of a run, a configuration of accelerate, a sweep of Ray, or a checkpoint. Nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trlx_like.config import TRAINERS, TRLConfig
from trlx_like.config.problems import InvalidConfig, UnknownKey, shown
from trlx_like.config.yaml_source import YamlSource, as_yaml, plain
from trlx_like.errors import ConfigError

Migration = tuple[str, list[str]]
"""The text of the new file, and a line for each thing that was changed, lost, or now means something else."""


def migrate(file: str | Path, processes: int | None = None) -> Migration:
    """Translate a YAML file.

    Args:
        file: A configuration of trlX, a configuration of accelerate, or a sweep file of trlX (Ray Tune).
        processes: How many processes trlX ran with; None: unknown. Sizes of a run that trlX counts on each of them are
            then multiplied, as they count all processes here.

    Raises:
        ConfigError: If it is none of these, or `processes` is given for a file that is no configuration of a run.
    """
    values = _read(file)
    if "method" in values:
        return _run(values, processes)
    if processes is not None:
        raise ConfigError(f"--num-processes ({processes}) is for the configuration of a run, unlike {file}.")
    if "tune_config" in values:
        made, notes = sweep_of(values)
        return as_yaml(made), [*notes, "run it with: trlx-like sweep FILE --config CONFIG"]
    if "distributed_type" in values:
        return _accelerate(values)
    raise ConfigError(
        f"{file}: this is no configuration of trlX (method, train, ...), of accelerate (distributed_type) or of a "
        "sweep (tune_config)."
    )


def _read(file: str | Path) -> dict[str, Any]:
    """Read values as trlX's reader (YAML 1.1) takes them, but text such as "1e-5" as the number that it is."""
    values = YamlSource(file).values
    older = yaml.safe_load(Path(file).read_text(encoding="utf-8"))

    def merged(new: Any, old: Any) -> Any:
        if isinstance(new, dict) and isinstance(old, dict):
            return {key: merged(value, old.get(key, value)) for key, value in new.items()}
        return old if isinstance(old, bool) else new

    found: dict[str, Any] = merged(values, older)
    return found


# A run.

_ADDED: dict[tuple[str, str], tuple[Any, str]] = {
    ("train", "tracker"): ("wandb", "trlX's default"),
    ("train", "project_name"): ("trlx", "trlX's default"),
    ("train", "max_grad_norm"): (None, "trlX clips no gradients"),
}
"""Options that a file of trlX leaves to a default which is another one here."""

_WHY = {
    ("method", "name"): "the name here",
    ("train", "trainer"): "the name here",
    ("method", "scale_reward"): "the value that switches it off",
    ("method", "cliprange_reward"): "the value that switches it off",
}


_PER_PROCESS = (("train", "batch_size"), ("method", "num_rollouts"))
"""Options that count the samples of all processes here, and in trlX those of each."""


def _meanings(values: Mapping[str, Any], processes: int | None) -> Iterator[str]:
    """Yield a line for each option that keeps its name and value and means something else."""
    train, method = values.get("train", {}), values.get("method", {})
    for section, key in _PER_PROCESS if processes is None else ():
        if key in values.get(section, {}):
            yield (
                f"{section}.{key} ({shown(values[section][key])}) counts all processes together, and in trlX each: "
                "--num-processes N multiplies it for the same run"
            )
    if train.get("minibatch_size") not in (None, train.get("batch_size")):
        times = -(-train["batch_size"] // (processes or 1) // train["minibatch_size"])
        yield f"train.minibatch_size no longer changes the gradient, which trlX made {times} times as large by it"
    if method.get("target") is not None:
        yield "method.target: the KL weight adapts once a round, and in trlX in each pass over it"
    if "steps_for_target_q_sync" in method:
        yield "method.steps_for_target_q_sync counts optimizer steps; trlX looks at it only at the end of an epoch"
    if "ppo_epochs" in method:
        yield "the KL reference is the policy's own start; in trlX another network for num_layers_unfrozen -1 and 0"


def _run(values: dict[str, Any], processes: int | None = None) -> Migration:
    """Translate a configuration of a run."""
    notes: list[str] = []
    for section, key in _PER_PROCESS:
        own = values.get(section, {}).get(key)
        if processes is not None and isinstance(own, int):
            values[section][key] = own * processes
            notes.append(
                f"changed {section}.{key}: {own} -> {own * processes} (trlX: on each of {processes} processes)"
            )
    for (section, key), (value, why) in _ADDED.items():
        part = values.setdefault(section, {})
        if key not in part:
            part[key] = value
            notes.append(f"added {section}.{key}: {shown(value)} ({why})")
    notes += _dropped(values.get("train", {}))
    config, lost = _valid(values)
    if config is None:
        return as_yaml(values), notes + lost
    made = config.recorded()
    written = {
        section: {key: made[section][key] for key in part} if isinstance(part, dict) else made[section]
        for section, part in values.items()
    }
    written["train"]["trainer"] = TRAINERS.canonical(config.train.trainer)
    written["method"]["name"] = type(config.method).__name__
    for section, part in written.items():
        for key, value in part.items() if isinstance(part, dict) else ():
            if value != (before := plain(values[section][key])):
                why = _WHY.get((section, key), "the same value")
                notes.append(f"changed {section}.{key}: {shown(before)} -> {shown(value)} ({why})")
    return as_yaml(written), notes + lost + [f"other meaning: {line}" for line in _meanings(written, processes)]


def _dropped(train: dict[str, Any]) -> Iterator[str]:
    """Take out options of the section `train` that cannot be carried, and yield a line for each."""
    if train.get("resume_from_checkpoint"):
        yield (
            f"dropped train.resume_from_checkpoint: {train['resume_from_checkpoint']} (a run of trlX cannot be "
            "continued; migrate its folder and name it as model.model_path)"
        )
        train["resume_from_checkpoint"] = None
    if train.get("trainer_kwargs"):
        yield f"dropped train.trainer_kwargs: {shown(train['trainer_kwargs'])} (keywords of trlX's trainer)"
        train["trainer_kwargs"] = {}


def _valid(values: dict[str, Any]) -> tuple[TRLConfig | None, list[str]]:
    """Make the configuration without the keys that it does not have; None if other problems are left."""
    lost: list[str] = []
    while True:
        try:
            return TRLConfig.from_dict(values), lost
        except InvalidConfig as error:
            unknown = [problem for problem in error.problems if isinstance(problem, UnknownKey)]
            for problem in unknown:
                section, key = problem.path[:2]
                why = re.sub(r" \w+Config has .*", "", problem.sentence)  # all keys of the section are no help here
                lost.append(f"dropped {problem.key}: {shown(values[section].pop(key))} ({why})")
            if not unknown:
                return None, lost + [f"to do: {problem}" for problem in error.problems]


# A configuration of accelerate.

_SHARDS = {
    **dict.fromkeys(("FULL_SHARD", "1"), {"kind": "fsdp", "shard": "full"}),
    **dict.fromkeys(("SHARD_GRAD_OP", "2"), {"kind": "fsdp", "shard": "gradients"}),
    **dict.fromkeys(("NO_SHARD", "3"), {"kind": "ddp"}),
    **dict.fromkeys(("HYBRID_SHARD", "4"), {"kind": "fsdp", "shard": "hybrid"}),
}
_STAGES: dict[int, dict[str, str]] = {
    0: {"kind": "ddp"},
    1: {"kind": "deepspeed", "shard": "optimizer"},
    2: {"kind": "deepspeed", "shard": "gradients"},
    3: {"kind": "deepspeed", "shard": "full"},
}
_LAUNCH = {
    *("compute_environment", "distributed_type", "num_processes", "num_machines", "machine_rank", "main_process_ip"),
    *("main_process_port", "mixed_precision", "use_cpu", "gpu_ids", "fsdp_config", "deepspeed_config", "debug"),
    *("rdzv_backend", "same_network", "main_training_function", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
    *("deepspeed_config_file", "fsdp_version", "enable_cpu_affinity", "commands", "command_file"),
}
"""Keys that are read, or that say nothing about the run."""


def _accelerate(values: dict[str, Any]) -> Migration:
    """Translate a configuration of accelerate to a section `backend`, and to a command."""
    backend: dict[str, Any] = {}
    notes: list[str] = []
    kind = str(values["distributed_type"]).upper()
    train: dict[str, Any] = {}
    if kind == "FSDP":
        backend |= _from_fsdp(values.get("fsdp_config") or {})
    elif kind == "DEEPSPEED":
        backend |= _from_deepspeed(values.get("deepspeed_config") or {}, train, notes)
    elif kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        notes.append(f"dropped distributed_type: {kind} (there is ddp, fsdp and deepspeed)")
    precision = str(values.get("mixed_precision", "no")).lower()
    if precision in ("fp16", "bf16"):
        backend["mixed_precision"] = precision
    elif precision not in ("no", "false", "none"):  # YAML 1.1 reads a bare no as false
        notes.append(f"dropped mixed_precision: {precision} (there is fp16 and bf16)")
    if values.get("use_cpu"):
        backend["device"] = "cpu"
    for key, value in values.items():
        if key not in _LAUNCH and value not in (None, False, {}, "NO", "no"):
            notes.append(f"dropped {key}: {shown(value)} (nothing here follows it)")
    if (processes := int(values.get("num_processes") or 1)) > 1:
        notes.append(f"to count batches as trlX does: trlx-like migrate RUN.yml --num-processes {processes}")
    notes.append(f"run it with: {_command(values)}")
    parts = {"backend": backend, "train": train}
    return as_yaml({name: part for name, part in parts.items() if part}), notes


def _from_fsdp(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the section `backend` that stand for an `fsdp_config`."""
    strategy = str(given.get("fsdp_sharding_strategy", given.get("fsdp_reshard_after_forward", "FULL_SHARD"))).upper()
    strategy = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(strategy, strategy)
    backend: dict[str, Any] = {**_SHARDS.get(strategy.replace("_ZERO2", ""), _SHARDS["FULL_SHARD"])}
    if given.get("fsdp_offload_params") and backend["kind"] == "fsdp":
        backend["offload"] = "all"
    if given.get("fsdp_activation_checkpointing"):
        backend["gradient_checkpointing"] = True
    return backend


def _from_deepspeed(given: Mapping[str, Any], train: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the options of the section `backend` that stand for a `deepspeed_config`."""
    if given.get("deepspeed_config_file"):
        notes.append(f"dropped deepspeed_config_file: {given['deepspeed_config_file']} (it is not read)")
    backend: dict[str, Any] = {**_STAGES.get(int(given.get("zero_stage", 2)), _STAGES[3])}
    devices = {name: given.get(f"offload_{name}_device", "none") for name in ("optimizer", "param")}
    if "cpu" in devices.values() and backend["kind"] == "deepspeed":
        backend["offload"] = "all" if devices["param"] == "cpu" else "optimizer"
    notes += [
        f"dropped offload_{name}_device: nvme (there is the CPU's memory)"
        for name in devices
        if devices[name] == "nvme"
    ]
    clipping = given.get("gradient_clipping")
    if clipping not in (None, "auto"):
        train["max_grad_norm"] = float(clipping) or None
    if str(given.get("gradient_accumulation_steps", 1)) not in ("1", "auto"):
        notes.append("dropped gradient_accumulation_steps (train.minibatch_size says what goes through at once)")
    return backend


def _command(values: Mapping[str, Any]) -> str:
    """Return the command that starts as many processes."""
    processes, machines = int(values.get("num_processes") or 1), int(values.get("num_machines") or 1)
    gpus = str(values.get("gpu_ids", "all"))
    chosen = "" if gpus in ("all", "None") else f"CUDA_VISIBLE_DEVICES={gpus} "
    if machines == 1:
        return f"{chosen}trlx-like train FILE --num-processes {processes}"
    words = {"--nodes": machines, "--gpus": max(processes // machines, 1), "--node": values.get("machine_rank", 0)}
    words |= {"--address": values.get("main_process_ip"), "--port": values.get("main_process_port")}
    given = " ".join(f"{name} {value}" for name, value in words.items() if value is not None)
    return f"{chosen}trlx-like launch FILE {given}"


# A sweep.

_SEARCHES = {None: "random", "random": "random", "bayesopt": "tpe", "bohb": "tpe"}


def sweep_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Translate the values of a sweep file of trlX (Ray Tune) to those of a sweep file of this package.

    Args:
        values: The values, with `tune_config` and an entry for each option.

    Returns:
        The new values, and a line for each thing that was lost or changed.

    Raises:
        ConfigError: An entry is none of Ray's.
    """
    tune = values["tune_config"] or {}
    notes: list[str] = []
    options = {key: _space(key, space, notes) for key, space in values.items() if key != "tune_config"}
    grids = [key for key in options if str(values[key]["strategy"]) in ("grid", "grid_search")]
    all_lists = bool(grids) and len(grids) == len(options)
    search = "grid" if all_lists else _SEARCHES.get(tune.get("search_alg"), "random")
    made: dict[str, Any] = {"metric": tune.get("metric", "reward/mean"), "mode": tune.get("mode", "max")}
    made |= {"search": search, "trials": int(tune.get("num_samples", 1)), "options": options}
    if tune.get("max_concurrent_trials"):
        made["parallel"] = tune["max_concurrent_trials"]
    if all_lists:
        notes += [f"changed num_samples: {made.pop('trials')} -> 1 (each point once; give seeds to repeat it)"]
    elif grids:
        notes.append(f"changed {', '.join(grids)}: grid -> choice (search draws all options)")
    if tune.get("search_alg") not in _SEARCHES:
        notes.append(f"changed tune_config.search_alg: {tune['search_alg']} -> random (there is random, tpe and grid)")
    if tune.get("scheduler") not in (None, "fifo"):
        notes.append(f"dropped tune_config.scheduler: {tune['scheduler']} (add halving: {{first: STEP, factor: 3}})")
    known = {"search_alg", "scheduler", "mode", "metric", "num_samples", "max_concurrent_trials"}
    notes += [
        f"dropped tune_config.{key}: {shown(tune[key])} (nothing here follows it)" for key in sorted({*tune} - known)
    ]
    return made, notes


def _space(key: str, space: Any, notes: list[str]) -> Any:
    """Translate a strategy of Ray Tune with its values to a list or a range."""
    if not (isinstance(space, dict) and isinstance(space.get("values"), list) and "strategy" in space):
        raise ConfigError(f"{key}: a sweep needs strategy and values, got {shown(space)}.")
    strategy, values = str(space["strategy"]), space["values"]
    if strategy in ("choice", "grid", "grid_search"):
        return values
    kind = strategy.removeprefix("q")
    if kind not in ("uniform", "loguniform", "randn", "randint", "lograndint"):
        raise ConfigError(f"{key}: strategy {strategy!r} is none of Ray's; use uniform, choice, grid and others of it.")
    low, high = values[:2] if len(values) > 1 else (0.0, 1.0)
    if kind == "randn":
        low, high = low - 2 * high, low + 2 * high
        notes.append(f"changed {key}: {strategy} -> uniform within two deviations, {low} to {high}")
    elif kind == strategy and kind.endswith("randint"):
        high -= 1  # Ray leaves the upper end out
    number = int if kind.endswith("randint") else float
    made = {"low": number(low), "high": number(high)}
    if kind.startswith("log"):
        made["log"] = True
        if kind != strategy:
            notes.append(f"dropped the step {values[-1]} of {key} (a logarithm has none)")
    elif kind != strategy:
        made["step"] = number(values[-1])
    return made
