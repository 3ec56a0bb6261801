"""The commands for several machines: the file for SLURM, the place of a machine in a job, and refusals."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.cli_support import ppo_file, said
from trlx_like.distributed.launcher import Node, free_port, slurm_node


def on_path(folder: Path, **programs: str) -> dict[str, str]:
    """The environment of a job, in which programs of these names come first."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name.replace("_", "-")).write_text(text)
        (folder / "bin" / name.replace("_", "-")).chmod(0o755)
    paths = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    return {**os.environ, **paths, "SLURM_JOB_ID": str(free_port() - 10_000), "OMP_NUM_THREADS": "1"}


def job(folder: Path, file: Path, *options: str) -> list[str]:
    (folder / "job.sh").write_text(said(0, "slurm", file, "--nodes", 2, "--gpus", 1, *options))
    return ["bash", str(folder / "job.sh")]


@pytest.mark.parametrize(("code", "queued"), [(0, False), (2, False), (138, True)])
def test_a_job_that_was_stopped_before_its_limit_is_queued_again(here: Path, code: int, queued: bool) -> None:
    environment = on_path(
        here, srun=f'#!/bin/bash\necho "$@"\nexit {code}\n', scontrol='#!/bin/bash\necho "$@" > requeued\n'
    )
    file = ppo_file(here)
    command = job(here, file, "--partition", "p", "--time", "1:00:00", "--set", "train.project_name=a b")
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == code
    assert found.stdout.strip() == (
        f"trlx-like launch --set train.project_name=a b --nodes 2 --gpus 1 --resume -- {file}"
    )
    assert (here / "requeued").exists() == queued
    if queued:
        assert (here / "requeued").read_text().strip() == f"requeue {environment['SLURM_JOB_ID']}"
    asked = [line.removeprefix("#SBATCH ") for line in (here / "job.sh").read_text().splitlines() if "#SBATCH" in line]
    assert {"--nodes=2", "--gpus-per-node=1", "--partition=p", "--time=1:00:00", "--signal=USR1@90"} < set(asked)


def test_paths_and_values_with_characters_of_a_shell(here: Path) -> None:
    file = ppo_file(here).rename("it's $(touch ran) #1.yml")
    name = "train.project_name='a $HOME `touch ran` \\n\n#SBATCH --nodes=9 ;'"
    command = job(here, file, "--set", name)
    assert subprocess.run(["bash", "-n", command[1]]).returncode == 0
    environment = on_path(here, srun="#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    words = subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split("\0")
    assert words[2:4] == ["--set", name] and words[-2] == str(file) and not (here / "ran").exists()
    assert "#SBATCH --job-name=it_s_touch_ran_1\n" in (here / "job.sh").read_text()


@pytest.mark.parametrize("option", ["--partition", "--time"])
@pytest.mark.parametrize("value", ["a b", "", "a\n#SBATCH --nodes=9", "a#", "$USER", "a;b"])
def test_a_value_that_sbatch_would_read_differently(here: Path, option: str, value: str) -> None:
    sentence = f"{option} ({value!r}) must be letters, digits and any of %+,-./:=@_ alone."
    assert said(2, "slurm", ppo_file(here), option, value).strip() == sentence


@pytest.mark.parametrize(
    ("machines", "first"), [("node7", "node7"), ("a1,b2", "a1"), ("gpu-[01-04,07]", "gpu-01"), ("n[3,5],m1", "n3")]
)
def test_the_place_of_a_machine_in_a_job(machines: str, first: str) -> None:
    given = {"SLURM_NODEID": "2", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": machines, "SLURM_JOB_ID": "1020007"}
    assert slurm_node(given) == Node(2, 4, first, 10_007)
    assert slurm_node({}) == Node()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--nodes", 2], "--nodes needs --node, --address and --port outside of a SLURM job."),
        (["--nodes", 2, "--node", 2, "--port", 1], "--node (2) must be below --nodes (2)."),
        (["--gpus", "many"], "--gpus (many) must be a number of at least 1, or auto."),
    ],
)
def test_a_launch_without_what_it_needs(here: Path, options: list[object], sentence: str) -> None:
    assert said(2, "launch", ppo_file(here), *options).strip() == sentence
