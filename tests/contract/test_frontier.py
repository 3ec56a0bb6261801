"""Reward against KL is in the report of every trainer that has both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import make

KL: dict[str, tuple[str, dict[str, Any]]] = {
    "DDPOTrainer": ("losses/kl", {"method.beta": 0.1}),
    "GRPOTrainer": ("policy/kl", {"train.epochs": 3}),
    "OnlineDPOTrainer": ("policy/kl", {}),
    "PPOTrainer": ("policy/kl", {}),
    "RLOOTrainer": ("policy/kl", {"train.epochs": 3}),
}


@pytest.mark.parametrize("name", KL)
def test_the_report_has_reward_against_kl(name: str, tmp_path: Path) -> None:
    kl, changes = KL[name]
    found: dict[str, Any] = dict(changes)
    make(name, tmp_path, **found).learn()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["frontier"]
    assert (data["kl"], data["reward"]) == (kl, "rollout/score_mean")
    assert len(data["steps"]) >= 2
    assert data["x"][0] == pytest.approx(0, abs=1e-5)  # the first round is made by the reference itself
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = {row["step"]: (row[kl], row["rollout/score_mean"]) for row in rows if "rollout/score_mean" in row}
    for step, *point in zip(data["steps"], data["x"], data["y"], strict=True):
        assert point == pytest.approx(logged[step], rel=1e-5)
