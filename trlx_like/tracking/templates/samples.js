// The tables of samples: one step or all, filtered and sorted. What shares a prompt stands together.

const PAGE = 100; // rows that are added at a time
const TABLES = { samples: "Evaluations", training: "Training rounds" }; // what ours are called here
const TERM = /^\s*(.+?)\s*(<=|>=|<|>|=|:)\s*(.+?)\s*$/; // `reward > 0.5`, `finish reason: length`
const PICTURE = "data:image/png;base64,"; // how a cell begins that is one
const view = { table: 0, place: 0, sort: null, down: true, rows: PAGE };

function showSamples() {
  if (!data.tables.length) return;
  byId("samples").hidden = false;
  const select = byId("table");
  select.append(...data.tables.map((table, place) => new Option(TABLES[table.name] ?? table.name, place)));
  select.hidden = data.tables.length < 2;
  select.addEventListener("change", () => openTable(Number(select.value)));
  byId("step").addEventListener("input", () => openStep(Number(byId("step").value)));
  byId("earlier").addEventListener("click", () => openStep(view.place - 1));
  byId("later").addEventListener("click", () => openStep(view.place + 1));
  for (const id of ["every", "filter", "full", "gallery"]) byId(id).addEventListener("input", redraw);
  byId("more").addEventListener("click", () => {
    view.rows += PAGE;
    drawRows();
  });
  openTable(0);
}

function openTable(place) {
  const table = data.tables[place];
  Object.assign(view, { table: place, sort: null });
  byId("table").value = place;
  byId("steps").hidden = byId("every").parentElement.hidden = table.steps.length < 2;
  byId("step").max = table.steps.length - 1;
  const shown = table.steps.length, cut = table.steps.some((one) => one.rows.length < one.total);
  const notes = [];
  if (shown < table.evaluations) notes.push(`This page has ${shown} of the ${table.evaluations} steps that have samples.`);
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
  const total = rows.length, wanted = byId("filter").value;
  if (wanted) rows = rows.filter(filter(wanted, columns));
  const by = columns.indexOf(view.sort);
  if (by >= 0) rows = [...rows].sort((a, b) => compare(a[by], b[by]));
  return { columns, rows, total };
}

// Whether a row is wanted: by a condition on a column, else by a text in any.
function filter(wanted, columns) {
  const [, name = "", sign, value] = TERM.exec(wanted) ?? [];
  const at = columns.findIndex((column) => spaced(column) === spaced(name.toLowerCase()));
  if (at < 0) return (row) => row.some((cell) => has(cell, wanted));
  if (sign === ":") return (row) => has(row[at], value);
  const than = {
    "<": (cell) => cell < value, "<=": (cell) => cell <= value, ">": (cell) => cell > value, ">=": (cell) => cell >= value,
    "=": (cell) => String(cell).toLowerCase() === value.toLowerCase() || (typeof cell === "number" && cell === Number(value)),
  }[sign];
  return (row) => row[at] !== null && than(row[at]);
}

function has(cell, text) {
  const shown = String(cell ?? "");
  return !shown.startsWith(PICTURE) && shown.toLowerCase().includes(text.toLowerCase());
}

function spaced(name) {
  return name.replaceAll("_", " ").trim();
}

// Numbers by size, then texts, in the direction that is asked for; nothing always comes last.
function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  const texts = (typeof a === "string") - (typeof b === "string");
  return (view.down ? -1 : 1) * (texts || (typeof a === "string" ? a.localeCompare(b) : a - b));
}

function drawRows() {
  const { columns, rows, total } = selected();
  const kinds = columns.map((name, at) => kind(name, rows.map((row) => row[at])));
  const shown = rows.slice(0, view.rows), pictures = columns.findIndex((_, at) => isPictures(shown, at));
  const gallery = pictures >= 0 && byId("gallery").checked;
  byId("gallery").parentElement.hidden = pictures < 0;
  byId("full").parentElement.hidden = gallery;
  byId("rows").parentElement.hidden = gallery;
  byId("pictures").replaceChildren(...(gallery ? shown.map((row) => figure(columns, row, pictures)) : []));
  byId("rows").tHead.replaceChildren(el("tr", "", ...columns.map((name, at) => heading(name, kinds[at]))));
  byId("rows").tBodies[0].replaceChildren(...body(columns, shown, kinds));
  byId("count").textContent = rows.length === total ? `${total} ${total === 1 ? "row" : "rows"}` : `${rows.length} of ${total} rows`;
  const left = rows.length - view.rows;
  byId("more").hidden = left <= 0;
  byId("more").textContent = `Show ${Math.min(left, PAGE)} more of ${left}`;
}

// The rows. Of those that follow each other and are of the same group, the first has the prompt for all.
function body(columns, rows, kinds) {
  const marks = ["step", "group", "prompt"].map((name) => columns.indexOf(name)).filter((at) => at >= 0);
  const grouped = columns.includes("group");
  const drawn = [];
  for (let start = 0; start < rows.length; ) {
    let end = start + 1;
    while (grouped && end < rows.length && marks.every((at) => rows[end][at] === rows[start][at])) end++;
    for (let place = start; place < end; place++) {
      const line = el("tr", place === start && end - start > 1 ? "first" : "");
      rows[place].forEach((value, at) => {
        if (place > start && marks.includes(at)) return;
        const cell = tableCell(value, columns[at], kinds[at]);
        if (end - start > 1 && marks.includes(at)) cell.rowSpan = end - start;
        line.append(cell);
      });
      drawn.push(line);
    }
    start = end;
  }
  return drawn;
}

// What a column holds: numbers, with the least and the greatest; labels, which are few and short; or texts.
function kind(name, cells) {
  const known = cells.filter((cell) => cell !== null);
  if (known.length && known.every((cell) => typeof cell === "number")) {
    const [low, high] = known.reduce(([low, high], cell) => [Math.min(low, cell), Math.max(high, cell)], [Infinity, -Infinity]);
    return { name: "number", low, high, bars: low < high && !["step", "group"].includes(name) };
  }
  const labels = known.every((cell) => String(cell).length <= 12 && !String(cell).includes("\n")) && new Set(known).size <= 6;
  return { name: labels && !["prompt", "output", "reference"].includes(name) ? "label" : "text" };
}

function heading(name, { name: kind }) {
  const slash = name.lastIndexOf("/") + 1;
  const button = el("button", "", el("span", "", name.slice(0, slash)), spaced(name.slice(slash))), cell = el("th", kind, button);
  button.type = "button";
  if (name === view.sort) cell.setAttribute("aria-sort", view.down ? "descending" : "ascending");
  button.addEventListener("click", () => {
    view.down = name === view.sort ? !view.down : kind === "number";
    view.sort = name;
    drawRows();
  });
  return cell;
}

function tableCell(value, name, kind) {
  if (value === null) return el("td", `${kind.name} none`, "\u2013");
  if (typeof value === "boolean") return el("td", "label", value ? "yes" : "no");
  if (typeof value === "number") {
    const cell = el("td", "number", format(value, 3));
    if (kind.bars) cell.append(bar(value, kind));
    return cell;
  }
  if (value.startsWith(PICTURE)) return el("td", "picture", picture(value));
  if (kind.name === "label") return el("td", "label", el("span", `tag ${value === "length" || value === "rejected" ? "warn" : ""}`, value));
  const text = el("div", byId("full").checked ? "" : "cut", ...marked(value));
  text.addEventListener("click", () => getSelection().isCollapsed && text.classList.toggle("cut"));
  return el("td", "text", text);
}

function isPictures(rows, at) {
  return rows.some((row) => String(row[at] ?? "").startsWith(PICTURE));
}

// A row as its picture, with its prompt and its numbers under it.
function figure(columns, row, at) {
  const has = String(row[at] ?? "").startsWith(PICTURE), prompt = columns.indexOf("prompt");
  const numbers = columns.map((name, place) => [name, row[place]]).filter(([name, value]) => typeof value === "number" && name !== "group");
  const lines = numbers.map(([name, value]) => el("div", "number", el("span", "", `${spaced(name.slice(name.lastIndexOf("/") + 1))} `), format(value, 3)));
  return el("figure", "", has ? picture(row[at]) : "", el("figcaption", "", prompt < 0 ? "" : el("p", "", ...marked(String(row[prompt] ?? ""))), ...lines));
}

// A picture of the run.
function picture(source) {
  const image = el("img");
  image.src = source;
  image.alt = "";
  return image;
}

// How large a number is in its column. Where there are negative ones, the bars begin at zero.
function bar(value, { low, high }) {
  const signed = low < 0 && high > 0, line = el("div", signed && value < 0 ? "bar minus" : "bar");
  const share = signed ? Math.abs(value) / Math.max(-low, high) : (value - low) / (high - low);
  line.style.width = `${100 * share}%`;
  return line;
}

// The text with what is filtered for marked.
function marked(text) {
  const term = TERM.exec(byId("filter").value), lower = text.toLowerCase();
  const wanted = (term && term[2] === ":" ? term[3] : byId("filter").value).toLowerCase();
  if (!wanted || lower.length !== text.length) return [text];
  const parts = [];
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0 && parts.length < 200; at = lower.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), el("mark", "", text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}
