"""The page in a browser: what its script draws of real and of made-up runs, and what it does when it is used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.contract.recipes import make
from tests.unit.tracking.browser import Tab, needs_chromium, open_browser
from tests.unit.tracking.support import Page, make_run, rows
from tests.unit.tracking.test_report import HOSTILE, hostile_run
from trlx_like.tracking.compare import write_comparison
from trlx_like.tracking.report import write_report
from trlx_like.tracking.signals import SIGNALS

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def used(tab: Tab, page: Path, script: str) -> Any:
    """What a user's script sees in a page."""
    tab.open(page)
    return tab.run(script)


def test_a_browser_draws_pictures_and_reward_against_kl(tab: Tab, tmp_path: Path) -> None:
    run = tmp_path / "run"
    texts = ["a red one", "<b>bold</b>", "no picture"]
    samples = [
        {"step": 1, "table": "samples", "prompt": text, "metrics/bytes": 470.0 + row, "image": f"images/{row}.png"}
        for row, text in enumerate(texts)
    ]
    metrics = [{"step": step, "losses/kl": 0.1 * step, "rollout/score_mean": 0.5 + step} for step in (1, 2, 3)]
    make_run(run, metrics, samples)
    (run / "images").mkdir()
    for row, color in enumerate(("red", "blue")):
        Image.new("RGB", (8, 8), color).save(run / "images" / f"{row}.png")
    tab.open(write_report(run))
    page = tab.html
    figures = re.findall(r"<figure>(.*?)</figure>", page)
    assert [figure.count('<img src="data:image/png;base64,') for figure in figures] == [1, 1, 0]
    assert [re.findall(r"<p>(.*?)</p>", figure) for figure in figures] == [
        [text] for text in (texts[0], "&lt;b&gt;bold&lt;/b&gt;", texts[2])
    ]
    assert "<span>bytes </span>471" in figures[1]
    (card,) = re.findall(r'<svg class="chart frontier c0".*?</svg>', page)
    assert "<title>reward 3.5 at a KL of 0.3</title>" in card
    assert re.findall(r'fill-opacity="([\d.]+)"', card) == ["0.15", "0.57", "1.00"]
    assert "3.5 at 0.3, step 3<" in page and "up: rollout/score_mean" in page


def test_a_browser_draws_it(tab: Tab, tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "losses/total_loss": step / 100}) + "\n" for step in range(1, 100))
    tab.open(write_report(run))
    page = tab.html
    assert page.count('class="card') == len(HOSTILE) + 3 and 'class="tile"' in page
    assert 'class="raw"' in page and "<circle" in page
    assert "1 row<" in page and page.count("<option") == len(HOSTILE)
    assert page.count("<script") == 2
    (tmp_path / "drawn.html").write_text(page, encoding="utf-8")
    tags = Page(tmp_path / "drawn.html").tags
    assert "img" not in {tag for tag, _ in tags}
    assert not [name for _, names in tags for name in names if name.startswith("on")]


def test_a_browser_draws_a_comparison(tab: Tab, tmp_path: Path) -> None:
    runs = [hostile_run(tmp_path / name) for name in ("one", "two", "three")]
    for seed, run in enumerate(runs):
        (run / "config.yml").write_text(json.dumps({"train": {"seed": seed}, "model": {HOSTILE[1]: seed > 1}}))
        (run / "metrics.jsonl").open("a").writelines(f'{{"step": {n}, "reward/mean": {n + seed}}}\n' for n in (2, 3))
    tab.open(write_comparison(runs, tmp_path / "page.html"))
    page = tab.html
    assert page.count('class="band"') == len(HOSTILE) + 2  # each metric of the two that differ in the seed alone
    cells = tab.run("return all('.compared tr').map((row) => all('th, td', row).map((cell) => cell.textContent))")
    assert cells[:3] == [
        ["", f"{HOSTILE[1]}=false", f"{HOSTILE[1]}=true"],
        ["runs", "one, two", "three"],
        ["reward/mean, last", "3.5 (3 to 4)", "5"],
    ]
    assert page.count("<script") == 2 and not tab.run("return window.hacked")


def test_a_browser_draws_a_sweep(tab: Tab, tmp_path: Path) -> None:
    def trial(number: int, state: str, value: float | None, **more: Any) -> dict[str, Any]:
        point = {HOSTILE[1]: HOSTILE[0], "lr": 10.0**-number}
        return {"number": number, "state": state, "value": value, "seeds": 1, "point": point, "error": "", **more}

    trials = [trial(1, "finished", 2.0), trial(2, "stopped early", 0.5), trial(3, "failed", None, error=HOSTILE[2])]
    trials[0] |= {"seeds": 3, "low": 1.0, "high": 4.0}
    shares = {HOSTILE[1]: 0.75, "lr": 0.25}
    sweep = {
        "metric": "reward",
        "log": ["lr"],
        "options": list(shares),
        "trials": trials,
        "importance": shares,
        "drawn": 1,
    }
    run = hostile_run(tmp_path / "run")
    tab.open(write_comparison([run], tmp_path / "page.html", "sweep", name=HOSTILE[2], sweep=sweep))
    lines = tab.run("return all('.coordinates path').map((line) => [line.getAttribute('class'), line.textContent])")
    assert lines == [["early", "trial 2: 0.5"], ["best", "trial 1: 2"]]  # a failed trial has no score to draw
    titles = tab.run("return all('.coordinates text:not(.value)').map((title) => title.textContent)")
    assert titles == ["lr", "reward"]  # an option that is the same in all trials has no axis
    cells = tab.run("return all('#sweep .compared tr').map((row) => all('td', row).map((cell) => cell.textContent))")
    value = json.dumps(HOSTILE[0])
    assert cells[1:] == [
        ["1", "2 (1 to 4)", "3", value, "0.1", "finished"],
        ["2", "0.5", "1", value, "0.01", "stopped early"],
        ["3", "\u2013", "1", value, "0.001", f"failed: {HOSTILE[2]}"],
    ]
    assert tab.run("return all('#sweep .share td.number').map((cell) => cell.textContent)") == ["75 %", "25 %"]
    assert tab.html.count("<script") == 2 and not tab.run("return window.hacked")


# What a user does, and what is seen then.
USER = """
  const said = [];
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
  return said;
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


def test_groups_stand_together_and_rows_can_be_chosen_and_sorted(tab: Tab, tmp_path: Path) -> None:
    assert used(tab, write_report(grouped_run(tmp_path / "run")), USER) == [
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


# A run of a real trainer.


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO with a reference for 48 steps of 12 rounds: every kind of chart, samples, and an audit."""
    run = tmp_path_factory.mktemp("grpo")
    make("GRPOTrainer", run, **{"train.epochs": 12, "train.eval_interval": 12, "train.log_samples_interval": 8}).learn()
    return run


def logged(run: Path, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in rows(run / "metrics.jsonl") if name in row}


def test_the_page_of_a_real_run(tab: Tab, real_run: Path) -> None:
    """What it shows is what the files of the run say."""
    tab.open(real_run / "report.html")
    page, data = tab.html, Page(real_run / "report.html").data
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert (facts["trainer"], facts["method"]) == ("GRPOTrainer", "GRPOConfig")
    charts = [chart for group in data["groups"] for chart in group["charts"]]
    assert page.count('<svg class="chart"') == len(charts)
    assert page.count('class="card') == len(charts) + 2, "reward against KL, and the phases"
    named = re.findall(r"<th>(.*?)</th>", page)
    assert [name for name in named if name in SIGNALS] == list(SIGNALS) and "in 12 rounds" in page
    # The dots of the evaluations: their places are linear in their steps and values, and higher is up.
    (chart,) = re.findall(r'<svg class="chart" role="img"><title>reward/mean, .*?</svg>', page)
    dots = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="3"', chart)]
    rewards = logged(real_run, "reward/mean")
    assert len(dots) == len(rewards) == 5
    for numbers, places in zip(zip(*rewards.items(), strict=True), zip(*dots, strict=True), strict=True):
        slope, _ = np.polyfit(numbers, places, 1)
        assert slope * (1 if numbers == tuple(rewards) else -1) > 0
        assert np.corrcoef(numbers, places)[0, 1] ** 2 == pytest.approx(1, abs=1e-6)
    (points,) = re.findall(r'<svg class="chart frontier c0".*?</svg>', page)
    assert points.count("<circle") == len(logged(real_run, "rollout/score_mean")) == 12
    samples = [row for row in rows(real_run / "samples.jsonl") if (row["table"], row["step"]) == ("samples", 48)]
    cells = tab.run("return all('#rows tbody tr').map((row) => all('td', row).map((cell) => cell.textContent))")
    names = data["tables"][0]["columns"]
    assert [row[names.index("output")] for row in cells] == [row["output"] for row in samples]


POINTER = """
  const title = (card) => card.querySelector("h3").textContent;
  const cards = Object.fromEntries(all(".card:has(svg)").map((card) => [title(card), card]));
  const values = () => Object.fromEntries(["losses/total_loss", "rollout/score_mean", "reward against KL"].map(
    (name) => [name, cards[name].querySelector(".head .number").textContent]));
  const steps = () => [...new Set(all("text.at").map((text) => text.textContent))];
  const move = async (name, x, y) => {
    const picture = cards[name].querySelector("svg"), box = picture.getBoundingClientRect();
    picture.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + y }));
    await frame();
  };
  const seen = [[steps(), values()]];
  const loss = cards["losses/total_loss"].querySelector("svg");
  await move("losses/total_loss", 1, 50);
  seen.push([steps(), values()]);
  await move("losses/total_loss", loss.clientWidth - 1, 50);
  seen.push([steps(), values(), all("text.at").every((text) => text.getAttribute("text-anchor") === "end")]);
  const dot = all("circle", cards["reward against KL"])[4];
  await move("reward against KL", Number(dot.getAttribute("cx")) + 1, Number(dot.getAttribute("cy")) - 1);
  seen.push([steps(), values(), all("circle[r='6']", cards["reward against KL"]).length]);
  cards["reward against KL"].querySelector("svg").dispatchEvent(new PointerEvent("pointerleave"));
  await frame();
  seen.push([steps(), values()]);
  return seen;
"""


def test_the_pointer_shows_the_same_step_in_all_charts(tab: Tab, real_run: Path) -> None:
    losses, scores, kl = (logged(real_run, name) for name in ("losses/total_loss", "rollout/score_mean", "policy/kl"))
    starts = list(scores)  # of rounds

    def at(step: int) -> list[float]:
        first = min(starts, key=lambda start: abs(start - step))
        return [losses[step], scores[first], scores[first], kl[first], first]

    def numbers(shown: dict[str, str]) -> list[float]:
        text = " ".join(shown.values()).replace("\u2212", "-")
        return [float(number) for number in re.findall(r"-?\d[\d.e-]*", text)]

    before, first, last, dot, after = used(tab, real_run / "report.html", POINTER)
    assert before == after and before[0] == []
    assert (first[0], last[0], dot[0]) == (["step 1"], ["step 48"], [f"step {starts[4]}"])
    assert last[2] is True and dot[2] == 1
    for found, step in ((before, 48), (first, 1), (last, 48), (dot, starts[4])):
        assert numbers(found[1]) == pytest.approx(at(step), rel=6e-3)


CLICKS = """
  const seen = {};
  const charts = () => [all(".chart:not(.frontier) path.raw").length > 0, all("#smoothing output")[0].textContent];
  const slider = byId("smoothing").querySelector("input");
  seen.smoothed = charts();
  slider.value = 0;
  slider.dispatchEvent(new Event("input"));
  seen.plain = charts();
  const links = Object.fromEntries(all("#links a").map((link) => [link.textContent, link]));
  const folded = (name) => all(`details${links[name].hash}, ${links[name].hash} > details`)[0];
  seen.folded = ["Everything else", "Configuration"].map((name) => {
    const before = folded(name).open;
    links[name].click();
    return [before, folded(name).open];
  });
  const step = () => [byId("at").textContent, byId("earlier").disabled, byId("later").disabled];
  seen.steps = [step()];
  byId("earlier").click();
  seen.steps.push(step());
  byId("step").value = 0;
  byId("step").dispatchEvent(new Event("input"));
  seen.steps.push(step());
  byId("later").click();
  seen.steps.push(step());
  byId("every").click();
  seen.steps.push(step());
  const heads = () => all("#rows th").map((one) => one.getAttribute("aria-sort"));
  all("#rows th button")[0].click();
  seen.sorted = heads()[0];
  all("#rows th button")[0].click();
  seen.turned = heads()[0];
  const text = document.querySelector("#rows td.text div");
  seen.cut = [text.className];
  text.click();
  seen.cut.push(text.className);
  byId("full").click();
  seen.cut.push([...new Set(all("#rows td.text div").map((one) => one.className))].join());
  return seen;
"""


def test_every_control_of_a_real_run_does_what_it_says(tab: Tab, real_run: Path) -> None:
    assert used(tab, real_run / "report.html", CLICKS) == {
        "smoothed": [True, "0.60"],
        "plain": [False, "0.00"],
        "folded": [[False, True], [False, True]],
        "steps": [
            ["step 48", False, True],
            ["step 36", False, False],
            ["step 0", True, False],
            ["step 12", False, False],
            ["all steps", True, True],
        ],
        "sorted": "descending",
        "turned": "ascending",
        "cut": ["cut", "", ""],
    }


MORE = """
  const shown = () => [all("#rows tbody tr").length, byId("more").hidden ? "" : byId("more").textContent];
  const seen = [shown()];
  for (let click = 0; click < 2; click++) {
    byId("more").click();
    seen.push(shown());
  }
  return [...seen, byId("omitted").textContent];
"""


def test_long_tables_come_in_parts(tab: Tab, tmp_path: Path) -> None:
    samples = [{"step": 1, "table": "samples", "output": f"text {number}"} for number in range(230)]
    assert used(tab, write_report(make_run(tmp_path / "run", [], samples)), MORE) == [
        [100, "Show 100 more of 130"],
        [200, "Show 30 more of 30"],
        [230, ""],
        "",
    ]


GALLERY = """
  const hidden = (id) => byId(id).parentElement.hidden;
  const shown = () => [all("figure").length, hidden("rows"), all("#rows img").length, hidden("full")];
  const seen = [shown()];
  byId("gallery").click();
  return [...seen, shown()];
"""


def test_pictures_are_a_gallery_or_a_table(tab: Tab, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [], [{"step": 1, "table": "samples", "prompt": "a red one", "image": "red.png"}])
    Image.new("RGB", (8, 8), "red").save(run / "red.png")
    assert used(tab, write_report(run), GALLERY) == [[1, True, 1, True], [0, False, 1, False]]
