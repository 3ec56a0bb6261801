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
        end = 0.5 if key[-1] != {"optimizer.kwargs.lr": 0.000438} else 0.44
        rows.append({"run": key, "task": "letters", "start": 0.2, "end": end, "end_error": 0.02})
    return rows


def test_the_values_of_each_axis() -> None:
    """The preset's rate is 1.31e-3 here, and RFT has 8 responses to each of 64 prompts, and no KL weight."""
    rate, size, weight = axes("ppo").values()
    low, high = ({"optimizer.kwargs.lr": value} for value in (0.000438, 0.00394))
    assert rate == [(0.000438, low), (0.00131, {}), (0.00394, high)]
    assert [value for value, _ in size] == [64, 128, 256] and [value for value, _ in weight] == [5e-3, 5e-2, 0.5]
    assert list(axes("rft")) == ["learning rate", "round size"]
    assert [value for value, _ in axes("rft")["round size"]] == [4, 8, 16]


@pytest.mark.parametrize("trainer", OPTIONS)
def test_presets_accept_what_is_tried(trainer: str) -> None:
    made = list(runs("letters", trainer, 12.0))
    for *_, changes in made:
        TRLConfig.update(PRESETS[trainer]().to_dict(), changes)
    assert len({json.dumps(key) for key in made}) == len(made) == 3 + 2 * len(OPTIONS[trainer])


def test_a_score_more_than_a_twentieth_below_the_best_is_bold() -> None:
    line = table(results("rft"), "rft").splitlines()[2]
    assert line == "| letters | 0.200 | 0.500, 0.500, 0.500 | **0.440**, 0.500, 0.500 | 0.500, 0.500, 0.500 |"


def test_what_was_not_run_is_left_out() -> None:
    made = [row for row in results("rft") if "method.n_generations_per_prompt" not in row["run"][-1]]
    assert table(made, "rft").splitlines()[2].endswith(" | **0.440**, 0.500, 0.500 |  |")
    drawn = ElementTree.fromstring(picture(made, "rft"))
    assert sum(one.tag.endswith("polyline") for one in drawn) == 1


def test_the_picture_has_a_panel_for_each_option_and_a_ring_for_each_further_seed() -> None:
    drawn = ElementTree.fromstring(picture(results("rft"), "rft"))
    circles = [one for one in drawn if one.tag.endswith("circle")]
    assert sum(one.get("fill") == "white" for one in circles) == 2 * 2
    assert len(circles) == 2 * (3 + 2)
    assert [one.text for one in drawn if one.text in axes("rft")] == ["learning rate", "round size"]


def test_runs_that_are_known_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in results("rft")))
    monkeypatch.setattr(first_try, "done", None)
    options = ["--tasks", "letters", "--trainers", "rft", "--results", str(file), "--pictures", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["sensitivity", *options])
    sensitivity.main()
    assert (tmp_path / "sensitivity_rft.svg").read_text() == picture(results("rft"), "rft")
