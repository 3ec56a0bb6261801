// The top and bottom of the page, and the start of everything.

function showFacts() {
  const { run } = data;
  const facts = { trainer: run.trainer, method: run.method, model: run.model, "batch size": run.batch_size, seed: run.seed };
  for (const [name, value] of Object.entries(facts)) {
    if (value == null) continue;
    const text = typeof value === "object" ? JSON.stringify(value) : String(value);
    byId("facts").append(el("div", "", el("dt", "", name), el("dd", "", text.length > 120 ? `${text.slice(0, 120)} ...` : text)));
  }
}

function showTiles() {
  const { run } = data, tiles = byId("tiles");
  tiles.append(...data.goals.map(goalTile));
  if (run.last_step != null) {
    const of = run.total_steps ? el("span", "of", ` / ${formatStep(run.total_steps)}`) : "";
    const done = el("div", "");
    done.style.width = `${run.total_steps ? Math.min(100, (100 * run.last_step) / run.total_steps) : 0}%`;
    const value = el("div", "value", formatStep(run.last_step), of);
    tiles.append(el("div", "tile", el("div", "label", "steps"), value, run.total_steps ? el("div", "meter", done) : ""));
  }
  if (run.seconds) {
    const each = run.last_step ? `${formatSeconds(run.seconds / run.last_step)} a step` : "";
    tiles.append(el("div", "tile", el("div", "label", "duration"), el("div", "value", formatSeconds(run.seconds)), el("div", "detail", each)));
  }
}

function showAudit() {
  const { audit } = data;
  if (!audit) return;
  const found = audit.found ? `${audit.found} ${audit.found === 1 ? "finding" : "findings"}` : "nothing found";
  const rows = audit.verdicts.map((one) => el("tr", one.found ? "found" : "", el("th", "", one.name), el("td", "", one.state), el("td", "", one.words, one.found ? el("p", "", `Try: ${one.advice}`) : "")));
  const folded = el("details", "", el("summary", "", "Audit", el("small", audit.found ? "bad" : "", ` ${found} in ${audit.rounds} rounds`)), el("table", "", ...rows));
  folded.open = audit.found > 0;
  byId("audit").append(folded);
}

function goalTile(goal) {
  const change = goal.last.value - goal.first.value, best = goal.lower ? goal.min : goal.max;
  const better = goal.lower ? change < 0 : change > 0;
  const sign = change > 0 ? "+" : "";
  const moved = change ? el("small", better ? "good" : "bad", `${sign}${format(change)}`) : "";
  const detail = `from ${format(goal.first.value)}, best ${format(best.value)} at step ${formatStep(best.step)}`;
  const name = goal.name.replace(/^metrics\//, "").replace(/^reward\/mean/, "reward");
  return el("div", "tile", el("div", "label", name), el("div", "value", format(goal.last.value), moved), el("div", "detail", detail), sparkline(goal.name));
}

function sparkline(name) {
  const all = data.groups.flatMap((group) => group.charts.flatMap((chart) => chart.series));
  const one = all.find((series) => series.name === name);
  if (!one || one.steps.length < 2) return "";
  const [low, high, first, last] = [one.min.value, one.max.value, one.steps[0], one.steps[one.steps.length - 1]];
  const x = (step) => 2 + (80 * (step - first)) / (last - first || 1);
  const y = (value) => 31 - (28 * (value - low)) / (high - low || 1);
  const picture = svg("svg", { class: "chart spark c0", viewBox: "0 0 84 34", "aria-hidden": "true" });
  picture.append(svg("path", { d: linePath(one.steps, one.values, x, y) }));
  return picture;
}

function showLinks() {
  const links = data.groups.map((group, place) => [group.title, `group-${place}`]);
  if (data.tables.length) links.push(["Samples", "samples"]);
  for (const [title, id] of [...links, ["Configuration", "configuration"]]) {
    const link = el("a", "", title);
    link.href = `#${id}`;
    link.addEventListener("click", () => {
      const target = byId(id), folded = target.matches("details") ? target : target.querySelector(":scope > details");
      if (folded) folded.open = true;
    });
    byId("links").append(link);
  }
}

function showFoot() {
  const torn = Object.entries(data.torn).map(([file, count]) => `${count} unreadable ${count === 1 ? "line" : "lines"} of ${file} left out. `);
  byId("foot").append(...torn, "Make this page again: ", el("code", "", data.command ?? "trlx-like report RUN_FOLDER"));
}

showFacts();
showTiles();
showAudit();
showSweep();
showCompared();
showCharts();
showSmoothing();
showSamples();
showLinks();
showFoot();
