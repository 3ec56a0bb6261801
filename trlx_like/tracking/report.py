"""report.html: the run as one page that needs nothing else, made from what the run folder holds.

The page's looks and behaviour are in templates/. All that comes from the run goes into it as escaped text, or as JSON
that scripts put into text nodes; and the page's own security policy runs no script but ours and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from trlx_like.errors import DataError
from trlx_like.tracking.audit import findings
from trlx_like.tracking.base import RunInfo
from trlx_like.tracking.curves import Curve, charts, duration, frontier, goals, phases, read_curves
from trlx_like.tracking.tables import read_tables
from trlx_like.tracking.values import plain

logger = logging.getLogger(__name__)

SCRIPTS = ("helpers.js", "charts.js", "frontier.js", "samples.js", "page.js")
# Inside a script element these could end it or open a comment.
UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_report(run_dir: Path) -> Path:
    """Makes `report.html` from config.yml, metrics.jsonl and samples.jsonl in the folder, those that there are.

    Lines that a kill cut short are left out and counted. Returns the page's path. DataError if there is no such folder.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a run folder: there is no such folder.")
    config_file = run_dir / "config.yml"
    config_text = config_file.read_text(encoding="utf-8", errors="replace") if config_file.is_file() else ""
    curves, torn_metrics = read_curves(run_dir / "metrics.jsonl")
    tables, torn_samples = read_tables(run_dir / "samples.jsonl")
    run = _run_facts(run_dir, config_text, curves)
    torn = {"metrics.jsonl": torn_metrics, "samples.jsonl": torn_samples}
    data = {
        "run": run,
        "goals": goals(curves),
        "groups": charts(curves),
        "frontier": frontier(curves),
        "phases": phases(curves),
        "audit": findings(run_dir),
        "tables": tables,
        "torn": {name: count for name, count in torn.items() if count},
    }
    page = _page(run["name"], config_text, data)
    report = run_dir / "report.html"
    unfinished = run_dir / "report.html.tmp"
    # Half of a surrogate pair has no UTF-8; as a backslash escape it is good JSON.
    unfinished.write_bytes(page.encode("utf-8", "backslashreplace"))
    os.replace(unfinished, report)
    return report


def _run_facts(run_dir: Path, config_text: str, curves: dict[str, Curve]) -> dict[str, Any]:
    """What the top of the page says, as far as the configuration can be read."""
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError:
        config = None
    sections = config if isinstance(config, dict) else {}

    def option(section: str, name: str) -> Any:
        values = sections.get(section)
        return plain(values.get(name)) if isinstance(values, dict) else None

    steps = [max(curve.steps) for curve in curves.values()]
    return {
        "name": str(option("train", "run_name") or run_dir.resolve().name),
        "trainer": option("train", "trainer"),
        "model": option("model", "model_path"),
        "method": option("method", "name"),
        "seed": option("train", "seed"),
        "batch_size": option("train", "batch_size"),
        "total_steps": option("train", "total_steps"),
        "last_step": max(steps, default=None),
        "seconds": duration(curves),
    }


def _page(name: str, config_text: str, data: dict[str, Any]) -> str:
    templates = files("trlx_like.tracking") / "templates"
    style = (templates / "report.css").read_text(encoding="utf-8")
    script = "\n".join((templates / name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "policy": f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'",
        "title": html.escape(name),
        "style": style,
        "script": script,
        "config": html.escape(config_text) or "There is no config.yml in this folder.",
        "data": json.dumps(plain(data), ensure_ascii=False, separators=(",", ":")).translate(UNSAFE),
    }
    skeleton = (templates / "report.html").read_text(encoding="utf-8")
    # In one pass: what is put in is never looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], skeleton)


def _digest(text: str) -> str:
    """The source of a Content-Security-Policy that allows exactly this text between its tags."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class ReportTracker:
    """Writes the page when a run ends, however it ends."""

    def __init__(self, run: RunInfo) -> None:
        self._directory = run.directory

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics are read from metrics.jsonl."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Tables are read from samples.jsonl."""

    def close(self) -> None:
        logger.info("Report: %s", write_report(self._directory))
