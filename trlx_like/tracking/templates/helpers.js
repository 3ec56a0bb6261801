"use strict";
// Everything that comes from the run enters the page as a text node or a number, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);

function byId(id) {
  return document.getElementById(id);
}

// An HTML element; children that are not elements become text.
function el(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function format(value, digits = 4) {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0*e\+?/, "e").replace(/^-/, "\u2212");
  return String(Number(value.toPrecision(size >= 1000 ? 5 : digits))).replace(/^-/, "\u2212");
}

function formatStep(step) {
  return step >= 10000 && step % 100 === 0 ? `${step / 1000}k` : step.toLocaleString("en");
}

function formatSeconds(seconds) {
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  const whole = Math.round(seconds), minutes = Math.round(seconds / 60);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Round numbers from `low` to `high`, about `count` of them.
function ticks(low, high, count, whole = false) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

// Where in sorted `steps` the one nearest to `step` is.
function nearest(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}
