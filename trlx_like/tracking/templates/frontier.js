// Reward against KL: a dot a step, from pale at the start to full at the end. The pointer shows the same step in all charts.

function frontierCard(points, wide) {
  const last = points.steps.length - 1;
  const readout = el("span", "number", ""), legend = el("div", "range");
  legend.append(...[`up: ${points.reward}`, `across: ${points.kl}`, "pale: first step, full: last"].map((text) => el("span", "", text)));
  const picture = svg("svg", { class: "chart frontier c0", role: "img" });
  picture.append(svg("title", {}, `reward ${format(points.y[last])} at a KL of ${format(points.x[last])}`));
  const drawn = plotFrontier(picture, points, readout);
  DRAWN.push(drawn);
  new ResizeObserver(() => drawn.draw()).observe(picture);
  return el("div", wide ? "card wide" : "card", el("div", "head", el("h3", "", "reward against KL"), readout), picture, legend);
}

function plotFrontier(picture, points, readout) {
  const count = points.steps.length;
  let place = null, mark = null; // pixels of a point, and what shows the one under the pointer

  function scale(values, from, to) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    const [start, end] = [low >= 0 && low < pad ? 0 : low - pad, high + pad];
    return { start, end, at: (value) => from + ((value - start) / (end - start)) * (to - from) };
  }

  function draw() {
    const width = picture.clientWidth, height = picture.clientHeight;
    if (!width) return;
    const x = scale(points.x, LEFT, width - RIGHT), y = scale(points.y, height - BOTTOM, TOP);
    place = (at) => [x.at(points.x[at]), y.at(points.y[at])];
    const across = ticks(x.start, x.end, Math.max(2, width / 90)).map((value) => [x.at(value), format(value)]);
    const up = ticks(y.start, y.end, 4).map((value) => [y.at(value), format(value)]);
    picture.replaceChildren(picture.firstChild, axes(width, height, across, up));
    picture.append(svg("path", { class: "raw", d: points.steps.map((_, at) => `${at ? "L" : "M"}${place(at).map((one) => one.toFixed(1)).join(" ")}`).join("") }));
    points.steps.forEach((_, at) => {
      const [cx, cy] = place(at);
      picture.append(svg("circle", { cx, cy, r: 3.5, "fill-opacity": (0.15 + (0.85 * at) / (count - 1)).toFixed(2) }));
    });
    mark = svg("g", {});
    picture.append(mark);
    point(wantedStep);
  }

  // Shows the point of a step, or with null reads out the last one.
  function point(step) {
    if (!place) return;
    mark.replaceChildren();
    const at = step === null ? count - 1 : nearest(points.steps, step);
    readout.textContent = `${format(points.y[at])} at ${format(points.x[at], 3)}, step ${formatStep(points.steps[at])}`;
    if (step === null) return;
    const [cx, cy] = place(at);
    mark.append(svg("circle", { cx, cy, r: 6 }));
  }

  picture.addEventListener("pointermove", (event) => {
    if (!place) return;
    const box = picture.getBoundingClientRect();
    const away = points.steps.map((_, at) => Math.hypot(place(at)[0] - event.clientX + box.left, place(at)[1] - event.clientY + box.top));
    pointAll(points.steps[away.indexOf(Math.min(...away))]);
  });
  picture.addEventListener("pointerleave", () => pointAll(null));
  return { draw, point };
}
