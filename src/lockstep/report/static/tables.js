"use strict";
// Tables that sort when a heading is clicked, and a chart's data as a table and as a CSV file.

const MAX_CELLS = 6000;

/** Return a cell's sort key: its number, or its text; null if it is empty. */
function cellKey(cell) {
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  return cell.classList.contains("nothing") ? null : cell.textContent.toLowerCase();
}

/** Compare sort keys; ascending order has numbers before text. Empty cells are last in both directions. */
function compareKeys(a, b, direction) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a !== typeof b) return typeof a === "number" ? -direction : direction;
  return direction * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
}

function makeSortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      headings.forEach((other) => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].map((row) => [cellKey(row.cells[column]), row]);
      rows.sort(([a], [b]) => compareKeys(a, b, direction));
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}

/** Show a hint above a box while it can scroll sideways, and fade its right edge until it is scrolled to the end. */
function addScrollHint(box) {
  const hint = element("p", { class: "note hint" }, "Scroll sideways for more →");
  const update = () => {
    hint.hidden = box.scrollWidth <= box.clientWidth;
    box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  };
  box.before(hint);
  box.addEventListener("scroll", update);
  new ResizeObserver(update).observe(box);
  update();
}

/** Encode rows as CSV; text cells are kept from being read as formulas. */
function csv(rows) {
  const cell = (value) => {
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value ?? "";
    return `"${String(text).replaceAll('"', '""')}"`;
  };
  return rows.map((row) => row.map((value) => cell(value ?? "")).join(",")).join("\r\n");
}

/** Return one row per value: line, x, value, low, high. */
function csvRows(data) {
  const values = ({ s, x, y, low, high }) => x.map((at, index) => [data.series[s].name, data.categories?.[at] ?? at, y[index], low[index], high[index]]);
  return [[data.categories ? "part" : "line", data.xLabel, data.yLabel, "low", "high"], ...data.spec.data.values.flatMap(values)];
}

function saveFile(name, text) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Create the table of a chart's data, limited to MAX_CELLS cells: x, then each series' value at x. */
function dataTable(data) {
  const rows = data.spec.data.values.map((row) => ({ ...row, at: new Map(row.x.map((x, index) => [x, index])) }));
  const places = [...new Set(rows.flatMap(({ x }) => x))].sort((a, b) => a - b);
  const shown = Math.min(places.length, Math.max(20, Math.floor(MAX_CELLS / (rows.length + 1))));
  const cell = (text) => element("td", { class: "number" }, text);
  const body = element("tbody");
  for (const x of places.slice(0, shown)) {
    const name = data.categories ? data.categories[x] : readNumber(x);
    body.append(element("tr", {}, ...[name, ...rows.map((row) => (row.at.has(x) ? valueWithSpread(row, row.at.get(x)) : ""))].map(cell)));
  }
  const columns = [data.xLabel, ...data.series.map(({ name }) => name)];
  const head = element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name))));
  const save = element("button", { type: "button" }, "Save as CSV");
  save.addEventListener("click", () => saveFile(`${data.key}.csv`, csv(csvRows(data))));
  const about = shown < places.length ? `The first ${shown} of ${places.length} rows; the CSV file has all of them. ` : "";
  const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Data of ${data.title}` });
  scroll.append(element("table", {}, head, body));
  return [element("p", { class: "note" }, about, save), scroll];
}
