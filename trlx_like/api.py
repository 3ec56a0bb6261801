"""`train`, the one call: it reads the configuration, loads plugins, makes the trainer and trains."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trlx_like.config import TRAINERS, TRLConfig
from trlx_like.config.elsewhere import named_elsewhere
from trlx_like.errors import ConfigError, TrlxError
from trlx_like.meeting import first_to_say
from trlx_like.presets import preset_for
from trlx_like.redact import redacted
from trlx_like.registry import load_plugin
from trlx_like.rewards.worker import refuse_in_worker

if TYPE_CHECKING:
    from trlx_like.trainers.base import BaseRLTrainer

logger = logging.getLogger(__name__)

DATA = ("prompts", "eval_prompts", "samples", "eval_samples", "rewards", "preferences", "eval_preferences")
"""The arguments of `train` that are data. A trainer accepts those that its `uses` names."""
FUNCTIONS = ("reward_fn", "metric_fn", "judge", "stop_sequences", "logit_mask", "tokenizer", "callbacks")
"""The other arguments that every trainer gets."""


@named_elsewhere
def train(
    config: TRLConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
    reward_fn: Any = None,
    prompts: Iterable[Any] | None = None,
    *,
    eval_prompts: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    metric_fn: Callable[..., Any] | None = None,
    samples: Iterable[Any] | None = None,
    eval_samples: Iterable[Any] | None = None,
    rewards: Iterable[Any] | None = None,
    preferences: Iterable[Any] | None = None,
    eval_preferences: Iterable[Any] | None = None,
    judge: Any = None,
    tools: Sequence[Any] | None = None,
    stop_sequences: Sequence[str] | None = None,
    logit_mask: Any = None,
    model_path: Any = None,
    tokenizer: Any = None,
    optimizers: Any = None,
    plugins: Sequence[str] = (),
    callbacks: Sequence[Any] = (),
) -> BaseRLTrainer[Any]:
    """Train a model and return its trainer.

    Data and functions that are not passed are taken from the section `data` of the configuration. Data may be a list,
    a `Dataset`, `IterableDataset`, `DatasetDict` (its split "train", and one of the others for evaluation), a frame of
    pandas, or a generator, with rows of one of the forms in docs/data.md or with `data.columns`.

    Args:
        config: a `TRLConfig`, a dict or the path of a YAML file; if left out, the preset that fits the other arguments.
        reward_fn: a function that scores samples. It gets the keywords that it accepts among samples, prompts, outputs,
            tokenizer and the prompts' own keys. It returns one number per sample, or one per response token, or None
            for a sample to leave out. A reward model, its folder, "module:function" and a list of these are accepted
            too; the rewards of a list are added up with `reward.weights`.
        prompts: strings, messages, or dicts that have either under "prompt" and further keys for the reward function.
        eval_prompts: prompts for evaluation, in the same forms; if left out, the first `train.batch_size` prompts.
            A mapping from names to prompts is several sets, whose metrics are also reported as `<metric>@<name>`.
        metric_fn: a function called like `reward_fn`, in evaluations only; returns a dict from names to numbers.
        samples: strings, (prompt, output, ...) dialogues, messages, or dicts with "prompt" and "output".
        eval_samples: held-out samples, in the same forms, or several sets of them as for `eval_prompts`.
        rewards: for each sample one number (of KTO a label, true or false), or a list with one number per output, or
            per token of the outputs; if left out, the column "reward", "score" or "label" of the samples.
        preferences: rows with "chosen" and "rejected", and optionally "prompt" and "margin".
        eval_preferences: held-out preferences, in the same form, or several sets of them as for `eval_prompts`.
        judge: decides which of several responses is better: a judge, a reward function, a registered name, or a
            mapping of a name and options.
        tools: functions or JSON schemas that the chat template shows with all messages.
        stop_sequences: strings that end a response; the reward function does not see them.
        logit_mask: bool [V, V], True where the second token may follow the first.
        model_path: a folder, a hub name, a PretrainedConfig or a loaded model, in place of `model.model_path`.
        tokenizer: a tokenizer, in place of `tokenizer.tokenizer_path`.
        optimizers: an optimizer of the parameters of a loaded model, in place of the section `optimizer`, or the pair
            of one and its schedule. What the trainer adds to the model, such as a value head, joins its last group.
        plugins: modules, .py files or entry points to load first.
        callbacks: `Callback`s to call during training.

    Returns:
        The trainer, with the trained `model` and its `tokenizer`, and with `generate`, `evaluate`, `save_pretrained`.
        Its class is that of `train.trainer`, such as `PPOTrainer`.

    Raises:
        TrlxError: for every mistake that the user can correct.
    """
    given = locals()
    data = {name: given[name] for name in DATA}
    refuse_in_worker()
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_once
    complete = read_config(
        config,
        model_path=model_path,
        optimizers=optimizers,
        plugins=plugins,
        reward_fn=reward_fn,
        judge=judge,
        tools=tools,
        data=data,
    )
    check_folder(complete)
    functions = {name: given[name] for name in FUNCTIONS}
    trainer = make_trainer(complete, **functions, **data)
    trainer.learn()
    return trainer


def _show_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that the program does not catch. Of several processes only one prints a `TrlxError`."""
    if not isinstance(error, TrlxError) or first_to_say(str(error)):
        sys.__excepthook__(kind, error, trace)


def read_config(
    config: TRLConfig | Mapping[str, Any] | str | PathLike[str] | None,
    *,
    model_path: Any = None,
    optimizers: Any = None,
    plugins: Sequence[str] = (),
    reward_fn: Any = None,
    judge: Any = None,
    tools: Sequence[Any] | None = None,
    data: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> TRLConfig:
    """Return the complete configuration that `train` would use. The caller's object is not changed.

    Args:
        config, model_path, optimizers, plugins, reward_fn, judge, tools: as in `train`.
        data: the arguments of `train` that are data; with reward_fn and judge they choose a preset if config is None.
        overrides: "key=value" settings that replace options of a YAML file.

    Raises:
        ConfigError: for a configuration that cannot run.
        RegistryError: for a plugin that cannot be loaded.
    """
    ensure_logging()
    for plugin in plugins:
        load_plugin(plugin)
    if config is None:
        given = data or {}
        sources = {name: given.get(name) for name in ("samples", "rewards", "preferences")}
        name, chosen = preset_for(reward_fn=reward_fn, judge=judge, **sources)
        logger.info("No config was given: using the preset %r.", name)
    elif isinstance(config, TRLConfig):
        chosen = config
    elif isinstance(config, Mapping):
        chosen = TRLConfig.from_dict(dict(config))
    else:
        chosen = TRLConfig.load_yaml(Path(config), overrides)
    # The run's config.yml has to say which plugins it needs.
    changes: dict[str, Any] = {"plugins": list(dict.fromkeys([*chosen.plugins, *plugins]))}
    if model_path is not None:
        changes["model"] = {"model_path": model_path}
    if optimizers is not None:
        optimizer, schedule = optimizers if isinstance(optimizers, tuple) else (optimizers, None)
        changes["optimizer"] = {"name": optimizer}
        changes["scheduler"] = {} if schedule is None else {"name": schedule}
    if tools is not None:
        from trlx_like.pipelines.chat import common_options

        changes["tokenizer"] = {"chat_template_kwargs": common_options({"tools": list(tools)}, "train")}
    return chosen.evolve(**changes)


def make_trainer(
    config: TRLConfig,
    *,
    reward_fn: Any = None,
    metric_fn: Callable[..., Any] | None = None,
    judge: Any = None,
    stop_sequences: Sequence[str] | None = None,
    logit_mask: Any = None,
    tokenizer: Any = None,
    callbacks: Sequence[Any] = (),
    **data: Any,
) -> BaseRLTrainer[Any]:
    """Make the trainer that `train` would run, ready for `learn` or `generate`.

    Args:
        config: the complete configuration.
        reward_fn, metric_fn, judge, stop_sequences, logit_mask, tokenizer, callbacks: as in `train`.
        data: the arguments of `train` that are data.

    Raises:
        TrlxError: for every mistake that the user can correct.
    """
    from trlx_like.pipelines.given import read_arguments, shaped
    from trlx_like.pipelines.sources import load_function
    from trlx_like.rewards.make import make_reward
    from trlx_like.trainers.checks import refuse_unused, require

    check(config)
    named = config.data
    trainer_class = TRAINERS.get(config.train.trainer)
    data = shaped(read_arguments(data, named, DATA), named, trainer_class.uses)
    if reward_fn is not None or named.reward_fn is not None:
        place = "data.reward_fn" if reward_fn is None else "reward_fn"
        reward_fn = make_reward(named.reward_fn if reward_fn is None else reward_fn, config.reward.weights, place)
    if metric_fn is None and named.metric_fn is not None:
        metric_fn = load_function(named.metric_fn, "data.metric_fn")
    if judge is not None or named.judge is not None:
        data["judge"] = _judge(named.judge, "data.judge") if judge is None else _judge(judge, "judge")
    if logit_mask is None and named.logit_mask is not None:
        logit_mask = load_function(named.logit_mask, "data.logit_mask")()
    given = {name: value for name, value in data.items() if value is not None}
    refuse_unused(trainer_class, given)
    require(config, getattr(trainer_class, "needs", ()), {"reward_fn": reward_fn, **given})
    prompts = given.get("prompts")
    if data.get("eval_prompts") is None and not (prompts is None or callable(prompts) or isinstance(prompts, Mapping)):
        given["eval_prompts"] = prompts[: config.train.batch_size]
    for key in config.unused_options():
        logger.info("%s is set but does nothing with this configuration.", key)
    made: BaseRLTrainer[Any] = trainer_class(
        config,
        reward_fn=reward_fn,
        metric_fn=metric_fn,
        stop_sequences=named.stop_sequences if stop_sequences is None else stop_sequences,
        logit_mask=logit_mask,
        tokenizer=tokenizer,
        callbacks=callbacks,
        **config.train.trainer_kwargs,
        **given,
    )
    return made


def _judge(spec: Any, option: str) -> Any:
    """Make the judge that `judge` or `data.judge` describes."""
    from trlx_like.rewards.judges import JUDGES, make_judge
    from trlx_like.rewards.make import names_reward_model

    if isinstance(spec, str) and spec not in JUDGES and names_reward_model(spec):
        spec = {"name": "reward_model", "model": os.path.expanduser(spec), "option": option}
    return make_judge(spec, option)


def check(config: TRLConfig) -> None:
    """Look up everything that the configuration names without loading a model; raise what `train` would raise."""
    from trlx_like.distributed import BACKENDS
    from trlx_like.models.loading import check_model
    from trlx_like.optim import try_out
    from trlx_like.pipelines.prompts import DATAPIPELINES
    from trlx_like.samplers.engines import ENGINES
    from trlx_like.tracking import TRACKERS
    from trlx_like.trainers.checks import refuse_unused, require_method

    config.check()
    trainer_class = TRAINERS.get(config.train.trainer)
    require_method(config.train.trainer, config, trainer_class.method_class)
    refuse_unused(trainer_class, {name: getattr(config.data, name, None) for name in (*DATA, "judge")})
    if taken := sorted(set(config.train.trainer_kwargs) & {*DATA, *FUNCTIONS, "config"}):
        raise ConfigError(f"train.trainer_kwargs cannot set {', '.join(taken)}, which has an option of its own.")
    check_model(config.model)
    DATAPIPELINES.get(config.train.pipeline)
    ENGINES.get(config.sampler.engine)
    BACKENDS.get(config.backend.kind)
    for tracker in config.train.trackers:
        TRACKERS.get(tracker)
    try_out(config.optimizer, config.scheduler, config.train.total_steps)


def check_folder(config: TRLConfig) -> None:
    """Find out, before a model is loaded, whether the run folder can be used; change nothing. Only rank 0 looks.

    Raises:
        ConfigError: As `RunFolder.held`.
    """
    from trlx_like.trainers.run import RunFolder

    if os.environ.get("RANK", "0") == "0":
        RunFolder.check(config)


def ensure_logging() -> None:
    """Print the library's log on stderr, unless the program has set up logging itself.

    Ranks other than 0 print warnings only.
    """
    library = logging.getLogger("trlx_like")
    if library.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(message)s"))
    library.addHandler(handler)
    library.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


class _Formatter(logging.Formatter):
    """Write messages without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))
