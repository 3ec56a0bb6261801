// The tables of samples: one evaluation or all, filtered and sorted.

const PAGE = 100; // rows that are added at a time
const view = { table: 0, place: 0, sort: null, down: true, rows: PAGE };

function showSamples() {
  if (!data.tables.length) return;
  byId("samples").hidden = false;
  const select = byId("table");
  select.append(...data.tables.map((table, place) => new Option(table.name, place)));
  select.hidden = data.tables.length < 2;
  select.addEventListener("change", () => openTable(Number(select.value)));
  byId("step").addEventListener("input", () => openStep(Number(byId("step").value)));
  byId("earlier").addEventListener("click", () => openStep(view.place - 1));
  byId("later").addEventListener("click", () => openStep(view.place + 1));
  for (const id of ["every", "filter", "full"]) byId(id).addEventListener("input", redraw);
  byId("more").addEventListener("click", () => {
    view.rows += PAGE;
    drawRows();
  });
  openTable(0);
}

function openTable(place) {
  const table = data.tables[place];
  Object.assign(view, { table: place, sort: null });
  byId("steps").hidden = byId("every").parentElement.hidden = table.steps.length < 2;
  byId("step").max = table.steps.length - 1;
  const shown = table.steps.length, cut = table.steps.some((one) => one.rows.length < one.total);
  const notes = [];
  if (shown < table.evaluations) notes.push(`This page has ${shown} of ${table.evaluations} evaluations.`);
  if (cut) notes.push("It has the first rows of each.");
  byId("omitted").textContent = notes.length ? `${notes.join(" ")} All are in samples.jsonl.` : "";
  openStep(table.steps.length - 1);
}

function openStep(place) {
  const table = data.tables[view.table];
  view.place = Math.min(Math.max(place, 0), table.steps.length - 1);
  redraw();
}

function redraw() {
  view.rows = PAGE;
  const table = data.tables[view.table], every = byId("every").checked;
  byId("step").value = view.place;
  byId("step").disabled = every;
  byId("earlier").disabled = every || view.place === 0;
  byId("later").disabled = every || view.place === table.steps.length - 1;
  byId("at").textContent = every ? "all steps" : `step ${formatStep(table.steps[view.place].step)}`;
  drawRows();
}

// The columns and rows that are asked for; with all steps the step comes first.
function selected() {
  const table = data.tables[view.table], every = byId("every").checked;
  const columns = every ? ["step", ...table.columns] : table.columns;
  const evaluations = every ? table.steps : [table.steps[view.place]];
  let rows = evaluations.flatMap((one) => (every ? one.rows.map((row) => [one.step, ...row]) : one.rows));
  const total = rows.length, wanted = byId("filter").value.toLowerCase();
  if (wanted) rows = rows.filter((row) => row.some((cell) => String(cell ?? "").toLowerCase().includes(wanted)));
  const by = columns.indexOf(view.sort);
  if (by >= 0) rows = [...rows].sort((a, b) => compare(a[by], b[by]));
  return { columns, rows, total };
}

// Numbers by size, then texts, in the direction that is asked for; nothing always comes last.
function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  const texts = (typeof a === "string") - (typeof b === "string");
  return (view.down ? -1 : 1) * (texts || (typeof a === "string" ? a.localeCompare(b) : a - b));
}

function drawRows() {
  const { columns, rows, total } = selected();
  const extents = columns.map((name, at) => extent(rows.map((row) => row[at])));
  byId("rows").tHead.replaceChildren(el("tr", "", ...columns.map((name, at) => heading(name, extents[at]))));
  const body = rows.slice(0, view.rows).map((row) => el("tr", "", ...row.map((cell, at) => tableCell(cell, columns[at], extents[at]))));
  byId("rows").tBodies[0].replaceChildren(...body);
  byId("count").textContent = rows.length === total ? `${total} ${total === 1 ? "row" : "rows"}` : `${rows.length} of ${total} rows`;
  const left = rows.length - view.rows;
  byId("more").hidden = left <= 0;
  byId("more").textContent = `Show ${Math.min(left, PAGE)} more of ${left}`;
}

// The least and greatest of a column of numbers, null for a column of anything else.
function extent(cells) {
  const known = cells.filter((cell) => cell !== null);
  if (!known.length || known.some((cell) => typeof cell !== "number")) return null;
  return known.reduce(([low, high], cell) => [Math.min(low, cell), Math.max(high, cell)], [Infinity, -Infinity]);
}

function heading(name, numbers) {
  const button = el("button", "", name), cell = el("th", numbers ? "number" : "", button);
  button.type = "button";
  if (name === view.sort) cell.setAttribute("aria-sort", view.down ? "descending" : "ascending");
  button.addEventListener("click", () => {
    view.down = name === view.sort ? !view.down : numbers !== null;
    view.sort = name;
    drawRows();
  });
  return cell;
}

function tableCell(value, name, numbers) {
  if (value === null) return el("td", numbers ? "number none" : "none", "\u2013");
  if (typeof value === "boolean") return el("td", "", value ? "yes" : "no");
  if (typeof value === "number") {
    const cell = el("td", "number", format(value));
    if (numbers && numbers[0] < numbers[1] && name !== "step") {
      const bar = el("div", "");
      bar.style.width = `${(100 * (value - numbers[0])) / (numbers[1] - numbers[0])}%`;
      cell.append(bar);
    }
    return cell;
  }
  const text = el("div", byId("full").checked ? "" : "cut", ...marked(value));
  text.addEventListener("click", () => getSelection().isCollapsed && text.classList.toggle("cut"));
  return el("td", "text", text);
}

// The text with what is filtered for marked.
function marked(text) {
  const wanted = byId("filter").value.toLowerCase(), lower = text.toLowerCase();
  if (!wanted || lower.length !== text.length) return [text];
  const parts = [];
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0 && parts.length < 200; at = lower.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), el("mark", "", text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}
