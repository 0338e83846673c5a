"use strict";
// Shared by curves and bars: elements, legend, read-out and colors. Text from records is inserted only as text.

/** Create an element with attributes and children; string children become text nodes. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const MOST_OPEN = 16; // a legend with more lines scrolls

/** A row of buttons, one per line, that show or hide the line. */
function makeLegend(lines, { onToggle, onFocus }) {
  const legend = element("ul", { class: lines.length > MOST_OPEN ? "legend long" : "legend" });
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

const DASHES = { solid: [], dashed: [6, 4], dotted: [2, 3], points: [] };
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Draw a legend sample of a line or of a bar's part. */
function swatch(line) {
  const sample = svg("svg", { width: 22, height: 12, "aria-hidden": "true" });
  if (line.look === "bar") {
    sample.append(svg("rect", { x: 4, y: 1, width: 14, height: 10 }));
  } else {
    if (line.look !== "points") {
      const stroke = { x1: 0, x2: 22, y1: 6, y2: 6, "stroke-width": 2, "stroke-dasharray": DASHES[line.look].join(" ") };
      sample.append(svg("line", stroke));
    }
    if (line.marker != null) sample.append(svg("path", { d: markerPath(line.marker, 11, 6, 4) }));
  }
  sample.style.color = `var(--${line.color})`;
  return sample;
}

// The corners of each marker at size 1; the first is a circle.
const MARKERS = [
  null,
  [[-0.85, -0.85], [0.85, -0.85], [0.85, 0.85], [-0.85, 0.85]],
  [[0, -1.2], [1.2, 0], [0, 1.2], [-1.2, 0]],
  [[0, -1.1], [1.05, 0.8], [-1.05, 0.8]],
  [[0, 1.1], [1.05, -0.8], [-1.05, -0.8]],
  [[-0.4, -1.1], [0.4, -1.1], [0.4, -0.4], [1.1, -0.4], [1.1, 0.4], [0.4, 0.4], [0.4, 1.1], [-0.4, 1.1], [-0.4, 0.4],
    [-1.1, 0.4], [-1.1, -0.4], [-0.4, -0.4]],
  [[0, -0.5], [0.6, -1.1], [1.1, -0.6], [0.5, 0], [1.1, 0.6], [0.6, 1.1], [0, 0.5], [-0.6, 1.1], [-1.1, 0.6], [-0.5, 0],
    [-1.1, -0.6], [-0.6, -1.1]],
];

/** Return a marker as an SVG path, for an SVG or a canvas. */
function markerPath(marker, x, y, size) {
  const corners = MARKERS[marker % MARKERS.length];
  if (!corners) return `M${x - size},${y}a${size},${size} 0 1 0 ${2 * size},0a${size},${size} 0 1 0 ${-2 * size},0z`;
  return `M${corners.map(([right, down]) => `${x + right * size},${y + down * size}`).join("L")}z`;
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
