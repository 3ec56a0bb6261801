// The charts. The curves share one range of steps, and the pointer over one chart shows the same step in all.

const DRAWN = []; // every chart on the page: {draw, point}
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

// What lies between the lowest and the highest run.
function bandPath({ steps, low, high }, x, y) {
  const there = steps.map((_, at) => at).filter((at) => low[at] !== null);
  const corner = (at, value) => `${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}`;
  const corners = [...there.map((at) => corner(at, high[at])), ...there.reverse().map((at) => corner(at, low[at]))];
  return corners.length ? `M${corners.join("L")}Z` : "";
}

// Maps values from `start` to `end` to pixels from `from` to `to`, and back.
function scale(start, end, from, to) {
  const size = (to - from) / (end - start);
  return { start, end, to, at: (value) => from + (value - start) * size, back: (pixel) => start + (pixel - from) / size };
}

// The scale of an axis that has room for all values; it begins at 0 if they come close to it.
function fitted(values, from, to) {
  const low = Math.min(...values), high = Math.max(...values);
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return scale(low >= 0 && low < pad ? 0 : low - pad, high + pad, from, to);
}

// The lines and numbers of a chart. written: how a value of x is written.
function axes(width, height, x, y, written) {
  const group = svg("g", {}), whole = written === formatStep;
  for (const value of ticks(y.start, y.end, 4)) {
    group.append(svg("line", { class: "tick", x1: LEFT, x2: x.to, y1: y.at(value), y2: y.at(value) }));
    group.append(svg("text", { x: LEFT - 8, y: y.at(value) + 4, "text-anchor": "end" }, format(value)));
  }
  for (const value of ticks(x.start, x.end, Math.max(2, width / 90), whole)) {
    group.append(svg("text", { x: x.at(value), y: height - 6, "text-anchor": "middle" }, written(value)));
  }
  group.append(svg("line", { class: "axis", x1: LEFT, x2: x.to, y1: height - BOTTOM, y2: height - BOTTOM }));
  return group;
}

// A picture that is drawn whenever its size changes. scales: the scales of both axes for their first and last pixels;
// paint: what is drawn; pick: the step at a pixel; mark: what shows this step, or with null the last one.
function drawing(className, title, { written, scales, paint, pick, mark }) {
  const picture = svg("svg", { class: className, role: "img" }), marks = svg("g", {});
  picture.append(svg("title", {}, title));
  let x = null, y = null;
  const point = (step) => x && marks.replaceChildren(...mark(step, x, y));
  const draw = () => {
    const { clientWidth: width, clientHeight: height } = picture;
    if (!width) return;
    [x, y] = scales([LEFT, width - RIGHT], [height - BOTTOM, TOP]);
    picture.replaceChildren(picture.firstChild, axes(width, height, x, y, written), ...paint(x, y), marks);
    point(wantedStep);
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    if (x) pointAll(pick(event.clientX - box.left, event.clientY - box.top, x, y));
  });
  picture.addEventListener("pointerleave", () => pointAll(null));
  DRAWN.push({ draw, point });
  new ResizeObserver(draw).observe(picture);
  return picture;
}

// The classes of the color of a series: with more than eight, lines are dashed from the ninth on.
function colorOf(one, place) {
  const color = one.color ?? place;
  return color < 8 ? `c${color}` : `c${color % 8} again`;
}

function chartCard({ title, series }, wide) {
  const many = series.length > 1, slash = title.lastIndexOf("/") + 1;
  const readouts = series.map((one) => el("b", "number", format(one.last.value)));
  const legend = series.map((one, place) => {
    const extent = el("small", "", `${format(one.min.value, 3)} to ${format(one.max.value, 3)}`);
    return el("span", colorOf(one, place), el("i"), `${one.label} `, readouts[place], " ", extent);
  });
  const picture = drawing("chart", `${title}, last ${series.map((one) => format(one.last.value)).join(", ")}`, {
    written: formatStep,
    scales: (across, up) => [scale(...span, ...across), fitted(series.flatMap((one) => [one.min.value, one.max.value]), ...up)],
    paint: (x, y) => series.map((one, place) => curve(one, colorOf(one, place), x, y)),
    pick: (left, _, x) => series[0].steps[nearest(series[0].steps, x.back(left))],
    mark(step, x, y) {
      const shown = step === null ? [] : cross(step, x, y);
      series.forEach((one, place) => {
        const at = nearest(one.steps, step), value = step === null ? one.last.value : one.values[at];
        readouts[place].textContent = format(value);
        if (step !== null && value !== null) shown.push(svg("circle", { class: colorOf(one, place), cx: x.at(one.steps[at]), cy: y.at(value), r: 4 }));
      });
      return shown;
    },
  });
  const head = el("div", "head", el("h3", "", el("span", "", title.slice(0, slash)), title.slice(slash)), many ? "" : readouts[0]);
  return el("div", wide ? "card wide" : "card", head, many ? el("div", "legend", ...legend) : "", picture, rangeLine(series));
}

function rangeLine(series) {
  const line = el("div", "range"), [one] = series;
  if (series.length === 1) {
    const marks = Object.entries({ min: one.min, max: one.max }).map(([name, mark]) => `${name} ${format(mark.value, 3)} at ${formatStep(mark.step)}`);
    line.append(...[...marks, `last ${format(one.last.value, 3)}`].map((text) => el("span", "", text)));
  }
  const bad = series.reduce((sum, one) => sum + one.bad, 0);
  if (bad) line.append(el("span", "bad", `${bad} not finite`));
  return line;
}

// A long curve is smoothed over a pale one of all its values; a short one has a dot for each value.
function curve(one, className, x, y) {
  const group = svg("g", { class: className }), short = one.steps.length <= SMOOTHED_FROM, smoothed = !short && smoothing > 0;
  if (one.low) group.append(svg("path", { class: "band", d: bandPath(one, x.at, y.at) }));
  group.append(svg("path", { class: smoothed ? "raw" : "", d: linePath(one.steps, one.values, x.at, y.at) }));
  if (smoothed) {
    const [steps, values] = one.means.length ? [one.mean_steps, one.means] : [one.steps, one.values];
    group.append(svg("path", { d: linePath(steps, smooth(values), x.at, y.at) }));
  }
  one.values.forEach((value, at) => short && value !== null && group.append(svg("circle", { cx: x.at(one.steps[at]), cy: y.at(value), r: 3 })));
  return group;
}

// The line at the step under the pointer.
function cross(step, x, y) {
  const at = x.at(step), left = at > x.to - 70;
  const text = { class: "at", x: at + (left ? -6 : 6), y: TOP + 10, "text-anchor": left ? "end" : "start" };
  return [svg("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: y.at(y.start) }), svg("text", text, `step ${formatStep(step)}`)];
}

// Reward against KL: a dot for each step, from pale at the start to full at the end.
function frontierCard(points, wide) {
  const last = points.steps.length - 1, readout = el("span", "number");
  const place = (at, x, y) => ({ cx: x.at(points.x[at]), cy: y.at(points.y[at]) });
  const picture = drawing("chart frontier c0", `reward ${format(points.y[last])} at a KL of ${format(points.x[last])}`, {
    written: format,
    scales: (across, up) => [fitted(points.x, ...across), fitted(points.y, ...up)],
    paint(x, y) {
      const opacity = (at) => (0.15 + (0.85 * at) / last).toFixed(2);
      const dots = points.steps.map((_, at) => svg("circle", { ...place(at, x, y), r: 3.5, "fill-opacity": opacity(at) }));
      return [svg("path", { class: "raw", d: linePath(points.x, points.y, x.at, y.at) }), ...dots];
    },
    pick(left, top, x, y) {
      const away = points.steps.map((_, at) => Math.hypot(place(at, x, y).cx - left, place(at, x, y).cy - top));
      return points.steps[away.indexOf(Math.min(...away))];
    },
    mark(step, x, y) {
      const at = step === null ? last : nearest(points.steps, step);
      readout.textContent = `${format(points.y[at])} at ${format(points.x[at], 3)}, step ${formatStep(points.steps[at])}`;
      return step === null ? [] : [svg("circle", { ...place(at, x, y), r: 6 })];
    },
  });
  const legend = [`up: ${points.reward}`, `across: ${points.kl}`, "pale: first step, full: last"].map((text) => el("span", "", text));
  return el("div", wide ? "card wide" : "card", el("div", "head", el("h3", "", "reward against KL"), readout), picture, el("div", "range", ...legend));
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
