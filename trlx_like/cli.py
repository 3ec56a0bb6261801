"""The command `trlx-like`.

Exit codes: 0 success; 1 an error in this library (a traceback), a run that diverged, a process that died or hung, or an
estimate that does not fit; 2 an error that the user can correct (one sentence); 3 a run that stopped itself because its
sampler and its learner disagree; 4 `audit`, `ledger` or `reproduce` found something; 129, 130, 138 and 143 interrupted
by SIGHUP, Ctrl-C, SIGUSR1 and SIGTERM. Modules that need torch are imported inside the commands, so that help and
errors in a YAML file appear at once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated

import typer

import trlx_like
from trlx_like import api, cluster, records
from trlx_like.cluster import ConfigFile, Overrides, Plugins, Restarts, Resume, count_of, start
from trlx_like.command_group import Commands
from trlx_like.compat.command import migrate
from trlx_like.config import TRAINERS, TRLConfig
from trlx_like.config.commented import commented, read_only
from trlx_like.config.schema import configuration_schema
from trlx_like.continuation.commands import chat, generate
from trlx_like.errors import ConfigError
from trlx_like.new_trainer import new_trainer
from trlx_like.presets import PRESETS
from trlx_like.registry import load_plugin
from trlx_like.sharing import commands as sharing
from trlx_like.sweep.command import sweep

PROGRAM = "trlx-like"

REGISTRIES = {
    "trainers": ("train.trainer", "trlx_like.config:TRAINERS"),
    "methods": ("method.name", "trlx_like.config:METHODS"),
    "optimizers": ("optimizer.name", "trlx_like.optim:OPTIMIZERS"),
    "schedulers": ("scheduler.name", "trlx_like.optim:SCHEDULERS"),
    "pipelines": ("train.pipeline", "trlx_like.pipelines.prompts:DATAPIPELINES"),
    "engines": ("sampler.engine", "trlx_like.samplers.engines:ENGINES"),
    "backends": ("backend.kind", "trlx_like.distributed:BACKENDS"),
    "trackers": ("train.tracker", "trlx_like.tracking:TRACKERS"),
    "judges": ("", "trlx_like.rewards.judges:JUDGES"),
}
"""By the kinds of names: the option that is one of them, if it can be nothing else, and the registry."""
KINDS = [*REGISTRIES, "presets"]


app = typer.Typer(
    cls=Commands,
    help="Tune language and diffusion models by reinforcement learning and preference learning.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line and exit with its exit code."""
    # Files that a YAML names may import their neighbours, as they may under `python -m trlx_like`.
    if str(Path.cwd()) not in sys.path and "--no-plugins" not in sys.argv:
        sys.path.insert(0, str(Path.cwd()))
    app(prog_name=PROGRAM)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {trlx_like.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error, too.")] = False,
) -> None:
    """Options of every command."""


@app.command()
def train(
    ctx: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    plugins: Plugins = None,
    processes: Annotated[
        str, typer.Option("--num-processes", metavar="N|auto", help="Number of processes; auto: one per GPU.")
    ] = "1",
    resume: Resume = False,
    restarts: Restarts = 0,
    force: Annotated[
        bool,
        typer.Option("--force", help="Resume even if options or data have changed that a resume refuses to change."),
    ] = False,
) -> None:
    """Train a model with the configuration in a YAML file."""
    changes = [
        *(overrides or []),
        *["train.resume_from_checkpoint=auto"] * resume,
        *["train.force_resume=true"] * force,
    ]
    read = api.read_config(config, plugins=plugins or (), overrides=changes)
    api.check_folder(read)
    number = count_of("--num-processes", processes)
    if (number == 1 and not restarts) or "RANK" in os.environ:  # one of several, that torchrun or accelerate started
        api.make_trainer(read).learn()
        return
    start(ctx, config, changes, plugins or [], number, restarts)


@app.command()
def check(
    config: ConfigFile,
    overrides: Overrides = None,
    plugins: Plugins = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Load everything, make one round and one step elsewhere, and measure them.")
    ] = False,
) -> None:
    """Check a YAML file and the data, functions and models in it.

    Reads the data, encodes its first row, imports the functions and reads the headers of the model's files. Of the
    functions only formatting_func is called, for that row; no weights are read and no network is used. With --deep it
    does all of that: it makes the first round and the first step of the run in a temporary folder, and prints a plan of
    the run. The run folder is not touched.
    """
    from trlx_like.check import check_run

    read = api.read_config(config, plugins=plugins or (), overrides=overrides or ())
    data = check_run(read)
    typer.echo(
        f"OK: {TRAINERS.canonical(read.train.trainer)} on {read.model.model_path}, at most {read.train.total_steps} "
        f"steps of {read.train.batch_size} samples, into {read.train.checkpoint_dir}. "
        f"{'; '.join(data) or 'All data comes from Python'}."
    )
    needs = getattr(TRAINERS.get(read.train.trainer), "needs", ())
    missing = [name for name in needs if all(getattr(read.data, one, None) is None for one in name.split(" or "))]
    if missing:
        typer.echo(f"It trains from Python only: train() has to be given {' and '.join(missing)}.")
    elif deep:
        from trlx_like.deep_check import deep_check

        typer.echo("\n".join(deep_check(read)))


@app.command()
def test_reward(
    config: ConfigFile,
    overrides: Overrides = None,
    plugins: Plugins = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 4,
    outputs: Annotated[int, typer.Option(min=2, help="Number of outputs for each prompt.")] = 4,
) -> None:
    """Test the reward function of a YAML file.

    Calls it on outputs of the start model, twice, in another order and one by one, and on empty, cut, repeated, long,
    foreign and meaningless text. Prints the problems that were found, with samples; exits with 1 if there are any.
    """
    from trlx_like.reward_check import reward_check

    read = api.read_config(config, plugins=plugins or (), overrides=overrides or ())
    lines = reward_check(read, prompts, outputs)
    typer.echo("\n".join(lines))
    if any(line.startswith("PROBLEM") for line in lines):
        raise typer.Exit(1)


@app.command("list")
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar=f"[{'|'.join(KINDS)}]", help="One kind of name; all if left out.", autocompletion=lambda: KINDS
        ),
    ] = None,
    plugins: Plugins = None,
) -> None:
    """List the names that a YAML file can use."""
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"{PROGRAM} list ({kind!r}) must be one of {', '.join(KINDS)}.")
    for plugin in plugins or []:
        load_plugin(plugin)
    for wanted in [kind] if kind else KINDS:
        names = sorted(PRESETS) if wanted == "presets" else resolve_name(REGISTRIES[wanted][1]).names()
        typer.echo("\n".join(names) if kind else f"{wanted}: {', '.join(names)}")


@app.command()
def show_config(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help=f"A preset ({', '.join(PRESETS)}) or a YAML file.",
            autocompletion=lambda: list(PRESETS),
        ),
    ],
    overrides: Overrides = None,
    plugins: Plugins = None,
    no_plugins: Annotated[
        bool, typer.Option("--no-plugins", help="Read the file only: import and run nothing that it names.")
    ] = False,
) -> None:
    """Print a preset or a YAML file with all its options.

    Prints YAML with the value and the meaning of every option.
    """
    if no_plugins and plugins:
        raise ConfigError("--no-plugins and --plugin exclude each other.")
    for plugin in plugins or []:
        load_plugin(plugin)
    if name not in PRESETS and not Path(name).exists():
        raise ConfigError(f"{name}: there is no such preset ({', '.join(PRESETS)}) and no such file.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.yml" if name in PRESETS else Path(name)
        if name in PRESETS:
            PRESETS[name]().dump_yaml(file)
        typer.echo(
            read_only(file, overrides or ()) if no_plugins else commented(TRLConfig.load_yaml(file, overrides or ()))
        )


@app.command()
def schema() -> None:
    """Print a JSON Schema of the YAML files, for editors.

    Editors then complete and check such files. Name the schema in the first line of a file: # yaml-language-server:
    $schema=trlx_like.schema.json
    """
    made = configuration_schema({option: resolve_name(place) for option, place in REGISTRIES.values() if option})
    typer.echo(json.dumps(made, indent=1, ensure_ascii=False))


@app.command()
def doctor() -> None:
    """Print versions, devices and missing packages.

    Prints for each missing package how to install it.
    """
    from trlx_like.doctor import report

    typer.echo(report())


@app.command("reproduce")
def reproduce_(
    run: records.RunArgument,
    step: Annotated[int | None, typer.Option(help="Step to run to; by default the last one.")] = None,
) -> None:
    """Repeat a run from its folder, and compare the results.

    Metrics and checkpoints are compared bit by bit. Exits with 0 if they are equal. Otherwise prints the first
    difference, and exits with 4.
    """
    from trlx_like.reproduce import reproduce

    sentence, equal = reproduce(run, step)
    typer.echo(sentence)
    raise typer.Exit(0 if equal else records.FINDINGS)


for command in (
    *(sweep, cluster.launch, cluster.slurm, cluster.estimate),
    *(records.report, records.compare, records.audit, records.ledger, migrate),
    *(generate, chat, sharing.export, sharing.push, new_trainer),
):
    app.command()(command)
