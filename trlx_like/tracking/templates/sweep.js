// The trials of a sweep: a line for each across its options, what each option matters, and a table.

function showSweep() {
  if (!data.sweep) return;
  const { sweep } = data, cards = [coordinates(sweep)];
  if (Object.keys(sweep.importance).length) cards.push(importances(sweep.importance));
  byId("sweep").append(...cards, trialTable(sweep), el("p", "note", `Below: the curves of the ${sweep.drawn} best trials.`));
}

// Parallel coordinates: an axis for each option that differs and one for the score; the better a trial, the fuller its
// line. Long names of options would overlap in one row.
function coordinates(sweep) {
  const width = 1000, height = 310, top = 50, bottom = 280;
  const shown = sweep.trials.filter((trial) => trial.value !== null).reverse();
  const cell = (trial, name) => (name === sweep.metric ? trial.value : trial.point[name]);
  const differs = (name) => new Set(shown.map((trial) => JSON.stringify(cell(trial, name)))).size > 1;
  const names = [...sweep.options.filter(differs), sweep.metric];
  const axes = names.map((name) => axis(shown.map((trial) => cell(trial, name)), sweep.log.includes(name), bottom, top));
  const x = (place) => 90 + ((width - 180) * place) / Math.max(1, names.length - 1);
  const picture = svg("svg", { class: "coordinates", viewBox: `0 0 ${width} ${height}`, role: "img" });
  shown.forEach((trial, place) => {
    const points = names.map((name, at) => `${x(at).toFixed(1)} ${axes[at].at(cell(trial, name)).toFixed(1)}`);
    const state = trial.state === "finished" ? (place === shown.length - 1 ? "best" : "") : "early";
    const line = svg("path", { class: state, d: `M${points.join("L")}`, opacity: (0.25 + (0.75 * (place + 1)) / shown.length).toFixed(2) });
    line.append(svg("title", {}, `trial ${trial.number}: ${format(trial.value)}`));
    picture.append(line);
  });
  names.forEach((name, at) => {
    picture.append(svg("line", { x1: x(at), x2: x(at), y1: top, y2: bottom }), svg("text", { x: x(at), y: at % 2 ? 30 : 14 }, name));
    const marks = axes[at].marks.filter(([mark], n, all) => all.findIndex(([other]) => Math.abs(other - mark) < 12) === n);
    for (const [mark, label] of marks) picture.append(svg("text", { class: "value", x: x(at) - 34, y: mark + 4 }, label));
  });
  return el("div", "card", el("div", "head", el("h3", "", "trials")), picture);
}

// Where values are on an axis: numbers by their size, or their logarithm; anything else in its order.
function axis(values, log, from, to) {
  const place = (share) => from + (to - from) * share, known = [...new Set(values.map((value) => JSON.stringify(value)))];
  if (!values.every((value) => typeof value === "number")) {
    const share = (text) => (known.indexOf(text) + 0.5) / known.length;
    return { at: (value) => place(share(JSON.stringify(value))), marks: known.map((text) => [place(share(text)), text.slice(0, 12)]) };
  }
  const size = (value) => (log ? Math.log(value) : value), low = Math.min(...values), high = Math.max(...values);
  const at = (value) => place(low < high ? (size(value) - size(low)) / (size(high) - size(low)) : 0.5);
  const marked = known.length <= 6 ? known.map(Number) : [low, high];
  return { at, marks: marked.map((value) => [at(value), format(value, 3)]) };
}

function importances(shares) {
  const rows = Object.entries(shares).map(([name, share]) => {
    const bar = el("div", "");
    bar.style.width = `${100 * share}%`;
    return el("tr", "", el("td", "", name), el("td", "number", `${(100 * share).toFixed(0)} %`), el("td", "", bar));
  });
  const head = el("div", "head", el("h3", "", "importance for the best tenth of the scores"), el("span", "note", "PED-ANOVA"));
  return el("div", "card", head, el("table", "share", ...rows));
}

function trialTable({ metric, options, trials }) {
  const heads = ["trial", `${metric}, median (lowest to highest)`, "seeds", ...options, "state"].map((name) => el("th", "", name));
  const rows = trials.map((trial) => {
    const points = options.map((name) => el("td", "", typeof trial.point[name] === "number" ? format(trial.point[name]) : JSON.stringify(trial.point[name]) ?? ""));
    const score = resultCell(trial.value === null ? null : { low: trial.value, high: trial.value, ...(trial.seeds > 1 ? { low: trial.low, high: trial.high } : {}), value: trial.value });
    const state = trial.error ? `${trial.state}: ${trial.error}` : trial.state;
    return el("tr", trial.state === "failed" ? "failed" : "", el("td", "", String(trial.number)), el("td", "", ...score), el("td", "", String(trial.seeds)), ...points, el("td", "", state));
  });
  return el("div", "compared", el("table", "", el("tr", "", ...heads), ...rows));
}
