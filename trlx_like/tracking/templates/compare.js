// What differs between runs: their results and options, a column for each configuration.

function showCompared() {
  if (!data.compared) return;
  const { groups, results, options } = data.compared;
  const line = (name, cells) => el("tr", "", el("th", "", name), ...cells.map((cell) => el("td", "", ...cell)));
  const heads = groups.map((group, place) => el("td", colorOf(group, place), el("i"), group.label));
  const rows = [
    el("tr", "", el("th"), ...heads),
    line("runs", groups.map((group) => [group.runs.join(", ")])),
    ...results.map((row) => line(`${row.name}, last`, row.cells.map(resultCell))),
    ...options.map((row) => line(row.name, row.cells.map((cell) => [cell ?? "\u2013"]))),
  ];
  byId("compared").append(el("div", "compared", el("table", "", ...rows)));
  byId("gallery").checked = false; // it would show the pictures of the first run alone
}

// The median over runs, and behind it the lowest and the highest.
function resultCell(cell) {
  if (!cell) return ["\u2013"];
  const several = cell.low < cell.high;
  return [format(cell.value), several ? el("small", "", ` (${format(cell.low)} to ${format(cell.high)})`) : ""];
}
