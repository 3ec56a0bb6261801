"""What Optuna does: keep the trials in a journal file, propose points, and judge runs that are going on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from trlx_like.errors import ConfigError
from trlx_like.sweep.spec import SweepConfig

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

NAME = "sweep"
FREE = {"trials", "parallel", "devices", "folder"}
"""What may change when a sweep goes on."""
ENOUGH = 8
"""Fewest finished trials from which the importance of options is estimated."""


def open_study(spec: SweepConfig, folder: Path, config: Mapping[str, Any]) -> Study:
    """Open the study in the journal of a sweep, or begin it.

    Args:
        spec: The sweep.
        folder: Its folder.
        config: The configuration of its runs.

    Raises:
        ConfigError: The sweep in this folder was begun with other values.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    study = optuna.create_study(
        study_name=NAME,
        storage=storage,
        direction="maximize" if spec.mode == "max" else "minimize",
        load_if_exists=True,
        pruner=optuna.pruners.SuccessiveHalvingPruner(spec.rungs.first, spec.rungs.factor) if spec.rungs else None,
    )
    # A sweep that goes on must not draw the points of its beginning again.
    seed = spec.seed + len(study.trials)
    study.sampler = (
        optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        if spec.search == "tpe"
        else optuna.samplers.RandomSampler(seed=seed)
    )
    values = {name: value for name, value in spec.to_dict().items() if name not in FREE} | {"config": config}
    if "sweep" not in study.user_attrs:
        if spec.search == "grid":
            for point in product(*([json.dumps(value) for value in values] for values in spec.options.values())):
                study.enqueue_trial(dict(zip(spec.options, point, strict=True)), skip_if_exists=True)
        study.set_user_attr("sweep", values)
    before = study.user_attrs["sweep"]
    changed = [name for name, value in values.items() if before.get(name) != json.loads(json.dumps(value))]
    if changed:
        raise ConfigError(
            f"folder ({str(folder)!r}): the sweep in it was begun with another {changed[0]}, so that its trials cannot "
            "be compared with new ones. Choose another folder, or take the change back."
        )
    return study


def point_of(trial: Trial, spec: SweepConfig) -> dict[str, Any]:
    """Return the value of each option in a trial; a new trial gets them from the sampler."""
    point: dict[str, Any] = {}
    for name, space in spec.spaces.items():
        if isinstance(space, list):  # as texts, since Optuna takes no lists and no mappings
            point[name] = json.loads(trial.suggest_categorical(name, [json.dumps(value) for value in space]))
        elif space.whole:
            low, high, step = int(space.low), int(space.high), int(space.step or 1)
            point[name] = trial.suggest_int(name, low, high, step=step, log=space.log)
        else:
            point[name] = trial.suggest_float(name, space.low, space.high, step=space.step, log=space.log)
    return point


def described(trial: FrozenTrial, spec: SweepConfig) -> dict[str, Any]:
    """Return a trial for the page and for lines of text, with its score in "value" and those of its seeds around it."""
    scores = list(trial.user_attrs.get("scores", {}).values())
    value = median(scores) if trial.state.name == "COMPLETE" else None
    if trial.state.name == "PRUNED" and trial.intermediate_values:
        value = trial.intermediate_values[max(trial.intermediate_values)]
    lists = {name for name, space in spec.options.items() if isinstance(space, list)}
    return {
        "number": trial.number,
        "state": {"COMPLETE": "finished", "PRUNED": "stopped early", "FAIL": "failed"}.get(trial.state.name, "running"),
        "point": {name: json.loads(v) if name in lists else v for name, v in trial.params.items()},
        "value": value,
        "low": min(scores, default=None),
        "high": max(scores, default=None),
        "seeds": len(scores),
        "error": trial.user_attrs.get("error", ""),
    }


def ranked(study: Study, spec: SweepConfig) -> list[dict[str, Any]]:
    """Return the trials that have begun, the best first, as `described`; those that failed or run come last."""
    trials = [described(trial, spec) for trial in study.get_trials(deepcopy=False) if trial.state.name != "WAITING"]
    sign = -1 if spec.mode == "max" else 1
    places = {"finished": 0, "stopped early": 1}
    return sorted(
        trials,
        key=lambda one: (places.get(one["state"], 2), math.inf if one["value"] is None else sign * one["value"]),
    )


def importance(study: Study, spec: SweepConfig) -> dict[str, float]:
    """Return the share of each option in reaching the best tenth of the scores; empty for too few trials.

    By PED-ANOVA (Watanabe et al. 2023, arXiv:2304.10255), which needs no scikit-learn.
    """
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    finished = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    if len(finished) < ENOUGH or len(spec.options) < 2:
        return {}
    found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {name: round(share, 4) for name, share in found.items() if math.isfinite(share)}
