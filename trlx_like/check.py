"""What `trlx-like check` does: finds what a run would stumble over, in seconds.

Data is read whole, and its first row goes through the tokenizer, the chat template and the trainer's own reading. Of
the model the configuration and the headers of the files are read. No weight is read, no function is called, and the
network is not used. `deep_check.py` does all of that.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trlx_like import api
from trlx_like.config import TRAINERS, TRLConfig
from trlx_like.errors import ConfigError, TrlxError
from trlx_like.imports import is_python_name

Data = dict[str, Sequence[Any]]
"""Rows by the name of their argument of `train`."""

FUNCTIONS = ("model.model_path", "tokenizer.tokenizer_path", "method.formatting_func")
"""Options outside of the section `data` that may name a function."""


def check_run(config: TRLConfig) -> list[str]:
    """Check a configuration, and the data, functions and models that it names.

    Args:
        config: The complete configuration.

    Returns:
        The data and functions, each described in a few words.

    Raises:
        TrlxError: For every mistake that is found. Mistakes in data and functions have one line each.
    """
    found, rows = read_sources(config)
    api.check(config)
    _check_arguments(config, rows)
    api.check_folder(config)
    with_first_rows(config, rows)
    return found


def read_sources(config: TRLConfig) -> tuple[list[str], Data]:
    """Read the data that files and lists hold, and import the functions that are named.

    Args:
        config: The complete configuration.

    Returns:
        Each source described in a few words, and the rows that could be read.

    Raises:
        ConfigError: With one line for each source that is unusable.
    """
    from trlx_like.pipelines.given import shaped
    from trlx_like.pipelines.sources import check_source

    found, rows, problems = [], Data(), []
    for option, spec in _options_with_values(config):
        try:
            name = option.removeprefix("data.")
            if name in api.DATA:
                words, rows[name] = check_source(spec, option, config.data.columns)
                found.append(f"{name}: {words}")
            else:
                found += _function(spec, option, config)
        except TrlxError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    uses = TRAINERS.get(config.train.trainer).uses
    rows = {name: values for name, values in shaped(rows, config.data, uses).items() if values}
    if rows.get("samples") and rows.get("rewards"):
        from trlx_like.pipelines.returns import check_rewards

        check_rewards(rows["rewards"], len(rows["samples"]))
    return found, rows


def _options_with_values(config: TRLConfig) -> Iterator[tuple[str, Any]]:
    for section in ("model", "tokenizer", "method", "data"):
        for name, value in getattr(config, section).to_dict().items():
            if value is not None:
                yield f"{section}.{name}", value


def _function(spec: Any, option: str, config: TRLConfig) -> list[str]:
    """Import the function that an option names, if it names one, and describe it."""
    from trlx_like.pipelines.sources import load_function
    from trlx_like.rewards.judges import check_judge, make_judge
    from trlx_like.rewards.make import check_reward, names_reward_model

    section, name = option.split(".")
    if option == "data.judge" and not (isinstance(spec, str) and names_reward_model(spec)):
        judge = check_judge(spec, option)
        if judge == "llm":  # it asks nothing before there is a pair
            make_judge(spec, option)
        elif judge == "reward_model":
            check_reward(str(spec.get("model")) if isinstance(spec, Mapping) else "", "judge.model")
        return [f"judge: {judge}"]
    if option in ("data.reward_fn", "data.judge"):
        weights = config.reward.weights if name == "reward_fn" else None
        return [f"{name}: {check_reward(spec, option, weights)}"]
    if section == "data" and name in ("metric_fn", "logit_mask"):
        load_function(spec, option)
        return [f"{name}: {spec}"]
    if option in FUNCTIONS and is_python_name(spec):
        load_function(spec, option)
    return []


def _check_arguments(config: TRLConfig, rows: Data) -> None:
    """Raise RewardError if a function needs an argument that neither the library nor any prompt of a set has."""
    from trlx_like.rewards.alignment import TOKEN_COLUMNS
    from trlx_like.rewards.arguments import accepted, metadata_columns
    from trlx_like.rewards.make import make_reward, names_reward_model
    from trlx_like.rewards.weighted import parts_of

    own = ["messages", "completion_ids", *TOKEN_COLUMNS, "samples", "prompts", "outputs", "tokenizer"]
    given = config.data.reward_fn
    named = [spec for spec in (given if isinstance(given, list) else [given]) if isinstance(spec, str | Mapping)]
    made = [make_reward(spec) for spec in named if isinstance(spec, Mapping) or not names_reward_model(spec)]
    functions = [part for function in made for part in parts_of(function).values()]
    for option in ("prompts", "eval_prompts") if config.model.model_arch_type != "diffusion" else ():
        if prompts := rows.get(option):
            keys = metadata_columns([row for row in prompts if isinstance(row, Mapping)])
            for function in functions:
                accepted(function, dict.fromkeys([*own, *keys], ()), own)


class _Read(Exception):
    """Ends the construction of a trainer that was made to read its inputs."""


def with_first_rows(config: TRLConfig, rows: Mapping[str, Sequence[Any]]) -> None:
    """Let the trainer read the first row of its data and the headers of its models, as far as these are known.

    A trainer offers this by the methods `read_inputs` and `inspect_models`; its `build` calls the first one before it
    loads a model. Of a trainer without them nothing is read.

    Args:
        config: The complete configuration.
        rows: All rows by argument of `train`.

    Raises:
        TrlxError: What the trainer would raise for them.
    """
    trainer_class = TRAINERS.get(config.train.trainer)
    needed = [name for name in getattr(trainer_class, "needs", ()) if name in api.DATA]
    offline = getattr(trainer_class, "offline", False)
    if not hasattr(trainer_class, "read_inputs") or (offline and not all(rows.get(name) for name in needed)):
        return
    if not _tokenizer_at_hand(config):
        return

    def read_inputs(self: Any, tokenizer: Any = None) -> None:
        trainer_class.read_inputs(self, tokenizer)
        self.inspect_models()
        raise _Read

    reader = type(trainer_class.__name__, (trainer_class,), {"read_inputs": read_inputs})
    functions = {
        name: never_called for name in ("reward_fn", "metric_fn") if getattr(config.data, name, None) is not None
    }
    first = {name: values[:1] for name, values in rows.items()}
    with tempfile.TemporaryDirectory() as folder, quiet():
        elsewhere = config.evolve(
            train={"checkpoint_dir": folder}, tokenizer={"tokenizer_extra_configs": {"local_files_only": True}}
        )
        stops = config.data.stop_sequences
        with suppress(_Read):
            reader(elsewhere, stop_sequences=stops, **config.train.trainer_kwargs, **functions, **first)


def _tokenizer_at_hand(config: TRLConfig) -> bool:
    """Tell whether the tokenizer, or the pipeline that has it, is on this machine and not made by a function."""
    from transformers import AutoTokenizer

    from trlx_like.models.sources import UNTRUSTED, check_place

    own = config.tokenizer.tokenizer_path
    path = config.model.model_path if own is None else own
    if not isinstance(path, str) or is_python_name(path):
        return not isinstance(path, str)
    try:
        check_place(path, "")
    except ConfigError:
        return True  # to be refused with the name of its option
    if Path(path).is_dir():
        return True
    try:
        AutoTokenizer.from_pretrained(
            path, **{**UNTRUSTED, **config.tokenizer.tokenizer_extra_configs, "local_files_only": True}
        )
    except Exception:
        return False
    return True


def never_called(**_: Any) -> None:
    """Stand for a function of the user, where only its presence is looked at."""


@contextmanager
def quiet(level: int = logging.WARNING, *others: str) -> Iterator[None]:
    """Log nothing below a level in a `with` block.

    Args:
        level: The level.
        others: The loggers of other packages that it holds for too.
    """
    before = [(one, one.level) for one in map(logging.getLogger, ("trlx_like", *others))]
    for one, _ in before:
        one.setLevel(level)
    try:
        yield
    finally:
        for one, former in before:
            one.setLevel(former)
