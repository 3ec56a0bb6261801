"""The samples of the report in a browser: groups that stand together, filtered and sorted."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tracking.support import make_run
from tests.unit.tracking.test_report import CHROMIUM
from trlx_like.tracking import write_report

# What a user does, and what is seen then.
USER = """
  const said = [];
  const all = (what) => [...document.querySelectorAll(what)];
  const type = (text) => { byId("filter").value = text; byId("filter").dispatchEvent(new Event("input")); note(); };
  const click = (name) => { all("#rows th button").find((one) => one.textContent === name).click(); note(); };
  const choose = (table) => { byId("table").value = table; byId("table").dispatchEvent(new Event("change")); note(); };
  const note = () => {
    const outputs = all("#rows tbody tr").map((row) => /o[0-9]{3}/.exec(row.textContent)[0]);
    said.push(`${outputs.join(" ")} (${byId("count").textContent})`);
  };
  said.push(all("#table option").map((option) => option.textContent).join(", "));
  choose(1);
  said.push(all("#rows td[rowspan]").map((cell) => `${cell.textContent}x${cell.rowSpan}`).join(" "));
  said.push(`${all("#rows .bar.minus").length} ${all(".tag.warn").length}`);
  type("o20");
  type("reward >= 0.5");
  type("finish reason: len");
  type("advantage < 0");
  type("prompt = P1");
  type("");
  click("advantage");
  click("advantage");
  byId("every").click();
  type("reward/brief > 0.25");
  document.body.replaceChildren(...said.map((line) => el("p", "", line)));
"""


def grouped_run(directory: Path) -> Path:
    """Two rounds of two groups of three, of which one response is left out of each."""
    samples: list[dict[str, Any]] = [{"step": 0, "table": "samples", "prompt": "p0", "output": "before", "reward": 0.0}]
    for step in (1, 2):
        for number in range(6):
            group, place = divmod(number, 3)
            texts = {"group": group, "prompt": f"p{group}", "output": f"o{step}{group}{place}"}
            parts = {"reward": place / 2, "reward/brief": 0.25 * place, "advantage": [-0.5, 0.5, None][place]}
            ends = {"length": 3 * number, "finish_reason": ["eos", "length", "stop"][place]}
            samples.append({"step": step, "table": "training", **texts, **parts, **ends})
    return make_run(directory, [], samples)


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
def test_groups_stand_together_and_rows_can_be_chosen_and_sorted(tmp_path: Path) -> None:
    """What a user does is done by a script, on a copy of the page without its policy."""
    page = write_report(grouped_run(tmp_path / "run")).read_text(encoding="utf-8")
    page = re.sub(r"<meta http-equiv=[^>]*>", "", page)
    copy = tmp_path / "copy.html"
    copy.write_text(page.replace("</body>", f"<script>{USER}</script></body>"), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    arguments = [*command, "--virtual-time-budget=2000", "--dump-dom", copy.as_uri()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    assert re.findall(r"<p>(.*?)</p>", done.stdout) == [
        "Evaluations, Training rounds",
        "o200 o201 o202 o210 o211 o212 (6 rows)",
        "0x3 p0x3 1x3 p1x3",
        "2 2",
        "o200 o201 o202 (3 of 6 rows)",
        "o201 o202 o211 o212 (4 of 6 rows)",
        "o201 o211 (2 of 6 rows)",
        "o200 o210 (2 of 6 rows)",
        "o210 o211 o212 (3 of 6 rows)",
        "o200 o201 o202 o210 o211 o212 (6 rows)",
        "o201 o211 o200 o210 o202 o212 (6 rows)",
        "o200 o210 o201 o211 o202 o212 (6 rows)",
        "o102 o112 o202 o212 (4 of 12 rows)",
    ]
