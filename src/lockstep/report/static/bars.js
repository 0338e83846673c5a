"use strict";
// Stacked bars, drawn as an SVG; the pointer or the arrow keys select a category and show its values.

const BAR_MARGIN = { left: 64, right: 12, top: 12, bottom: 50 };

class BarChart {
  constructor(host, data) {
    this.data = data;
    this.stacks = data.stacks.map((stack) => ({ ...stack, isShown: true, look: "bar" }));
    this.whole = { name: "measured total", color: "text", look: "solid", values: data.totals, isShown: data.totals !== null };
    this.chosen = null;
    const about = `${data.title}. ${data.keys}`;
    this.plot = element("div", { class: "plot", tabindex: "0", role: "group", "aria-label": about });
    const named = this.whole.isShown ? [...this.stacks, this.whole] : this.stacks;
    const { legend } = makeLegend(named, {
      onToggle: (index, isShown) => {
        named[index].isShown = isShown;
        this.draw();
      },
      onFocus: () => {},
    });
    host.append(this.plot, legend);
    this.readOut = new ReadOut(this.plot);
    this.listen();
    this.draw();
  }

  listen() {
    this.plot.addEventListener("keydown", (event) => {
      const last = this.data.categories.length - 1, at = this.chosen;
      const next = { ArrowLeft: at === null ? last : Math.max(0, at - 1), ArrowRight: at === null ? 0 : Math.min(last, at + 1) };
      if (event.key === "Escape") this.choose(null);
      if (!(event.key in next)) return;
      event.preventDefault();
      this.choose(next[event.key]);
    });
    this.plot.addEventListener("mouseleave", () => this.choose(null));
    this.plot.addEventListener("blur", () => this.choose(null));
    new ResizeObserver(() => this.plot.clientWidth !== this.width && this.draw()).observe(this.plot);
  }

  draw() {
    this.width = this.plot.clientWidth;
    const width = Math.max(240, this.width), height = Math.round(Math.max(260, Math.min(400, width * 0.5)));
    const shown = this.stacks.filter((stack) => stack.isShown), { categories } = this.data;
    const totals = this.whole.isShown ? this.whole.values : [];
    const tops = categories.map((_, index) => shown.reduce((sum, stack) => sum + stack.values[index], 0));
    const high = Math.max(...tops, ...totals, 1e-12) * 1.05;
    const inner = { width: width - BAR_MARGIN.left - BAR_MARGIN.right, height: height - BAR_MARGIN.top - BAR_MARGIN.bottom };
    this.step = inner.width / categories.length;
    const y = (value) => BAR_MARGIN.top + inner.height * (1 - value / high);
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "bars", "aria-hidden": "true" });
    for (const place of roundPlaces(0, high, 6)) {
      picture.append(svg("line", { class: "grid", x1: BAR_MARGIN.left, x2: width - BAR_MARGIN.right, y1: y(place), y2: y(place) }));
      picture.append(label(axisNumber(place, this.data.yNumbers), BAR_MARGIN.left - 8, y(place) + 4, "end"));
    }
    categories.forEach((name, index) => picture.append(this.column(shown, index, y), this.columnName(name, index, height)));
    picture.append(label(this.data.xLabel, BAR_MARGIN.left + inner.width / 2, height - 6, "middle"));
    const side = label(this.data.yLabel, 0, 0, "middle");
    side.setAttribute("transform", `translate(14 ${BAR_MARGIN.top + inner.height / 2}) rotate(-90)`);
    picture.append(side);
    this.picture?.remove();
    this.picture = picture;
    this.plot.prepend(picture);
  }

  columnName(name, index, height) {
    const most = Math.max(3, Math.floor(this.step / 8));
    const text = name.length > most ? `${name.slice(0, most - 1)}…` : name;
    return label(text, BAR_MARGIN.left + this.step * (index + 0.5), height - BAR_MARGIN.bottom + 18, "middle");
  }

  column(shown, index, y) {
    const group = svg("g", {}), middle = BAR_MARGIN.left + this.step * (index + 0.5), half = Math.min(48, this.step * 0.31);
    let floor = 0;
    for (const stack of shown) {
      const value = stack.values[index], top = y(floor + value);
      const part = svg("rect", { x: middle - half, y: top, width: 2 * half, height: Math.max(0, y(floor) - top) });
      part.style.fill = `var(--${stack.color})`;
      group.append(part);
      floor += value;
    }
    if (this.whole.isShown) {
      const at = y(this.whole.values[index]);
      group.append(svg("line", { class: "total", x1: middle - half * 1.25, x2: middle + half * 1.25, y1: at, y2: at }));
    }
    const target = svg("rect", { class: "target", x: middle - this.step / 2, y: 0, width: this.step, height: y(0) });
    target.addEventListener("mouseenter", () => this.choose(index));
    group.append(target);
    return group;
  }

  choose(index) {
    this.chosen = index;
    if (index === null) return this.readOut.hide();
    const shown = this.stacks.filter((stack) => stack.isShown).reverse();
    const rows = shown.map((line) => ({ line, text: readNumber(line.values[index]) }));
    const sum = shown.reduce((total, stack) => total + stack.values[index], 0);
    rows.push({ line: { name: "sum", color: "text", look: "points" }, text: readNumber(sum) });
    if (this.whole.isShown) rows.push({ line: this.whole, text: readNumber(this.whole.values[index]) });
    const left = BAR_MARGIN.left + this.step * (index + 0.5);
    return this.readOut.show(`${this.data.xLabel}: ${this.data.categories[index]}`, rows, left + (left > this.width / 2 ? -1 : 1) * this.step * 0.32, BAR_MARGIN.top);
  }
}

function label(text, x, y, anchor) {
  const made = svg("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}
