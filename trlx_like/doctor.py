"""The report of `trlx-like doctor`: versions, devices, threads, missing packages and the extras that install them.

The required packages are read from the installed package's own metadata, so that there is no second list to maintain.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import trlx_like

PACKAGE = "trlx-like"
# Extras without a feature of their own: the sum of the others, and two for working on this library.
NOT_OPTIONAL = {"all", "dev", "docs"}


def report() -> str:
    """Return the report, one fact per line. It never raises: it is meant for machines with something broken."""
    return "\n".join([*_machine(), *_packages(), *_devices(), *_kernels(), *_place()])


def _machine() -> Iterator[str]:
    yield f"trlx_like      {trlx_like.__version__}"
    yield f"Python         {platform.python_version()} ({sys.executable})"
    yield f"System         {platform.platform()}"


def _packages() -> Iterator[str]:
    """Yield the required packages with their versions, then the optional ones by extra."""
    try:
        requirements = [Requirement(text) for text in metadata.requires(PACKAGE) or []]
        extras = metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        yield "Packages       unknown: trlx_like runs without being installed (pip install -e .)"
        return
    yield from ("", "Required packages")
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield f"  {requirement.name:<20} {_state(requirement)}"
    yield from ("", "Optional packages")
    for extra in extras:
        for requirement in requirements if extra not in NOT_OPTIONAL else []:
            if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
                yield f"  {requirement.name:<20} {_state(requirement, extra)}"


def _state(requirement: Requirement, extra: str = "") -> str:
    """Return the version of a package if it fits, otherwise how to install it."""
    install = (
        f'pip install "{PACKAGE}[{extra}]"' if extra else f'pip install "{requirement.name}{requirement.specifier}"'
    )
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"missing: {install}"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version}, which is not {requirement.specifier}: {install}"
    return version


def _devices() -> Iterator[str]:
    yield ""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that it links to is missing
        yield f"Devices        unknown: torch cannot be imported ({error})"
        return
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    gpus = [f"cuda:{number} {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for number, gpu in enumerate(found)]
    if torch.backends.mps.is_available():
        gpus.append("Apple GPU (mps)")
    yield f"Devices        {'; '.join(gpus) or 'CPU only'}"
    threads = os.environ.get("OMP_NUM_THREADS")
    yield (
        f"Threads        {torch.get_num_threads()} for torch, {os.cpu_count()} cores"
        + (f", OMP_NUM_THREADS={threads}" if threads else "")
        + "; backend.num_threads sets them"
    )


def _kernels() -> Iterator[str]:
    """Yield what computes steps of decoding and matrix products here."""
    try:
        import torch

        from trlx_like.models.faster import choice
        from trlx_like.samplers.recorded import TRACER
    except Exception as error:  # of whatever package is broken
        yield f"Decoding       unknown: {error}"
        return
    if torch.cuda.is_available():
        yield "Decoding       each step by the modules; with method.gen_kwargs.cache_implementation: static by CUDA"
        yield "               graphs, for models that transformers compiles (faster, but half a minute to compile)"
    elif TRACER:
        yield "Decoding       on CPUs: steps are recorded and replayed"
    else:
        yield "Decoding       on CPUs: each step by the modules (no tracer: PYTORCH_JIT=0, or Python 3.14 or later)"
    yield f"Products       float32 on CPUs: {choice().words}"


def _place() -> Iterator[str]:
    try:
        with tempfile.TemporaryFile(dir="."):
            yield f"This folder    {Path.cwd()} (can be written to)"
    except OSError as error:
        yield f"This folder    {Path.cwd()} cannot be written to: {error.strerror}. Set train.checkpoint_dir elsewhere."
