"""What becomes of an option that has changed when a run is resumed: its rule, declared with the option.

    cliprange: Applied[float] = Field(default=0.2, gt=0)

An option without a rule, as those of a plugin may be, is refused: nobody has said that it may change in mid-run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic.fields import FieldInfo

from trlx_like.config.problems import shown
from trlx_like.config.registries import METHODS, TRAINERS
from trlx_like.config.section import Section
from trlx_like.config.yaml_source import plain
from trlx_like.redact import redacted


@dataclass(frozen=True)
class OnResume:
    """Say what becomes of a changed option on resume; metadata of a field.

    Attributes:
        refused: Why the change is refused; None: it takes effect, from the next step or round on.
        compared: False for an option of each start, such as the folder, which may differ without a word.
        applied_keys: The keys of a mapping that take effect although other keys are refused.
    """

    refused: str | None = None
    compared: bool = True
    applied_keys: tuple[str, ...] = ()


UNDECLARED = OnResume("nothing says that it may change in the middle of a run")

T = TypeVar("T")
Applied = Annotated[T, OnResume()]
OfStart = Annotated[T, OnResume(compared=False)]
OfWeights = Annotated[T, OnResume("the weights and the optimizer's state in the checkpoint belong to it")]
OfData = Annotated[T, OnResume("the run would go on with other data")]
OfRound = Annotated[T, OnResume("the place in the round and in the data is counted in it")]
OfRollouts = Annotated[T, OnResume("the samples of the round in the checkpoint were made with it")]
OfReference = Annotated[T, OnResume("the checkpoint has a reference model or none because of it")]
OfState = Annotated[T, OnResume("what the checkpoint has counted so far depends on it")]


@dataclass(frozen=True)
class Change:
    """Describe an option whose value is not that of the checkpoint."""

    option: str
    was: Any
    now: Any
    refused: str | None = None

    def words(self, force: bool = False) -> tuple[str, str, str]:
        """Return the option, its two values, and what becomes of the change; `force` makes it in any case."""
        verdict = "applied" if self.refused is None else f"{'forced, though' if force else 'refused:'} {self.refused}"
        return self.option, f"{shown(self.was)} -> {shown(self.now)}", verdict


def rule_of(field: FieldInfo) -> OnResume:
    """Return the rule that is declared with an option."""
    return next((rule for rule in field.metadata if isinstance(rule, OnResume)), UNDECLARED)


def record(config: Section) -> dict[str, Any]:
    """Return what a checkpoint records of a configuration, as JSON values by dotted option.

    Options of each start, such as the folder, are left out: the same run in two folders has the same checkpoints.
    Secrets are left out, too.
    """
    kept = {option: value for option, field, value in _options(config) if rule_of(field).compared}
    return cast(dict[str, Any], json.loads(json.dumps(redacted(kept))))


def differences(config: Section, recorded: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the options whose values differ from those in a checkpoint.

    Args:
        config: The configuration of the run that is resumed.
        recorded: What `record` returned for the configuration of the checkpoint.
    """
    values = record(config)
    other_method = recorded.get("method.name") != values["method.name"]
    for option, field, _ in _options(config):
        if option not in values or (other_method and option.startswith("method.") and option != "method.name"):
            continue
        # An option that is newer than the checkpoint had the effect of its default.
        default = field.get_default(call_default_factory=True, validated_data={})
        yield from _changes(option, rule_of(field), recorded.get(option, plain(default)), values[option])


def _options(config: Section) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield name, declaration and plain value of every option, with registered names in place of aliases."""
    registered = {"train.trainer": TRAINERS, "method.name": METHODS}
    for part, declared in type(config).model_fields.items():
        section = getattr(config, part)
        if not isinstance(section, Section):
            yield part, declared, plain(section)
            continue
        for name, field in type(section).model_fields.items():
            option, value = f"{part}.{name}", plain(getattr(section, name))
            yield option, field, registered[option].canonical(value) if option in registered else value


def _changes(option: str, rule: OnResume, was: Any, now: Any) -> Iterator[Change]:
    """Yield the change of an option, or of each key of a mapping."""
    if was == now:
        return
    if not isinstance(was, Mapping) or not isinstance(now, Mapping):
        yield Change(option, was, now, rule.refused)
        return
    for key in dict.fromkeys([*was, *now]):
        if was.get(key) != now.get(key):
            refused = None if key in rule.applied_keys else rule.refused
            yield Change(f"{option}.{key}", was.get(key), now.get(key), refused)
