"""How narrow presets are: what is tried, what counts as lost, and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import first_try, sensitivity
from benchmarks.sensitivity import OPTIONS, Result, axes, picture, runs, table
from trlx_like import TRLConfig
from trlx_like.presets import PRESETS


def results(trainer: str) -> list[Result]:
    """Return results in which only the smaller learning rate loses more than .05."""
    rows = []
    for key in runs("letters", trainer, 12.0):
        end = 0.5 if key[-1] != {"optimizer.kwargs.lr": 0.001} else 0.44
        rows.append({"run": key, "task": "letters", "start": 0.2, "end": end, "end_error": 0.02})
    return rows


def test_the_values_of_each_axis() -> None:
    """The preset's rate is 3e-3 here, the largest of the rule; GRPO's preset has no KL."""
    rate, size, weight = axes("ppo").values()
    assert rate == [(0.001, {"optimizer.kwargs.lr": 0.001}), (0.003, {}), (0.009, {"optimizer.kwargs.lr": 0.009})]
    assert [value for value, _ in size] == [64, 128, 256] and [value for value, _ in weight] == [1e-4, 1e-3, 1e-2]
    assert list(axes("grpo")) == ["learning rate", "round size"]


@pytest.mark.parametrize("trainer", OPTIONS)
def test_presets_accept_what_is_tried(trainer: str) -> None:
    made = list(runs("letters", trainer, 12.0))
    for *_, changes in made:
        TRLConfig.update(PRESETS[trainer]().to_dict(), changes)
    assert len({json.dumps(key) for key in made}) == len(made) == 3 + 2 * len(OPTIONS[trainer])


def test_a_score_more_than_a_twentieth_below_the_best_is_bold() -> None:
    line = table(results("grpo"), "grpo").splitlines()[2]
    assert line == "| letters | 0.200 | 0.500, 0.500, 0.500 | **0.440**, 0.500, 0.500 | 0.500, 0.500, 0.500 |"


def test_what_was_not_run_is_left_out() -> None:
    made = [row for row in results("grpo") if "method.num_prompts" not in row["run"][-1]]
    assert table(made, "grpo").splitlines()[2].endswith(" | **0.440**, 0.500, 0.500 |  |")
    drawn = ElementTree.fromstring(picture(made, "grpo"))
    assert sum(one.tag.endswith("polyline") for one in drawn) == 1


def test_the_picture_has_a_panel_for_each_option_and_a_ring_for_each_further_seed() -> None:
    drawn = ElementTree.fromstring(picture(results("grpo"), "grpo"))
    circles = [one for one in drawn if one.tag.endswith("circle")]
    assert sum(one.get("fill") == "white" for one in circles) == 2 * 2
    assert len(circles) == 2 * (3 + 2)
    assert [one.text for one in drawn if one.text in axes("grpo")] == ["learning rate", "round size"]


def test_runs_that_are_known_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in results("rft")))
    monkeypatch.setattr(first_try, "done", None)
    options = ["--tasks", "letters", "--trainers", "rft", "--results", str(file), "--pictures", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["sensitivity", *options])
    sensitivity.main()
    assert (tmp_path / "sensitivity_rft.svg").read_text() == picture(results("rft"), "rft")
