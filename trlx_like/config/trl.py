"""`TRLConfig`: the whole configuration of a run, from YAML or from Python."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from trlx_like.config.auto import is_auto
from trlx_like.config.generation import generation_problems, longest_response
from trlx_like.config.method import MethodConfig, OnlineTextMethodConfig
from trlx_like.config.model import (
    BackendConfig,
    ModelConfig,
    OptimizerConfig,
    SamplerConfig,
    SchedulerConfig,
    TokenizerConfig,
)
from trlx_like.config.problems import InvalidConfig, Problem, UnknownKey, at, listed, shown
from trlx_like.config.registries import METHODS, method_class
from trlx_like.config.resume import Applied
from trlx_like.config.reward import RewardFnConfig
from trlx_like.config.section import Section, copied
from trlx_like.config.train import DataConfig, TrainConfig
from trlx_like.config.yaml_source import YamlSource, as_yaml, plain
from trlx_like.errors import ConfigError, RegistryError
from trlx_like.redact import redacted
from trlx_like.registry import load_plugin, nearest


class TRLConfig(Section):
    """Hold every option of a run. Sections may be given as objects or as mappings."""

    model: ModelConfig
    """The model that is trained."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """The tokenizer of the model."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """The learning-rate schedule."""
    method: MethodConfig
    """The algorithm and its options; `name` chooses it."""
    train: TrainConfig
    """Length, batches, evaluation, checkpoints and logs of the run."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Data and reward functions of a run without a Python script."""
    reward: RewardFnConfig = Field(default_factory=RewardFnConfig)
    """How the reward function is run."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    """The engine that generates text during training."""
    backend: BackendConfig = Field(default_factory=BackendConfig)
    """Number format, device and threads."""
    plugins: Applied[list[str]] = []
    """Modules, .py files or entry points that are imported before anything is looked up by name."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**_sections(values, self.sections()))

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """Return the sections by name, with the class of each; that of `method` is the base of all methods."""
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}

    @classmethod
    def load_yaml(cls, path: str | Path, overrides: Sequence[str] = (), *, plugins: bool = True) -> Self:
        """Read a YAML file, and apply `overrides` such as "train.seed=1".

        With `plugins=False` the plugins that the file names are not loaded, and none of its code is run.

        Raises `ConfigError` with one line per problem: file, line, key, given value and allowed values.
        """
        source = YamlSource(path)
        for override in overrides:
            source.override(override)
        problems = [*source.problems, *source.not_saved(), *source.code_of_models()]
        named = None if plugins else source.values.pop("plugins", None)
        try:
            config = cls.from_dict(source.values)
            if named is not None:
                config.plugins = named
        except InvalidConfig as error:
            # A value that could not be read is not checked again.
            unread = {problem.path[:depth] for problem in problems for depth in range(1, len(problem.path) + 1)}
            problems += [problem for problem in error.problems if problem.path not in unread]
        if problems:
            raise ConfigError(source.located(problems))
        return config

    def dump_yaml(self, path: str | Path) -> None:
        """Write all options, so that `load_yaml` returns an equal configuration.

        An object given from Python (a loaded model, a function) is written as a note, and a secret as `<redacted>`.
        `load_yaml` refuses both by name.
        """
        Path(path).write_text(as_yaml(self.recorded()), encoding="utf-8")

    def recorded(self) -> dict[str, Any]:
        """Return the options as `to_dict` does, without secrets, to be written or shown.

        Rows of data that stand in the configuration itself are kept as they are, since a model learns from them.
        """
        values = self.to_dict()
        rows = {name: value for name, value in values["data"].items() if isinstance(value, list)}
        return {**redacted(values), "data": {**redacted(values["data"]), **rows}}

    def evolve(self, **changes: Any) -> Self:
        """Return a copy with nested changes: `evolve(train={"seed": 1}, method={"gen_kwargs": {"top_k": 5}})`.

        Mappings are merged, so an option may be added to `gen_kwargs`. Another method, optimiser or scheduler
        starts from its own defaults. Raises `ConfigError` for an unknown key.
        """
        return self.update(self, changes)

    @classmethod
    def update(cls, baseconfig: TRLConfig | Mapping[str, Any], changes: Mapping[str, Any]) -> Self:
        """Return a copy with changes, as `evolve` does; keys may be dotted: `{"train.seed": 1}`."""
        values = baseconfig.to_dict() if isinstance(baseconfig, TRLConfig) else baseconfig
        base = {name: v.to_dict() if isinstance(v, Section) else copied(v) for name, v in values.items()}
        nested = _unflattened(changes)
        for name in ("method", "optimizer", "scheduler"):
            new, old = nested.get(name), base.get(name)
            if isinstance(new, Mapping) and isinstance(old, Mapping) and "name" in new and _kind(new) != _kind(old):
                base[name] = {}
        return cls.from_dict(_merged(base, nested))

    def elsewhere(self, folder: str | Path) -> Self:
        """Return a copy for a trial: in another folder, not resumed, without trackers, logs of rollouts and upload."""
        left_out = ("resume_from_checkpoint", "rollout_logging_dir", "logging_dir", "tracker", "push_to_hub")
        return self.evolve(train={"checkpoint_dir": str(folder), **dict.fromkeys(left_out)})

    def check(self) -> None:
        """Check what depends on several fields again, after fields were assigned. Raises `ConfigError`."""
        type(self).from_dict(self.to_dict())

    def conflicts(self) -> Iterator[Problem]:
        """Yield conflicts between options of different sections."""
        method, name = type(self.method), self.method.name
        try:
            if method_class(name) is not method:
                yield at("method.name", f"{shown(name)} is not the name of {method.__name__}.")
        except RegistryError as error:
            yield at("method.name", str(error))
        if self.model.model_arch_type not in method.arch_types:
            problem = (
                f"{shown(self.model.model_arch_type)} cannot be trained by {name}; use {listed(method.arch_types)}."
            )
            yield at("model.model_arch_type", problem)
        schedule = self.scheduler.name
        if not isinstance(schedule, str) and schedule.optimizer is not self.optimizer.name:
            yield at("scheduler.name", "is a schedule of another optimizer than the one in optimizer.name.")
        if self.train.stop_kl is not None and not self.method.measures_kl:
            yield at(
                "train.stop_kl",
                f"{shown(self.train.stop_kl)} needs policy/kl, which {self.train.trainer} does not measure with this "
                "configuration; leave it out.",
            )
        if self.backend.rollout == "layers" and self.sampler.engine == "copy":
            yield at("backend.rollout", "'layers' saves memory that sampler.engine: copy takes; leave one out.")
        if self.backend.rollout == "layers" and self.sampler.engine in ("paged", "vllm", "vllm_colocated"):
            yield at("backend.rollout", f"'layers' needs sampler.engine: transformers; it is {self.sampler.engine!r}.")
        if self.train.group_by_length and self.model.model_arch_type == "diffusion":
            yield at("train.group_by_length", "True is for text: images have no lengths; leave it out.")
        generates = isinstance(self.method, OnlineTextMethodConfig) or self.data.prompts or self.data.eval_prompts
        for key in ("gen_kwargs", "gen_experience_kwargs"):
            options = getattr(self.method, key, None)
            if not isinstance(options, dict) or "max_new_tokens" not in options:
                continue
            problems = list(generation_problems(options, key, getattr(self.method, "generation_options", ())))
            yield from problems
            longest, seq_length = 0 if problems else longest_response(options), self.train.seq_length
            if generates and not is_auto(seq_length) and longest >= seq_length:
                path = ("method", key, "max_new_tokens")
                yield Problem(path, f"{longest} must be below train.seq_length ({seq_length}).")
        yield from self.method.conflicts_with(self)

    def unused_options(self) -> list[str]:
        """Return the dotted keys that were changed from their default but have no effect in this configuration."""
        return [f"{name}.{key}" for name in self.sections() for key in getattr(self, name).unused_options()]

    def __str__(self) -> str:
        return json.dumps(plain(self.recorded()), indent=2)


for _name, _class in TRLConfig.sections().items():
    _class.section = _name


def _sections(values: Mapping[str, Any], classes: Mapping[str, type[Section]]) -> dict[str, Any]:
    """Make the sections from mappings. Raises `InvalidConfig` with the problems of all sections at once."""
    problems = list(_plugin_problems(values.get("plugins")))
    made: dict[str, Any] = {}
    for name, value in values.items():
        try:
            made[name] = _section(name, value, classes)
        except InvalidConfig as error:
            problems += error.problems
    required = {"model": "model_path", "method": "name", "train": "trainer"}
    for name, key in required.items():
        if name not in values:
            problems.append(Problem((name,), f"missing section, with at least {key}."))
    if problems:
        known = {**classes, **{name: type(section) for name, section in made.items() if name in classes}}
        raise InvalidConfig([_elsewhere(problem, known) for problem in problems])
    return made


def _section(name: str, value: Any, classes: Mapping[str, type[Section]]) -> Any:
    if name == "plugins":
        return [] if value is None else value
    if name not in classes:
        close = nearest(name, [*classes, "plugins"])
        advice = f"Did you mean {close}?" if close else f"The sections are {', '.join(classes)} and plugins."
        raise InvalidConfig([Problem((name,), f"unknown section. {advice}")])
    if name != "method" or isinstance(value, Section) or not isinstance(value, Mapping | None):
        return classes[name].from_dict(value)
    if not value or "name" not in value:
        raise InvalidConfig([at("method.name", f"missing. It must be {listed(METHODS.names())}.")])
    try:
        method = method_class(value["name"])
    except RegistryError as error:
        raise InvalidConfig([at("method.name", str(error))]) from None
    return method.from_dict(value)


def _elsewhere(problem: Problem, sections: Mapping[str, type[Section]]) -> Problem:
    """Point an unknown key to the section that has it, if there is one."""
    if isinstance(problem, UnknownKey):
        for name, section in sections.items():
            if problem.path[1] in section.model_fields:
                return Problem(problem.path, f"unknown key. Did you mean {name}.{problem.path[1]}?")
    return problem


def _plugin_problems(plugins: Any) -> Iterator[Problem]:
    """Load the plugins, which may register the method. A value of a wrong type is reported elsewhere."""
    for i, plugin in enumerate(plugins if isinstance(plugins, list) else []):
        try:
            load_plugin(plugin)
        except RegistryError as error:
            yield Problem(("plugins", i), str(error))


def _kind(section: Mapping[str, Any]) -> str:
    """Return what the name in a section chooses, whatever its spelling."""
    name = str(section.get("name"))
    return METHODS.canonical(name) if name in METHODS else name.lower()


def _unflattened(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `{"a.b": 1, "c": {"d.e": 2}}` into nested mappings. Keys below the third level keep their dots."""
    nested: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping) and "." not in str(key):
            nested.setdefault(str(key), {})
            items = [(f"{key}.{name}", item) for name, item in value.items()]
        else:
            items = [(str(key), value)]
        for dotted, item in items:
            for name in reversed(dotted.split(".")):
                item = {name: item}
            nested = _merged(nested, item)
    return nested


def _merged(base: Any, changes: Any) -> Any:
    """Return `base` with `changes` merged in, mapping by mapping. Neither argument is changed."""
    if not (isinstance(base, Mapping) and isinstance(changes, Mapping)):
        return copied(dict(changes)) if isinstance(changes, Mapping) else copied(changes)
    return {**copied(dict(base)), **{key: _merged(base.get(key), value) for key, value in changes.items()}}
