"use strict";
// Shared by charts and tables: elements, numbers, legend and read-out. Text from records is inserted only as text.

/** Create an element with attributes and children; string children become text nodes. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const MAX_OPEN = 16; // a legend with more lines scrolls

/** A row of buttons, one per line, that show or hide the line. */
function makeLegend(lines, { onToggle, onFocus }) {
  const legend = element("ul", { class: lines.length > MAX_OPEN ? "legend long" : "legend" });
  const buttons = lines.map((line, index) => {
    const button = element("button", { type: "button", "aria-pressed": "true" }, swatch(line), element("span", {}, line.name));
    button.title = line.name;
    button.addEventListener("click", () => set(index, button.getAttribute("aria-pressed") !== "true"));
    for (const event of ["mouseenter", "focus"]) button.addEventListener(event, () => onFocus(index));
    for (const event of ["mouseleave", "blur"]) button.addEventListener(event, () => onFocus(null));
    legend.append(element("li", {}, button));
    return button;
  });

  function set(index, isShown) {
    buttons[index].setAttribute("aria-pressed", String(isShown));
    onToggle(index, isShown);
  }

  return { legend, setAll: (isShown) => buttons.forEach((_, index) => set(index, isShown)) };
}

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Draw a legend sample of a line or of a bar's part. */
function swatch({ color, symbol }) {
  const sample = svg("svg", { width: 22, height: 12, viewBox: "-3 -1.64 6 3.28", "aria-hidden": "true" });
  const path = { d: symbol, fill: color, stroke: color, "stroke-width": 0.5 };
  if (symbol) sample.append(svg("path", path));
  return sample;
}

/** Format a value with as many digits as the page's data has. */
function readNumber(value) {
  if (value == null) return "–";
  const size = Math.abs(value), digits = size >= 1e4 ? 9 : 5;
  if (size > 0 && size < 1e-4) return String(Number(value.toPrecision(digits)));
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

/** Format a value of a series, with its spread. */
function valueWithSpread({ y, low, high }, index) {
  const value = readNumber(y[index]);
  return low[index] == null || high[index] == null ? value : `${value} (${readNumber(low[index])} to ${readNumber(high[index])})`;
}

/** The box next to the pointer that lists values. */
class ReadOut {
  constructor(host) {
    this.host = host;
    this.box = element("div", { class: "read-out", role: "status" });
    this.box.hidden = true;
    host.append(this.box);
  }

  /** Show `rows`, each {line, text}, under a heading; `left` and `top` are pixels within the host. */
  show(heading, rows, left, top) {
    const list = element("dl", {});
    for (const { line, text } of rows) list.append(element("dt", {}, swatch(line), element("span", {}, line.name)), element("dd", {}, text));
    this.box.replaceChildren(element("strong", {}, heading), list);
    this.box.hidden = false;
    const isRight = left > this.host.clientWidth / 2;
    const room = this.host.clientWidth - this.box.offsetWidth;
    const x = isRight ? left - this.box.offsetWidth - 16 : left + 16;
    this.box.style.left = `${Math.max(0, Math.min(room, x))}px`;
    this.box.style.top = `${Math.max(0, Math.min(top + 12, this.host.clientHeight - this.box.offsetHeight))}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}
