"""The page that compares runs: medians and bands by hand, differences, samples side by side, no markup of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.cli_support import said
from tests.unit.tracking.support import Page, make_run, rows
from tests.unit.tracking.test_report import HOSTILE, hostile_run
from trlx_like.errors import DataError
from trlx_like.tracking.compare import write_comparison


def made(folder: Path, lr: float, seed: int, rewards: list[Any], samples: list[dict[str, Any]] | None = None) -> Path:
    metrics = [{"step": 2 * at, "reward/mean": value} for at, value in enumerate(rewards)]
    run = make_run(folder, metrics, samples)
    config = {
        "train": {"seed": seed, "checkpoint_dir": str(folder), "trainer": "PPOTrainer"},
        "optimizer": {"kwargs": {"lr": lr}},
    }
    (run / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    return run


def compared(folder: Path, *runs: Path) -> Page:
    return Page(write_comparison(runs, folder / "page.html"))


def test_runs_that_differ_in_the_seed_are_a_median_in_a_band(tmp_path: Path) -> None:
    rewards: list[list[Any]] = [[0, 1], [2, "NaN"], [4, 9, 5]]
    high = [made(tmp_path / f"high{seed}", 0.1, seed, values) for seed, values in enumerate(rewards)]
    low = made(tmp_path / "low", 0.01, 0, [0.25, 0.125, 0.5])
    page = compared(tmp_path, *high, low)
    assert page.data["compared"] == {
        "groups": [
            {"label": "lr=0.1", "runs": ["high0", "high1", "high2"]},
            {"label": "lr=0.01", "runs": ["low"]},
        ],
        # The last values of the three are 1, 2 (before the NaN) and 5.
        "results": [
            {
                "name": "reward/mean",
                "cells": [{"value": 2.0, "low": 1.0, "high": 5.0}, {"value": 0.5, "low": 0.5, "high": 0.5}],
            }
        ],
        "options": [
            {"name": "train.seed", "cells": ["0, 1, 2", "0"]},
            {"name": "optimizer.kwargs.lr", "cells": ["0.1", "0.01"]},
        ],
    }
    [[chart]] = [group["charts"] for group in page.data["groups"]]
    band, line = chart["series"]
    # Step 0: 0, 2, 4. Step 2: 1 and 9, without the NaN. Step 4: 5 alone.
    assert (band["steps"], band["values"]) == ([0, 2, 4], [2, 5, 5])
    assert (band["low"], band["high"], band["bad"]) == ([0, 1, 5], [4, 9, 5], 1)
    assert (band["min"], band["max"]) == ({"step": 0, "value": 0}, {"step": 2, "value": 9})
    recorded = rows(low / "metrics.jsonl")
    assert line["steps"] == [row["step"] for row in recorded] and "low" not in line
    assert line["values"] == [row["reward/mean"] for row in recorded]
    assert yaml.safe_load(page.inside["pre"][0]) == {"train.trainer": "PPOTrainer"}


def test_runs_of_one_configuration_have_columns_of_their_own(tmp_path: Path) -> None:
    def evaluation(step: int, word: str, *prompts: str) -> list[dict[str, Any]]:
        table = {"step": step, "table": "samples"}
        return [{**table, "prompt": prompt, "output": f"{word}{n}", "reward": n} for n, prompt in enumerate(prompts)]

    one = made(tmp_path / "one", 0.1, 1, [1], [*evaluation(0, "a", "p", "q", "p"), *evaluation(5, "x", "p")])
    two = made(tmp_path / "two", 0.1, 2, [1], evaluation(0, "b", "p", "p"))
    page = compared(tmp_path, one, two, two)
    assert page.data["compared"]["groups"] == [{"label": "2 seeds", "runs": ["one", "two"]}]
    [table] = page.data["tables"]
    assert table["columns"] == ["prompt", "one/output", "one/reward", "two/output", "two/reward"]
    assert table["steps"] == [
        {"step": 0, "total": 3, "rows": [["p", "a0", 0, "b0", 0], ["q", "a1", 1, None, None], ["p", "a2", 2, "b1", 1]]}
    ]


def test_nothing_in_the_runs_becomes_markup(tmp_path: Path) -> None:
    harmless = compared(tmp_path, made(tmp_path / "a", 0.1, 1, [1]), made(tmp_path / "b", 0.2, 1, [1]))
    worse = hostile_run(tmp_path / "worse")
    (worse / "config.yml").write_text(json.dumps({"method": {HOSTILE[2]: HOSTILE[0]}, "train": {"seed": HOSTILE[1]}}))
    page = compared(tmp_path, hostile_run(tmp_path / "bad"), worse)
    assert page.tags == harmless.tags
    assert page.text.count("<script") == page.text.count("</script") == 2
    assert {"name": f"method.{HOSTILE[2]}", "cells": [None, HOSTILE[0]]} in page.data["compared"]["options"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "a", 0.1, 1, [1])
    assert [said(0, "compare", "a", "a") for _ in range(2)] == ["comparison.html\n"] * 2
    (tmp_path / "mine.html").write_text("<html>")
    assert "mine.html is not a page of trlx_like" in said(2, "compare", "a", "--to", "mine.html")
    assert (tmp_path / "mine.html").read_text() == "<html>"
    with pytest.raises(DataError, match=r"none is not a run folder: it has no metrics\.jsonl"):
        write_comparison([tmp_path / "none"], tmp_path / "page.html")
