"""The runs that trackers of the tests write, read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from trlx_like.tracking import RunInfo
from trlx_like.tracking.jsonl import JsonlTracker
from trlx_like.tracking.report import write_report


def run_info(directory: Path, **values: Any) -> RunInfo:
    return RunInfo(directory, {"train": {"seed": 1}}, project="tests", total_steps=10, **values)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_time(path: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "time/elapsed"} for row in rows(path)]


def write_run(directory: Path, steps: int) -> None:
    tracker = JsonlTracker(run_info(directory))
    for step in range(1, steps + 1):
        tracker.log({"loss": step / 4}, step)
        tracker.log_table("samples", ["output"], [[f"a{step}"], [f"b{step}"]], step)
    tracker.close()


def run_python(script: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in an own process: these libraries read their settings once, when they are imported."""
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": root, "HOME": str(directory), **environment}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


CONFIG = """\
train: {trainer: PPOTrainer, total_steps: 10, seed: 7, batch_size: 4, run_name: walks}
model: {model_path: some/model}
method: {name: PPOConfig}
"""


def make_run(directory: Path, metrics: list[dict[str, Any]], samples: list[dict[str, Any]] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.yml").write_text(CONFIG, encoding="utf-8")
    for name, rows in {"metrics.jsonl": metrics, "samples.jsonl": samples or []}.items():
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return directory


class Page(HTMLParser):
    """The tags of a page in order, and the text inside its scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.current = ""
        self.inside: dict[str, list[str]] = {"script": [], "style": [], "pre": [], "title": [], "h1": []}
        self.policy = ""
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))
        self.current = tag
        if tag in self.inside:
            self.inside[tag].append("")
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self.current = ""

    def handle_data(self, data: str) -> None:
        if self.current in self.inside:
            self.inside[self.current][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.inside["script"][0])
        return found


def report(directory: Path) -> Page:
    return Page(write_report(directory))


def series(page: Page) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for group in page.data["groups"] for chart in group["charts"] for one in chart["series"]}
