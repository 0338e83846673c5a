"use strict";
// A chart of the page: Vega draws its specification; legend, zoom and read-out set the parameters of the drawing.

const MAX_READ_OUT = 12;
const SAME_PLACE_PIXELS = 12;
const MIN_DRAG_PIXELS = 4;
const DRAWING = { ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: false, logLevel: 1 };

class FigureChart {
  constructor(host, data) {
    this.data = data;
    this.rows = data.spec.data.values;
    this.hidden = new Set();
    this.canZoom = data.canZoom;
    this.plot = element("div", { class: "plot", role: "group", "aria-label": `${data.title}. ${data.keys}` });
    this.canvas = element("div", { class: "canvas", "aria-hidden": "true" });
    this.plot.append(this.canvas);
    host.append(this.plot);
    this.plot.tabIndex = 0;
    this.legend = makeLegend(data.series, {
      onToggle: (index, isShown) => this.toggle(index, isShown),
      onFocus: (index) => this.set("focus", index),
    });
    if (this.canZoom) host.prepend(this.toolbar());
    host.append(this.legend.legend);
    this.readOut = new ReadOut(this.plot);
    const ends = this.rows.flatMap(({ x }) => [x[0], x.at(-1)]);
    this.whole = [Math.min(...ends), Math.max(...ends)];
    this.listen();
  }

  async draw() {
    const { view } = await vegaEmbed(this.canvas, this.data.spec, DRAWING);
    this.view = view;
    if (this.hidden.size) this.set("hidden", [...this.hidden]);  // chosen before
    if (!this.canZoom) return;
    let selected = null;
    view.addSignalListener("brush", (_, { x }) => {
      const pixels = selected?.map((end) => this.place(end));
      if (!x && pixels && Math.abs(pixels[1] - pixels[0]) >= MIN_DRAG_PIXELS) this.show(selected);
      selected = x ?? null;
    });
  }

  set(parameter, value) {
    return this.view?.signal(parameter, value).runAsync();
  }

  toolbar() {
    const { data } = this;
    this.range = element("output", { title: data.xLabel });
    const bar = element("div", { class: "toolbar" }, this.range);
    const add = (label, about, act) => {
      const button = element("button", { type: "button", "aria-label": `${about}: ${data.title}`, title: about }, label);
      button.addEventListener("click", () => act(button));
      bar.append(button);
      return button;
    };
    if (data.isShare) {
      const toggle = (button) => {
        const isWhole = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(isWhole));
        this.set("whole", isWhole);
      };
      add("0–100", "Show 0 to 100 %", toggle).setAttribute("aria-pressed", "false");
    }
    if (data.series.length > 4) {
      add("All lines", "Show all lines", () => this.legend.setAll(true));
      add("No lines", "Hide all lines", () => this.legend.setAll(false));
    }
    add("+", "Zoom in", () => this.zoom(0.5));
    add("−", "Zoom out", () => this.zoom(2));
    add("Reset", "Show the whole range", () => this.show(this.whole));
    return bar;
  }

  listen() {
    const zooming = {
      ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
      "-": () => this.zoom(2), 0: () => this.show(this.whole),
    };
    const choosing = { ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1) };
    const actions = { ...(this.canZoom ? zooming : choosing), Escape: () => this.readOut.hide() };
    this.plot.addEventListener("keydown", (event) => {
      if (!this.view || event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
      event.preventDefault();
      actions[event.key]();
    });
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.view) return;
      const box = this.canvas.getBoundingClientRect(), [left, top] = this.view.origin();
      this.showValues(event.clientX - box.left - left, event.clientY - box.top - top);
    });
    for (const event of ["pointerleave", "blur"]) this.plot.addEventListener(event, () => this.readOut.hide());
    if (this.canZoom) this.plot.addEventListener("dblclick", () => this.show(this.whole));
  }

  toggle(index, isShown) {
    if (isShown) this.hidden.delete(index);
    else this.hidden.add(index);
    this.set("hidden", [...this.hidden]);
  }

  /** Show a range of x, clipped to the whole range. */
  show([low, high]) {
    const [start, end] = this.whole;
    const view = low <= start && high >= end ? [null, null] : [Math.max(low, start), Math.min(high, end)];
    this.set("view", view);
    this.range.textContent = view[0] === null ? "" : view.map(readNumber).join(" to ");
  }

  /** Show the range between two places, as shares of the width. */
  showPlaces(left, right) {
    if (this.view) this.show([left, right].map((share) => this.view.scale("x").invert(share * this.view.width())));
  }

  zoom(factor) {
    this.showPlaces(0.5 - factor / 2, 0.5 + factor / 2);
  }

  pan(share) {
    const [start, end] = this.whole.map((x) => this.view.scale("x")(x) / this.view.width());
    const shift = Math.min(Math.max(share, Math.min(start, 0)), Math.max(end - 1, 0));
    this.showPlaces(shift, 1 + shift);
  }

  /** Show the values of the next or previous bar or point. */
  step(by) {
    const stops = [...new Set(this.rows.flatMap(({ x }) => x))].sort((a, b) => a - b), last = stops.length - 1;
    this.chosen = this.chosen == null ? (by > 0 ? 0 : last) : Math.min(last, Math.max(0, this.chosen + by));
    this.showValues(this.place(stops[this.chosen]), 0);
  }

  place(x) {
    const scale = this.view.scale("x");
    return scale(x) + (scale.bandwidth ? scale.bandwidth() / 2 : 0);
  }

  /** Show each visible line's point nearest in x; of many lines, only those nearest in y. */
  showValues(left, top) {
    if (!this.view || left < 0 || left > this.view.width()) return this.readOut.hide();
    const points = this.rows.filter(({ s }) => !this.hidden.has(s)).map((row) => this.nearest(row, left)).filter(Boolean);
    if (!points.length) return this.readOut.hide();
    const { x, place } = points.reduce((best, point) => (point.away < best.away ? point : best));
    const y = this.view.scale("y"), height = ({ value }) => Math.abs(y(value) - top);
    const beside = points.filter((point) => Math.abs(point.place - place) < SAME_PLACE_PIXELS);
    const listed = beside.sort((a, b) => height(a) - height(b)).slice(0, MAX_READ_OUT);
    listed.sort(this.data.categories ? (a, b) => b.row.s - a.row.s : (a, b) => b.value - a.value);
    const rows = listed.map(({ row, index, x: own }) => {
      const elsewhere = own === x ? "" : ` at ${readNumber(own)}`;
      return { line: this.data.series[row.s], text: valueWithSpread(row, index) + elsewhere };
    });
    if (this.data.categories) {
      const sum = beside.reduce((total, { row, value }) => total + (row.s < this.data.stacks ? value : 0), 0);
      rows.push({ line: { name: "sum", symbol: "" }, text: readNumber(sum) });
    }
    const [right, down] = this.view.origin(), heading = this.data.categories?.[x] ?? readNumber(x);
    this.readOut.show(`${this.data.xLabel}: ${heading}`, rows, place + right, top + down);
  }

  /** Return a row's value nearest to a place, in pixels from the left of the axes; null if it has none. */
  nearest(row, left) {
    let best = null;
    row.x.forEach((x, index) => {
      const place = this.place(x), away = Math.abs(place - left), value = row.y[index];
      if (value !== null && (!best || away < best.away)) best = { row, index, x, value, place, away };
    });
    return best;
  }
}
