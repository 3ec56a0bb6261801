"""The file of a sweep: typed and closed, as a configuration is. A sweep file of trlX (Ray Tune) is read as well."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trlx_like import api
from trlx_like.compat.migrate import sweep_of
from trlx_like.config import InvalidConfig, Problem, Section
from trlx_like.config.problems import shown
from trlx_like.config.yaml_source import YamlSource
from trlx_like.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]


class Range(Section):
    """Numbers from `low` to `high`, both included; whole numbers if both are."""

    low: int | float
    high: int | float
    log: bool = False
    """Draw the logarithm evenly."""
    step: int | float | None = None
    """Draw only `low` plus multiples of this."""

    @property
    def whole(self) -> bool:
        """Whether the numbers are whole."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def conflicts(self) -> Iterator[Problem]:
        if self.low >= self.high:
            yield Problem(("low",), f"({self.low}) must be below high ({self.high}).")
        if self.log and self.low <= 0:
            yield Problem(("low",), f"({self.low}) must be above 0 with log.")
        if self.step is not None and (self.log or self.step <= 0 or (self.whole and not isinstance(self.step, int))):
            yield Problem(("step",), f"({self.step}) must be above 0, whole between whole numbers, and without log.")


class Halving(Section):
    """Successive halving: at each rung, runs go on that are among the best of those that have reached it."""

    section: ClassVar[str] = "halving"
    first: Positive
    """The training step of the first rung."""
    factor: Annotated[int, Field(ge=2)] = 3
    """One run of so many goes on; the next rung is at so many times the steps."""


class SweepConfig(Section):
    """The file of a sweep."""

    options: dict[str, Any]
    """What to search over: for each dotted option a list of values, or a mapping with low, high, log and step."""
    config: str | None = None
    """The YAML file of the runs, from the current folder."""
    metric: str = "reward/mean"
    """The metric whose last value in metrics.jsonl is a run's score. A trial's score is the median over seeds."""
    mode: Literal["max", "min"] = "max"
    """Whether a high or a low score is good."""
    search: Literal["tpe", "random", "grid"] = "tpe"
    """How points are chosen: by Optuna's TPE, at random, or every combination of the lists."""
    trials: Positive = 20
    """Number of points, unless `search` is grid."""
    seeds: Annotated[list[int], Field(min_length=1)] | None = None
    """Each point is trained with each of these values of train.seed; null: with that of the configuration."""
    seed: int = 0
    """The seed of the search itself."""
    halving: dict[str, Any] | None = None
    """Successive halving with `first` and `factor`, judged by the first seed's evaluations; null: none."""
    parallel: Positive = 1
    """Number of runs at a time."""
    devices: Annotated[list[int], Field(min_length=1)] | None = None
    """GPUs to share: each run sees one of them. null: each run sees all."""
    folder: str | None = None
    """The folder of the sweep; null: sweeps/ and the name of this file."""

    @property
    def spaces(self) -> dict[str, Range | list[Any]]:
        """Return the values of each option."""
        return {name: value if isinstance(value, list) else Range(**value) for name, value in self.options.items()}

    @property
    def rungs(self) -> Halving | None:
        """Return the rungs of successive halving, if there are any."""
        return None if self.halving is None else Halving.from_dict(self.halving)

    def conflicts(self) -> Iterator[Problem]:
        if not self.options:
            yield Problem(("options",), "must name at least one option.")
        for name, value in self.options.items():
            path = ("options", name)
            if name in ("train.seed", "train.checkpoint_dir"):
                yield Problem(path, "belongs to the sweep; use seeds." if "seed" in name else "belongs to the sweep.")
            elif isinstance(value, Mapping):
                yield from _inner(Range, value, path)
                if self.search == "grid":
                    yield Problem(path, "must be a list of values for the search grid.")
            elif not isinstance(value, list) or not value:
                yield Problem(path, f"must be a list of values or a mapping with low and high, got {shown(value)}.")
        if self.halving is not None:
            yield from _inner(Halving, self.halving, ())
        if self.seeds is not None and len(set(self.seeds)) < len(self.seeds):
            yield Problem(("seeds",), f"{shown(self.seeds)} names a seed twice.")


def _inner(kind: type[Section], values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Problem]:
    try:
        kind.from_dict(values)
    except InvalidConfig as error:
        for problem in error.problems:
            yield type(problem)((*path, *problem.path), problem.sentence)


def read_sweep(file: Path, config: Path | None = None) -> tuple[SweepConfig, list[str]]:
    """Read the file of a sweep, of this package or of trlX.

    Args:
        file: The file.
        config: The YAML file of the runs in place of the one that the file names.

    Returns:
        The sweep, and a line for each thing of a file of trlX that means something else here.

    Raises:
        ConfigError: The file has mistakes, one line for each.
    """
    source = YamlSource(file)
    values, notes = source.values, list[str]()
    if "tune_config" in values:
        values, notes = sweep_of(values)
    try:
        spec = SweepConfig.from_dict({**values, **({"config": str(config)} if config else {})})
    except InvalidConfig as error:
        raise ConfigError(source.located([*source.problems, *error.problems])) from None
    if source.problems:
        raise ConfigError(source.located(source.problems))
    if spec.config is None:
        raise ConfigError(f"{file}: config: missing. It must be the YAML file of the runs; or give it by --config.")
    if spec.folder is None:
        spec.folder = str(Path("sweeps") / file.stem)
    return spec, notes


def setting(name: str, value: Any) -> str:
    """Write a value of an option as `--set` takes it."""
    return f"{name}={json.dumps(value)}"


def check_points(file: Path, spec: SweepConfig, overrides: Sequence[str], plugins: Sequence[str]) -> dict[str, Any]:
    """Read the configuration of the runs with each value of a list and both ends of a range, one option at a time.

    Args:
        file: The file of the sweep, which errors name with the line of the option.
        spec: What `read_sweep` made of it.
        overrides: Options of the command line for all runs, as "key=value".
        plugins: Plugins of the command line.

    Returns:
        The configuration without the options of the sweep, as plain values without secrets.

    Raises:
        ConfigError: An option does not exist or may not have a value.
    """
    assert spec.config is not None
    values = api.read_config(spec.config, plugins=plugins, overrides=overrides).recorded()
    source, problems = YamlSource(file), list[Problem]()
    for name, space in spec.spaces.items():
        path = ("options", name) if "options" in source.values else (name,)  # the second in a file of trlX
        for value in space if isinstance(space, list) else (space.low, space.high):
            try:
                api.check(api.read_config(spec.config, plugins=plugins, overrides=[*overrides, setting(name, value)]))
            except ConfigError as error:
                why = str(error).replace(f"--set: {name}: ", "").replace("--set: ", "")
                problems.append(Problem(path, f"({shown(value)}) {why}"))
                break
    if problems:
        raise ConfigError(source.located(problems))
    return values
