"""Makes report.html: the run as one page that needs no other file and no network, from the files of the run folder.

The appearance and behaviour of the page are in templates/. Everything that comes from the run enters the page as
escaped text, or as JSON that its script puts into text nodes. A security policy forbids other scripts and requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from trlx_like.errors import DataError, DiskError, writing
from trlx_like.reading import packaged_text
from trlx_like.tracking.audit import findings
from trlx_like.tracking.base import RunInfo, Tracker
from trlx_like.tracking.curves import ELAPSED, Curve, charts, frontier, goals, last, phases, read_curves
from trlx_like.tracking.folder import read_config
from trlx_like.tracking.tables import read_tables
from trlx_like.tracking.values import plain

logger = logging.getLogger(__name__)

FILES = ("report.css", "report.html", "helpers.js", "charts.js", "samples.js", "compare.js", "sweep.js", "page.js")
# Inside a script element these could end it or open a comment.
UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_report(run_dir: Path, unfinished: str = "report.html.tmp") -> Path:
    """Make `report.html` in a run folder from its config.yml, metrics.jsonl and samples.jsonl, as far as they exist.

    Lines that a kill cut short are left out; the page says how many.

    Args:
        run_dir: The run folder.
        unfinished: The name of the page while it is written.

    Returns:
        The path of the page.

    Raises:
        DataError: There is no such folder.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a run folder: there is no such folder.")
    config_text, config = read_config(run_dir)
    curves, torn_metrics = read_curves(run_dir / "metrics.jsonl")
    tables, torn_samples = read_tables(run_dir / "samples.jsonl")
    run = _run_facts(run_dir, config, curves)
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
    return write_page(run_dir / "report.html", "run", run["name"], config_text, data, unfinished)


def _run_facts(run_dir: Path, config: dict[str, Any], curves: dict[str, Curve]) -> dict[str, Any]:
    """Return the facts at the top of the page, as far as the configuration has them."""

    def option(section: str, name: str) -> Any:
        values = config.get(section)
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
        "seconds": last(curves, ELAPSED),
    }


def write_page(
    file: Path, kind: str, name: str, config_text: str, data: dict[str, Any], unfinished: str | None = None
) -> Path:
    """Write a page with charts and tables, as a whole.

    Args:
        file: The page; one that exists is replaced.
        kind: What it shows ("run"), above its title.
        name: Its title.
        config_text: The text under "Configuration".
        data: What its script shows; `page.js` says which keys there are.
        unfinished: The name of the page while it is written, in the same folder; None: that of the file with ".tmp".

    Returns:
        The file.
    """
    # Keys that a page of another kind does without.
    data = {"run": {}, "goals": [], "frontier": None, "phases": [], "audit": None, "tables": [], "torn": {}, **data}
    part = file.with_name(unfinished or f"{file.name}.tmp")
    # Half of a surrogate pair has no UTF-8; as a backslash escape it is good JSON.
    part.write_bytes(_page(kind, name, config_text, data).encode("utf-8", "backslashreplace"))
    os.replace(part, file)
    return file


def _page(kind: str, name: str, config_text: str, data: dict[str, Any]) -> str:
    style, skeleton, *scripts = (packaged_text(f"tracking/templates/{name}") for name in FILES)
    script = "\n".join(scripts)
    parts = {
        "policy": f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'",
        "kind": kind,
        "title": html.escape(name),
        "style": style,
        "script": script,
        "config": html.escape(config_text) or "There is no configuration.",
        "data": json.dumps(plain(data), ensure_ascii=False, separators=(",", ":")).translate(UNSAFE),
    }
    # One pass, so that braces in what is put in are not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], skeleton)


def _digest(text: str) -> str:
    """Return the source of a Content-Security-Policy that allows exactly this text between its tags."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class ReportTracker(Tracker):
    """Write the HTML report when a run ends, also after an error, from the files that the run wrote."""

    def __init__(self, run: RunInfo) -> None:
        self._directory = run.directory

    def close(self) -> None:
        try:
            with writing(self._directory / "report.html"):
                logger.info("Report: %s", write_report(self._directory))
        except DiskError as error:  # it can be made again; another error may be on its way
            logger.warning("%s", error)
