// The curves. All share one range of steps, and the pointer over one shows the same step in all.

const DRAWN = []; // every chart that is on the page: {draw, point}
const LEFT = 52, RIGHT = 14, TOP = 8, BOTTOM = 22;
const SMOOTHED_FROM = 40; // shorter series are drawn as they are, with a dot a value

const span = stepSpan();
let smoothing = 0.6;
let wantedStep = null, pending = false; // the step under the pointer, and whether it has yet to be shown

function stepSpan() {
  let low = Infinity, high = -Infinity;
  for (const group of data.groups) for (const chart of group.charts) for (const one of chart.series) {
    low = Math.min(low, one.steps[0]);
    high = Math.max(high, one.steps[one.steps.length - 1]);
  }
  return low < high ? [low, high] : [low - 1, low + 1];
}

// An exponential average that starts at the first value, not at 0; gaps stay gaps.
function smooth(values) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = smoothing * sum + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return sum / weight;
  });
}

function linePath(steps, values, x, y) {
  let path = "", pen = "M";
  values.forEach((value, at) => {
    if (value === null) pen = "M";
    else {
      path += `${pen}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    }
  });
  return path;
}

function chartCard(chart, wide) {
  const many = chart.series.length > 1;
  const card = el("div", wide ? "card wide" : "card");
  const slash = chart.title.lastIndexOf("/") + 1;
  const title = el("h3", "", el("span", "", chart.title.slice(0, slash)), chart.title.slice(slash));
  const legend = el("div", "legend");
  const values = chart.series.map((one, place) => {
    const value = el("b", "number", format(one.last.value));
    if (many) {
      const extent = `${format(one.min.value, 3)} to ${format(one.max.value, 3)}`;
      legend.append(el("span", `c${place % 8}`, el("i"), `${one.label} `, value, " ", el("small", "", extent)));
    }
    return value;
  });
  const picture = svg("svg", { class: "chart", role: "img" });
  picture.append(svg("title", {}, `${chart.title}, last ${chart.series.map((one) => format(one.last.value)).join(", ")}`));
  card.append(el("div", "head", title, many ? "" : values[0]), many ? legend : "", picture, rangeLine(chart, many));
  const drawn = plot(picture, chart, values);
  DRAWN.push(drawn);
  new ResizeObserver(() => drawn.draw()).observe(picture);
  return card;
}

function rangeLine(chart, many) {
  const line = el("div", "range");
  if (!many) {
    const [one] = chart.series;
    for (const [name, mark] of [["min", one.min], ["max", one.max]]) {
      line.append(el("span", "", `${name} ${format(mark.value, 3)} at ${formatStep(mark.step)}`));
    }
    line.append(el("span", "", `last ${format(one.last.value, 3)}`));
  }
  const bad = chart.series.reduce((sum, one) => sum + one.bad, 0);
  if (bad) line.append(el("span", "bad", `${bad} not finite`));
  return line;
}

// Lines and numbers of a chart. across, up: [pixel, text] of each number.
function axes(width, height, across, up) {
  const group = svg("g", {});
  for (const [at, text] of up) {
    group.append(svg("line", { class: "tick", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
    group.append(svg("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, text));
  }
  for (const [at, text] of across) group.append(svg("text", { x: at, y: height - 6, "text-anchor": "middle" }, text));
  group.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }));
  return group;
}

// Draws into the picture now and whenever it changes its size.
function plot(picture, chart, readouts) {
  let x = null, y = null, marks = null;

  function draw() {
    const width = picture.clientWidth, height = picture.clientHeight;
    if (!width) return;
    const low = Math.min(...chart.series.map((one) => one.min.value));
    const high = Math.max(...chart.series.map((one) => one.max.value));
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    const [bottom, top] = [low >= 0 && low < pad ? 0 : low - pad, high + pad];
    x = (step) => LEFT + ((step - span[0]) / (span[1] - span[0])) * (width - LEFT - RIGHT);
    y = (value) => height - BOTTOM - ((value - bottom) / (top - bottom)) * (height - TOP - BOTTOM);
    const across = ticks(span[0], span[1], Math.max(2, width / 90), true).map((step) => [x(step), formatStep(step)]);
    const up = ticks(bottom, top, 4).map((value) => [y(value), format(value)]);
    picture.replaceChildren(picture.firstChild, axes(width, height, across, up));
    chart.series.forEach((one, place) => picture.append(curve(one, place)));
    marks = svg("g", {});
    picture.append(marks);
    point(wantedStep);
  }

  function curve(one, place) {
    const group = svg("g", { class: `c${place % 8}` });
    const long = one.steps.length > SMOOTHED_FROM;
    if (long && smoothing > 0) {
      group.append(svg("path", { class: "raw", d: linePath(one.steps, one.values, x, y) }));
      const [steps, values] = one.means.length ? [one.mean_steps, one.means] : [one.steps, one.values];
      group.append(svg("path", { d: linePath(steps, smooth(values), x, y) }));
    } else {
      group.append(svg("path", { d: linePath(one.steps, one.values, x, y) }));
    }
    if (!long) {
      one.values.forEach((value, at) => {
        if (value !== null) group.append(svg("circle", { cx: x(one.steps[at]), cy: y(value), r: 3 }));
      });
    }
    return group;
  }

  // Shows the values at a step, or with null the last ones.
  function point(step) {
    if (!x) return;
    marks.replaceChildren();
    chart.series.forEach((one, place) => {
      const at = step === null ? -1 : nearest(one.steps, step);
      readouts[place].textContent = format(step === null ? one.last.value : one.values[at]);
      if (step !== null && one.values[at] !== null) {
        marks.append(svg("circle", { class: `c${place % 8}`, cx: x(one.steps[at]), cy: y(one.values[at]), r: 4 }));
      }
    });
    if (step === null) return;
    const at = x(step), right = picture.clientWidth - RIGHT;
    marks.prepend(svg("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: picture.clientHeight - BOTTOM }));
    const anchor = at > right - 70 ? "end" : "start";
    marks.append(svg("text", { class: "at", x: anchor === "end" ? at - 6 : at + 6, y: TOP + 10, "text-anchor": anchor }, `step ${formatStep(step)}`));
  }

  picture.addEventListener("pointermove", (event) => {
    if (!x) return;
    const share = (event.clientX - picture.getBoundingClientRect().left - LEFT) / (picture.clientWidth - LEFT - RIGHT);
    const wanted = span[0] + Math.min(1, Math.max(0, share)) * (span[1] - span[0]);
    const [{ steps }] = chart.series;
    pointAll(steps[nearest(steps, wanted)]);
  });
  picture.addEventListener("pointerleave", () => pointAll(null));
  return { draw, point };
}

function pointAll(step) {
  wantedStep = step;
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    for (const chart of DRAWN) chart.point(wantedStep);
  });
}

// Where the time of the whole run went.
function phasesCard() {
  const total = data.phases.reduce((sum, phase) => sum + phase.seconds, 0);
  const bar = el("div", "stack"), table = el("table", "share");
  data.phases.forEach((phase, place) => {
    const color = phase.name === "other" ? "c7" : `c${place % 7}`;
    const part = el("div", color);
    part.style.flexGrow = phase.seconds / total;
    part.title = `${phase.name}: ${formatSeconds(phase.seconds)}`;
    bar.append(part);
    const share = `${((100 * phase.seconds) / total).toFixed(1)} %`;
    table.append(el("tr", color, el("td", "", el("i"), phase.name), el("td", "number", formatSeconds(phase.seconds)), el("td", "number", share)));
  });
  return el("div", "card", el("div", "head", el("h3", "", "whole run, by phase"), el("span", "number", formatSeconds(total))), bar, table);
}

function showCharts() {
  const main = byId("charts");
  data.groups.forEach((group, place) => {
    const grid = el("div", "grid");
    const phases = group.title === "Time" && data.phases.some((phase) => phase.seconds > 0);
    const frontier = group.title === "KL and entropy" && data.frontier;
    // The first chart is wide where that leaves less of the last of three columns empty.
    const wide = phases || (group.charts.length + (frontier ? 1 : 0)) % 3 > 0;
    if (phases) grid.append(phasesCard());
    if (frontier) grid.append(frontierCard(data.frontier, wide));
    group.charts.forEach((chart, at) => grid.append(chartCard(chart, wide && !frontier && at === 0)));
    const section = group.folded
      ? el("details", "", el("summary", "", `${group.title} `, el("small", "", String(group.charts.length))), grid)
      : el("section", "", el("h2", "", group.title), grid);
    section.id = `group-${place}`;
    main.append(section);
  });
  if (!data.groups.length) main.append(el("p", "empty", "There are no metrics in this folder yet."));
}

function showSmoothing() {
  const label = byId("smoothing"), [input, output] = [label.querySelector("input"), label.querySelector("output")];
  label.hidden = !data.groups.some((group) => group.charts.some((chart) => chart.series.some((one) => one.steps.length > SMOOTHED_FROM)));
  const update = () => {
    smoothing = Number(input.value);
    output.textContent = smoothing.toFixed(2);
    for (const chart of DRAWN) chart.draw();
  };
  input.addEventListener("input", update);
  update();
}
