"""The commands for runs on several GPUs and machines: `launch`, `slurm` and `estimate`."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trlx_like import api
from trlx_like.errors import ConfigError
from trlx_like.rendering import rendered

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file with the configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override an option of the file, such as train.seed=1. Repeatable."
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="PLUGIN", help="Load a module, a .py file or an entry point first. Repeatable."),
]


Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint, if there is one.")]
Restarts = Annotated[
    int, typer.Option("--max-restarts", min=0, help="Number of times to resume after a process died or failed.")
]
Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, help="Number of machines; by default that of SLURM, or 1.")
]
Gpus = Annotated[
    str | None,
    typer.Option("--gpus", metavar="N|auto", help="Processes on each machine; by default SLURM's GPUs, or auto."),
]


def count_of(option: str, value: str) -> int:
    """Read a number of processes; "auto" is the number of GPUs of this machine, at least 1."""
    if value == "auto":
        import torch

        return max(1, torch.cuda.device_count())
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{option} ({value}) must be a number of at least 1, or auto.")
    return int(value)


def directive(option: str, value: str | None) -> str | None:
    """Return the value of a line that begins with #SBATCH, which ends at a blank and has no quotes of a shell."""
    if value is None or shlex.quote(value) == value:
        return value
    raise ConfigError(f"{option} ({value!r}) must be letters, digits and any of %+,-./:=@_ alone.")


def words_of(overrides: Sequence[str] | None, plugins: Sequence[str] | None) -> list[str]:
    """Return the words of a command that stand for overrides and plugins."""
    given = {"--set": overrides, "--plugin": plugins}
    return [word for name, values in given.items() for value in values or () for word in (name, value)]


def start(
    ctx: typer.Context,
    config: Path,
    changes: Sequence[str],
    plugins: Sequence[str],
    processes: int,
    restarts: int,
    node: Any = None,
) -> None:
    """Start the processes of a run on this machine, and exit with the exit code of the run.

    Args:
        ctx: The context of the command.
        config: The YAML file.
        changes: Its overrides, as "key=value".
        plugins: Plugins to load first.
        processes: Number of processes.
        restarts: As in `distributed.launch`.
        node: As in `distributed.launch`.
    """
    from trlx_like.distributed import launch

    options = words_of(changes, plugins)
    options += ["--traceback"] if ctx.find_root().params["traceback"] else []
    command = ["-m", "trlx_like", "train", *options]
    again = [*command, "--resume", "--", str(config)]
    code = launch([*command, "--", str(config)], processes, restarts, again, node)
    raise typer.Exit(128 - code if code < 0 else code)  # killed by signal n: -n, which a shell gives as 128 + n


def launch(
    ctx: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    plugins: Plugins = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    number: Annotated[int | None, typer.Option("--node", min=0, help="Number of this machine, from 0.")] = None,
    address: Annotated[str | None, typer.Option("--address", help="Name or address of machine 0.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=1, help="A port that is free on machine 0.")] = None,
    resume: Resume = False,
    restarts: Restarts = 0,
) -> None:
    """Train on several machines; run it on each of them.

    In a job step of SLURM (`srun`) the machines, their numbers, the address and the port are known. Elsewhere give
    --nodes, --node, --address and --port.
    """
    from trlx_like.distributed import slurm_node

    changes = [*(overrides or []), *["train.resume_from_checkpoint=auto"] * resume]
    api.check_folder(api.read_config(config, plugins=plugins or (), overrides=changes))
    found = slurm_node(os.environ)
    given: dict[str, Any] = {"count": nodes, "number": number, "address": address, "port": port}
    node = replace(found, **{name: value for name, value in given.items() if value is not None})
    if "SLURM_NODEID" in os.environ and nodes not in (None, found.count):
        raise ConfigError(f"--nodes ({nodes}) must be the number of machines of the SLURM job ({found.count}).")
    if node.count > 1 and node.port is None:
        raise ConfigError("--nodes needs --node, --address and --port outside of a SLURM job.")
    if node.number >= node.count:
        raise ConfigError(f"--node ({node.number}) must be below --nodes ({node.count}).")
    processes = count_of("--gpus", gpus or os.environ.get("SLURM_GPUS_ON_NODE", "auto"))
    start(ctx, config, changes, plugins or [], processes, restarts, node)


def slurm(
    config: ConfigFile,
    overrides: Overrides = None,
    plugins: Plugins = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Number of machines.")] = 1,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs of each machine.")] = 8,
    partition: Annotated[str | None, typer.Option("--partition", help="Partition of the cluster.")] = None,
    time: Annotated[str | None, typer.Option("--time", help="Time limit, such as 12:00:00.")] = None,
    seconds: Annotated[int, typer.Option("--seconds", min=1, help="Seconds before the limit to save and stop.")] = 90,
) -> None:
    """Print a file for `sbatch` of SLURM.

    It trains with the YAML file on several machines. The run is saved before the time limit, queued again, and
    continued. Nothing is submitted.
    """
    api.read_config(config, plugins=plugins or (), overrides=overrides or ())
    sizes = ["--nodes", str(nodes), "--gpus", str(gpus)]
    words = shlex.join([*words_of(overrides, plugins), *sizes, "--resume", "--", str(config)])
    given = {"partition": directive("--partition", partition), "time": directive("--time", time)}
    values = {"name": re.sub(r"[^\w.-]+", "_", config.stem), "nodes": nodes, "gpus": gpus, "seconds": seconds}
    typer.echo(rendered("slurm.sh", words=words, given=given, **values), nl=False)


def estimate(
    config: ConfigFile,
    overrides: Overrides = None,
    plugins: Plugins = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs.")] = 1,
    memory: Annotated[float, typer.Option("--gpu-memory", help="Memory of each GPU in GiB.")] = 80.0,
) -> None:
    """Estimate the memory that a run needs on each GPU.

    Needs neither weights nor data nor a GPU. Prints a table of phases and kinds of memory, and whether it fits. If it
    does not, prints the smallest change that would make it fit, and exits with 1. Reward functions, judges and what
    CUDA itself takes are not counted.
    """
    if not memory > 0:
        raise ConfigError(f"--gpu-memory ({memory:g}) must be more than 0 GiB.")
    read = api.read_config(config, plugins=plugins or (), overrides=overrides or ())
    from trlx_like.estimate import estimate as estimated
    from trlx_like.savings import smallest_change

    found = estimated(read, gpus, memory)
    typer.echo("\n".join(found.lines()))
    if found.copied:
        typer.echo(f"train.async_save copies {found.copied / 2**30:.2f} GiB to the CPU memory of the first process.")
    if found.kept:
        parts = [f"train.keep_trunk takes at most {found.kept / 2**20:,.1f} MiB of CPU memory for each sample"]
        if found.samples:
            parts += [f"{found.samples * found.kept / 2**20:,.1f} MiB for those of a round on each process"]
        typer.echo(f"{', '.join(parts)}.")
    size = f"{found.peak / 2**30:.1f} of {memory:g} GiB"
    if found.fits:
        typer.echo(f"It fits: {size} on each of {gpus} GPUs.")
        return
    change = smallest_change(read, gpus, memory)
    options = " ".join(f"--set {name}={json.dumps(value)}" for name, value in (change or {}).items())
    typer.echo(f"It does not fit: {size}. " + (f"It would with {options}" if change else "No option changes that."))
    raise typer.Exit(1)
