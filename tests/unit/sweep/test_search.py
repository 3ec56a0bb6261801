"""What Optuna is asked and told: points of every kind of range, the best first, and what matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trlx_like.errors import ConfigError
from trlx_like.sweep.search import importance, open_study, point_of, ranked
from trlx_like.sweep.spec import SweepConfig

OPTIONS: dict[str, Any] = {
    "lr": {"low": 1e-5, "high": 1e-3, "log": True},
    "epochs": {"low": 1, "high": 3},
    "size": {"low": 8, "high": 32, "step": 8},
    "tags": [["a"], None, "b"],
}


@pytest.mark.parametrize("search", ["random", "tpe"])
def test_points_and_what_matters(search: Any, tmp_path: Path) -> None:
    spec = SweepConfig(options=OPTIONS, search=search, trials=15, mode="min")
    study = open_study(spec, tmp_path, {})
    points = []
    for _ in range(15):
        trial = study.ask()
        points.append(point_of(trial, spec))
        trial.set_user_attr("scores", {"0": points[-1]["size"]})
        study.tell(trial, points[-1]["size"])
    assert all(1e-5 <= point["lr"] <= 1e-3 and point["epochs"] in (1, 2, 3) for point in points)
    assert {point["size"] for point in points} <= {8, 16, 24, 32} and len({point["lr"] for point in points}) == 15
    assert all(point["tags"] in (["a"], None, "b") for point in points)
    trials = ranked(study, spec)
    assert [one["value"] for one in trials] == sorted(point["size"] for point in points)
    assert trials[0]["point"] in points
    shares = importance(study, spec)
    assert max(shares, key=lambda name: shares[name]) == "size" and sum(shares.values()) == pytest.approx(1, abs=1e-3)


def test_a_sweep_that_goes_on_draws_new_points_and_must_be_the_same(tmp_path: Path) -> None:
    spec = SweepConfig(options=OPTIONS, search="random")
    one = point_of(open_study(spec, tmp_path, {"train": {"seed": 1}}).ask(), spec)
    more = spec.model_copy(update={"trials": 99, "parallel": 4})
    two = point_of(open_study(more, tmp_path, {"train": {"seed": 1}}).ask(), spec)
    assert one != two
    with pytest.raises(ConfigError, match="was begun with another config"):
        open_study(spec, tmp_path, {"train": {"seed": 2}})
    with pytest.raises(ConfigError, match="was begun with another mode"):
        open_study(SweepConfig(options=OPTIONS, search="random", mode="min"), tmp_path, {"train": {"seed": 1}})
