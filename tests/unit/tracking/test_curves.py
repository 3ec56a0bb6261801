"""The curves of a report: grouped, thinned without losing extremes, and the goals of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.tracking.support import make_run, report, series


def test_charts_are_grouped_and_ordered(tmp_path: Path) -> None:
    names = [
        *("grad_norm", "learning_rate", "time/generate", "values/mean", "policy/clip_fraction", "policy/ratio"),
        *("losses/policy_loss", "losses/total_loss", "policy/entropy", "policy/approx_kl", "policy/kl_per_token"),
        *("policy/kl_coef", "policy/sqrt_kl", "metrics/optimality", "reward/std", "rollout/score_mean"),
        *("reward/mean@temperature=1.0", "reward/mean@temperature=0.7", "generation/length", "values/clip_fraction"),
    ]
    page = report(make_run(tmp_path / "run", [{"step": 1, **dict.fromkeys(names, 0.5)}]))
    found = {group["title"]: [chart["title"] for chart in group["charts"]] for group in page.data["groups"]}
    assert list(found.items()) == [
        ("Reward and metrics", ["reward/mean", "metrics/optimality", "reward/std"]),
        (
            "KL and entropy",
            ["policy/kl_per_token", "policy/approx_kl", "policy/entropy", "policy/kl_coef", "policy/sqrt_kl"],
        ),
        (
            "Losses and clipping",
            ["losses/total_loss", "losses/policy_loss", "policy/clip_fraction", "policy/ratio", "values/clip_fraction"],
        ),
        ("Values", ["values/mean"]),
        ("Rollouts", ["rollout/score_mean", "generation/length"]),
        ("Time", ["seconds per step, by phase"]),
        ("Everything else", ["grad_norm", "learning_rate"]),
    ]
    assert [group["title"] for group in page.data["groups"] if group["folded"]] == ["Everything else"]
    sweep = page.data["groups"][0]["charts"][0]["series"]
    assert [one["label"] for one in sweep] == ["temperature=0.7", "temperature=1.0"]


def test_what_belongs_together_shares_a_chart(tmp_path: Path) -> None:
    names = [
        *("rollout/length_mean", "rollout/kept/length_mean", "rollout/kept/fraction"),
        *("rewards/margins", "eval/rewards/margins", "eval/other", "perplexity", "pool/responses"),
    ]
    page = report(make_run(tmp_path / "run", [{"step": 1, **dict.fromkeys(names, 0.5)}]))
    found = {
        (group["title"], chart["title"]): [one["label"] for one in chart["series"]]
        for group in page.data["groups"]
        for chart in group["charts"]
    }
    assert found == {
        ("Reward and metrics", "rewards/margins"): ["rewards/margins", "held out"],
        ("Losses and clipping", "perplexity"): ["perplexity"],
        ("Rollouts", "pool/responses"): ["pool/responses"],
        ("Rollouts", "rollout/kept/fraction"): ["rollout/kept/fraction"],
        ("Rollouts", "rollout/length_mean"): ["rollout/length_mean", "kept"],
        ("Everything else", "eval/other"): ["eval/other"],
    }


def test_goals_fall_back(tmp_path: Path) -> None:
    def goals(**metrics: float) -> list[tuple[str, bool]]:
        page = report(make_run(tmp_path / "run", [{"step": 1, **metrics}]))
        return [(goal["name"], goal["lower"]) for goal in page.data["goals"]]

    losses = {"losses/total_loss": 1.0}
    assert goals(**losses) == [("losses/total_loss", True)]
    assert goals(**losses, **{"rollout/score_mean": 1.0}) == [("rollout/score_mean", False)]
    assert goals(**losses, **{"rewards/accuracies": 1.0}) == [("rewards/accuracies", False)]
    assert goals(**losses, **{"metrics/x": 1.0}) == [("metrics/x", False)]
    sweep = {"reward/mean@t=1": 0.5, "reward/mean@t=2": 0.75, "metrics/x": 1.0}
    assert goals(**sweep) == [("reward/mean@t=2", False), ("metrics/x", False)]


def test_long_run_stays_small_and_keeps_its_extremes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [])
    names = [f"losses/{number}" for number in range(4)]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(50_000):
            row = dict.fromkeys(names, step * 7919 % 1000 / 1000)
            row["losses/0"] = {31_234: 50.0, 31_235: -50.0}.get(step, row["losses/0"])
            file.write(json.dumps({"step": step, **row}) + "\n")
    with (run / "samples.jsonl").open("w") as file:
        for step in range(0, 50_000, 250):
            for number in range(32):
                file.write(json.dumps({"step": step, "table": "samples", "output": f"{number} " * 200}) + "\n")
    page = report(run)
    assert len(page.text) < 3_000_000
    spiked = series(page)["losses/0"]
    assert (spiked["max"], spiked["min"]) == ({"step": 31_234, "value": 50.0}, {"step": 31_235, "value": -50.0})
    assert 50.0 in spiked["values"] and -50.0 in spiked["values"]
    assert (spiked["steps"][0], spiked["steps"][-1], spiked["count"]) == (0, 49_999, 50_000)
    assert all(len(one["values"]) <= 602 for one in series(page).values())
    assert all(abs(mean - 0.4995) < 0.05 for mean in series(page)["losses/1"]["means"])
    [table] = page.data["tables"]
    kept = [one["step"] for one in table["steps"]]
    assert (kept[0], kept[-1], table["evaluations"]) == (0, 49_750, 200)
    assert 10 < len(kept) < 200 and all(len(one["rows"]) == one["total"] == 32 for one in table["steps"])


def test_reward_against_kl(tmp_path: Path) -> None:
    def points(*rows: dict[str, Any]) -> Any:
        return report(make_run(tmp_path / "run", [{"step": step, **row} for step, row in enumerate(rows)])).data[
            "frontier"
        ]

    kl, score = "policy/kl", "rollout/score_mean"
    # Step 1 has a KL only and step 2 none that is a number, so they have no place.
    rounds: list[dict[str, Any]] = [
        {kl: 0.0, score: 1.0},
        {kl: 0.25},
        {kl: "NaN", score: 1.5},
        {score: 2.0, kl: 0.5, "losses/kl": 9.0},
    ]
    found = {"kl": kl, "reward": score, "steps": [0, 3], "x": [0.0, 0.5], "y": [1.0, 2.0]}
    assert points(*rounds) == found
    assert points(*rounds[:3]) is None
    assert points({score: 1.0}, {score: 2.0}) is None
    evaluated = points(*({"losses/kl": 0.1 * step, "reward/mean": 2.0 * step} for step in range(3)))
    assert (evaluated["kl"], evaluated["reward"], evaluated["y"]) == ("losses/kl", "reward/mean", [0.0, 2.0, 4.0])
    many = points(*({kl: step / 1000, score: 1.0} for step in range(5000)))
    assert (len(many["steps"]), many["steps"][0], many["steps"][-1]) == (400, 0, 4999)


def test_a_run_of_an_older_version_is_still_read(tmp_path: Path) -> None:
    row = {"step": 1, "rollout/score_mean": 0.5, "rollout/trained_fraction": 0.75, "reward/mean": 0.5}
    found = {chart["title"] for group in report(make_run(tmp_path, [row])).data["groups"] for chart in group["charts"]}
    assert found == set(row) - {"step"}
