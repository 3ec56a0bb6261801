"""The report: what it makes of a run folder, how large it gets, and that nothing in a run can act on the page."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.unit.cli_support import said
from tests.unit.tracking.support import Page, make_run, report, series
from trlx_like import records
from trlx_like.checkpoint.claim import RunFiles
from trlx_like.errors import DataError
from trlx_like.tracking.report import write_report


def test_summaries(tmp_path: Path) -> None:
    metrics: list[dict[str, Any]] = [
        {"step": 0, "reward/mean": 0.25, "time/elapsed": 1.0},
        {"step": 2, "reward/mean": 0.75, "losses/total_loss": 4.0, "time/generate": 2.0, "time/forward": 3.0},
        {"step": 1, "reward/mean": 0.125},
        {"step": 3, "reward/mean": "NaN", "losses/total_loss": None, "time/forward": 1.5, "time/elapsed": 10.0},
        {"step": 4, "reward/mean": 0.5, "losses/total_loss": "Infinity", "name": "text"},
    ]
    page = report(make_run(tmp_path / "run", metrics))
    reward = series(page)["reward/mean"]
    assert (reward["steps"], reward["values"]) == ([0, 1, 2, 3, 4], [0.25, 0.125, 0.75, None, 0.5])
    assert (reward["count"], reward["bad"], series(page)["losses/total_loss"]["bad"]) == (5, 1, 2)
    assert page.data["goals"] == [
        {
            "name": "reward/mean",
            "lower": False,
            "first": {"step": 0, "value": 0.25},
            "last": {"step": 4, "value": 0.5},
            "min": {"step": 1, "value": 0.125},
            "max": {"step": 2, "value": 0.75},
        }
    ]
    assert page.data["phases"] == [
        {"name": "forward", "seconds": 4.5},
        {"name": "generate", "seconds": 2.0},
        {"name": "other", "seconds": 3.5},
    ]
    assert page.data["run"] == {
        **{"name": "walks", "trainer": "PPOTrainer", "model": "some/model", "method": "PPOConfig", "seed": 7},
        **{"batch_size": 4, "total_steps": 10, "last_step": 4, "seconds": 10.0},
    }


HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<!--<script>",
    "<img src=x onerror='window.hacked = 1'>",
    "]]> &lt;/script&gt; \u2028 \\u003c/script>",
    "{{config}} {{data}} \x00",
    '" onmouseover="window.hacked = 1',
]


def test_pictures_of_the_run_are_in_the_page(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "secret.png"
    names = ["images/small.png", "images/large.png", "images/gone.png", "../secret.png", str(outside)]
    samples = [{"step": 1, "table": "samples", "prompt": "images/small.png", "image": name} for name in names]
    make_run(run, [], samples)
    (run / "images").mkdir()
    Image.new("RGB", (8, 8), "red").save(run / "images" / "small.png")
    noise = np.random.default_rng(0).integers(0, 256, (300, 150, 3), dtype=np.uint8)
    Image.fromarray(noise).save(run / "images" / "large.png")
    Image.new("RGB", (8, 8), "blue").save(outside)
    [table] = report(run).data["tables"]
    assert table["columns"] == ["prompt", "image"]
    rows = table["steps"][0]["rows"]
    assert [row[0] for row in rows] == ["images/small.png"] * 5
    small, large = (Image.open(io.BytesIO(base64.b64decode(row[1].partition("base64,")[2]))) for row in rows[:2])
    assert (small.size, small.getpixel((3, 3)), large.size) == ((8, 8), (255, 0, 0), (64, 128))
    assert [row[1] for row in rows[2:]] == names[2:]


def hostile_run(directory: Path) -> Path:
    metrics = [{"step": 1, **{f"metrics/{text}": 0.5 for text in HOSTILE}, "reward/mean": 0.5, HOSTILE[0]: 1.0}]
    samples = [{"step": 1, "table": text, "prompt": text, text: text} for text in HOSTILE]
    run = make_run(directory, metrics, samples)
    train = {"run_name": HOSTILE[0], "trainer": HOSTILE[2]}
    model = {"model_path": HOSTILE[0] + HOSTILE[1]}
    config = json.dumps({"train": train, "model": model, "method": {"name": HOSTILE[5]}})
    (run / "config.yml").write_text(config + "\n# " + "".join(HOSTILE[:3]), encoding="utf-8")
    return run


def test_nothing_in_a_run_becomes_markup(tmp_path: Path) -> None:
    harmless = report(make_run(tmp_path / "a", [{"step": 1, "reward/mean": 0.5}]))
    page = report(hostile_run(tmp_path / "b"))
    assert page.tags == harmless.tags
    assert page.inside["title"] == [HOSTILE[0]] and page.inside["h1"] == [HOSTILE[0]]
    assert HOSTILE[2] in page.inside["pre"][0]
    assert [row[0] for table in page.data["tables"] for one in table["steps"] for row in one["rows"]] == HOSTILE
    assert page.text.count("<script") == page.text.count("</script") == 2
    assert page.inside["script"][1] == harmless.inside["script"][1]


def test_the_page_runs_only_its_own_script_and_loads_nothing(tmp_path: Path) -> None:
    page = report(hostile_run(tmp_path / "run"))

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    policy = dict(part.strip().split(" ", 1) for part in page.policy.split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == digest(page.inside["script"][1])
    assert policy["style-src"] == digest(page.inside["style"][0])
    ours = page.inside["script"][1] + page.inside["style"][0]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|@import|url\(", ours)
    assert set(re.findall(r"https?://[^\s\"']+", ours)) == {"http://www.w3.org/2000/svg"}


def test_empty_torn_and_missing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    page = report(run)
    assert page.data["groups"] == page.data["tables"] == page.data["goals"] == []
    assert page.inside["h1"] == ["run"]
    (run / "config.yml").write_text("train: [unclosed")
    (run / "metrics.jsonl").write_bytes(b'{"step": 1, "a": 1}\n\x00\xff\n[1]\n{"a": 2}\n{"step": 2, "a"')
    (run / "samples.jsonl").write_bytes(b'{"step": 1, "table": "t", "x": "y"}\n{"st')
    page = report(run)
    assert page.data["torn"] == {"metrics.jsonl": 4, "samples.jsonl": 1}
    assert series(page)["a"]["values"] == [1.0] and page.data["tables"][0]["steps"][0]["rows"] == [["y"]]
    assert page.inside["pre"] == ["train: [unclosed"]
    with pytest.raises(DataError, match="is not a run folder"):
        write_report(tmp_path / "nowhere")


def test_it_is_written_again_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "POLL", 0.01)
    run, page = tmp_path / "run", tmp_path / "run" / "report.html"
    held = RunFiles(run)
    held.open()
    held.claim(["report.html", records.UNFINISHED])

    def train() -> None:
        with (run / "metrics.jsonl").open("a") as file:
            for step in (1, 2, 3):
                print(json.dumps({"step": step, f"metrics/at{step}": step}), file=file, flush=True)
                # The last line is followed by the end of the run at once.
                while step < 3 and not (page.exists() and f"metrics/at{step}" in page.read_text()):
                    time.sleep(0.01)
        held.close()

    training = threading.Thread(target=train)
    training.start()
    assert said(0, "report", "--watch", run) == f"{page}\n"
    training.join()
    assert not held.in_use() and "metrics/at3" in page.read_text()
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "report.html", "run_files.jsonl"]
    assert said(0, "report", "--watch", run) == f"{page}\n"  # nothing goes on: it is written once


def test_watching_ends_with_an_interrupt(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}])
    held = RunFiles(run)
    held.open()
    held.claim(["report.html", records.UNFINISHED])

    def interrupt() -> None:
        while not (run / "report.html").exists():
            time.sleep(0.01)
        time.sleep(0.3)  # until it waits
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt, daemon=True)
    waiting.start()
    assert said(130, "report", "--watch", run) == ""
    waiting.join()
    held.close()
    assert series(Page(run / "report.html")) and not (run / records.UNFINISHED).exists()
