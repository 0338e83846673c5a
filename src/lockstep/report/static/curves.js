"use strict";
// A chart of curves, drawn by uPlot, with zoom, read-out and legend. Each line has its own x values (uPlot's mode 2),
// so runs of different lengths and speeds need no common grid.

const drawStretch = uPlot.paths.linear();
const MOST_READ_OUT = 12;
const SAME_PLACE_PIXELS = 12;
const PAPER = { width: 900, height: 360 }; // pixels of a printed chart, independent of the screen
const FEW_POINTS = 40; // up to this many points in view, every point of a line gets a marker

/** Return the first index of an ascending array whose element is at least `value`. */
function firstAtLeast(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearestIndex(values, value) {
  const after = Math.min(firstAtLeast(values, value), values.length - 1);
  return after > 0 && value - values[after - 1] < values[after] - value ? after - 1 : after;
}

/** Extend a range by `share` at both ends; for a single value, return a range around it. */
function padded(low, high, scale, share) {
  if (scale === "linear") {
    const room = high > low ? (high - low) * share : Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }
  const room = high > low ? (high / low) ** share : 2;
  return [low / room, high * room];
}

/** Return the runs of consecutive indices from first to last at which a line has a spread. */
function stretches(line, first, last) {
  const found = [];
  let isOpen = false;
  for (let index = first; index <= last; index++) {
    const isKnown = line.low[index] !== null && line.high[index] !== null;
    if (isKnown && !isOpen) found.push([]);
    if (isKnown) found.at(-1).push(index);
    isOpen = isKnown;
  }
  return found;
}

class CurveChart {
  constructor(host, data) {
    this.data = data;
    this.lines = data.lines.map((line) => ({ ...line, x: data.x[line.x], isShown: true }));
    this.isWholeShare = this.isOnPaper = false;
    this.isCrowded = this.lines.length > MOST_READ_OUT;
    this.xScale = { linear: (value) => value, back: (value) => value };
    if (data.xScale !== "linear") this.xScale = { linear: Math.log, back: Math.exp };
    const places = new Set(data.x.flat());
    this.onlyPlace = places.size === 1 ? [...places] : null;
    this.whole = this.xRange();
    this.view = this.whole;
    this.near = new Map();
    this.plot = element("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${data.title}. ${data.keys}` });
    this.legend = makeLegend(this.lines, {
      onToggle: (index, isShown) => this.toggle(index, isShown),
      onFocus: (index) => this.plotter.setSeries(index === null ? null : index + 1, { focus: true }),
    });
    host.append(this.toolbar(), this.plot, this.legend.legend);
    this.plotter = new uPlot(this.options(), [null, ...this.lines.map((line) => [line.x, line.y])], this.plot);
    this.readOut = new ReadOut(this.plot);
    this.listen();
  }

  xRange() {
    const ends = this.lines.flatMap((line) => [line.x[0], line.x.at(-1)]);
    return padded(Math.min(...ends), Math.max(...ends), this.data.xScale, this.data.xScale === "linear" ? 0.015 : 0.04);
  }

  /** Return the y range: from zero if the chart asks for it, else fitted to the data without extending below zero. */
  yRange() {
    let low = Infinity, high = -Infinity;
    for (const line of this.lines.filter((line) => line.isShown)) {
      const [first, last] = this.inView(line, 0);
      for (const values of [line.y, line.low, line.high]) {
        for (let index = first; values && index <= last; index++) {
          const value = values[index];
          if (value === null) continue;
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
    }
    if (low > high) return this.yShown ?? [1, 2];
    const [floor, top] = padded(low, high, this.data.yScale, 0.05);
    if (this.isWholeShare) this.yShown = [0, Math.max(102, top)];
    else if (this.data.yScale !== "linear" || low < 0) this.yShown = [floor, top];
    else if (this.data.fromZero) this.yShown = [0, high * 1.05 || 1];
    else this.yShown = [low < high ? Math.max(0, floor) : floor, top];
    return this.yShown;
  }

  /** Return the first and last index of a line's points in view, extended by `beyond` points at both ends. */
  inView(line, beyond) {
    const first = firstAtLeast(line.x, this.view[0]) - beyond, last = firstAtLeast(line.x, this.view[1]) - 1 + beyond;
    return [Math.max(0, first), Math.min(line.x.length - 1, last)];
  }

  options() {
    const { data } = this;
    const distribution = (scale) => (scale === "linear" ? { distr: 1 } : { distr: 3, log: scale === "log2" ? 2 : 10 });
    const facets = [{ scale: "x", auto: false }, { scale: "y", auto: false }];
    return {
      mode: 2,
      ...this.size(),
      padding: [data.marks.length ? 22 : 10, this.lines.some((line) => line.remark) ? 56 : 14, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, ...distribution(data.xScale), range: () => this.view },
        y: { ...distribution(data.yScale), range: () => this.yRange() },
      },
      axes: [{ ...this.axis("x", data.xLabel, data.xNumbers), size: 34 }, { ...this.axis("y", data.yLabel, data.yNumbers), size: fitted }],
      focus: { alpha: 0.2 },
      cursor: {
        drag: { x: true, y: false, setScale: false },
        dataIdx: (_, index) => this.nearestPoint(index),
        bind: { dblclick: () => () => this.show(this.whole) },
        points: { size: 8, width: 1 },
      },
      series: [{}, ...this.lines.map((line) => this.series(line, facets))],
      hooks: {
        drawAxes: [(plotter) => this.drawBelow(plotter)],
        drawSeries: [(plotter, index) => this.drawMarkers(plotter, this.lines[index - 1])],
        draw: [(plotter) => this.drawRemarks(plotter)],
        setSelect: [(plotter) => this.zoomToSelection(plotter)],
        setCursor: [(plotter) => this.showValues(plotter)],
      },
    };
  }

  series(line, facets) {
    return {
      facets,
      auto: false,
      label: line.name,
      stroke: () => theme.color(line.color),
      width: this.isCrowded ? 1 : line.color === "text" ? 1.25 : 2,
      dash: DASHES[line.look],
      spanGaps: false,
      points: { show: false },
      paths: (plotter, index) => (line.look === "points" ? null : drawStretch(plotter, index, ...this.inView(line, 1))),
    };
  }

  axis(key, label, numbers) {
    const scale = this.data[`${key}Scale`], measured = key === "x" ? this.data.xPlaces : [];
    const only = key === "x" ? this.onlyPlace : null;
    const isCount = key === "x" && this.data.x.every((values) => values.every(Number.isInteger));
    return {
      scale: key,
      label,
      labelSize: 24,
      labelFont: "13px system-ui, sans-serif",
      font: "12px system-ui, sans-serif",
      stroke: () => theme.color("text"),
      grid: { stroke: () => theme.color("grid"), width: 1 },
      ticks: { stroke: () => theme.color("grid"), width: 1, size: 5 },
      splits: (plotter, _, low, high) => {
        if (only) return only;
        const room = key === "x" ? plotter.width / 80 : plotter.height / 40;
        const places = measured.filter((place) => place >= low && place <= high);
        return places.length > 1 && places.length <= room * 1.5 ? places : axisPlaces(scale, low, high, numbers, Math.max(3, room), isCount);
      },
      filter: (_, places) => places,
      values: (_, places) => places.map((place) => axisNumber(place, numbers)),
    };
  }

  size() {
    if (this.isOnPaper) return PAPER;
    const width = Math.max(240, this.plot.clientWidth);
    return { width, height: Math.round(Math.max(260, Math.min(430, width * 0.5))) };
  }

  toolbar() {
    this.range = element("output", { title: this.data.xLabel });
    const bar = element("div", { class: "toolbar" }, this.range);
    const add = (label, about, act) => {
      const button = element("button", { type: "button", "aria-label": `${about}: ${this.data.title}`, title: about }, label);
      button.addEventListener("click", act);
      bar.append(button);
      return button;
    };
    if (this.data.isShare) {
      const button = add("0–100", "Show 0 to 100 %", () => {
        this.isWholeShare = !this.isWholeShare;
        button.setAttribute("aria-pressed", String(this.isWholeShare));
        this.show(this.view);
      });
      button.setAttribute("aria-pressed", "false");
    }
    if (this.lines.length > 4) {
      add("All lines", "Show all lines", () => this.legend.setAll(true));
      add("No lines", "Hide all lines", () => this.legend.setAll(false));
    }
    add("+", "Zoom in", () => this.zoom(0.5));
    add("−", "Zoom out", () => this.zoom(2));
    add("Reset", "Show the whole range", () => this.show(this.whole));
    return bar;
  }

  listen() {
    const actions = {
      ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
      "-": () => this.zoom(2), 0: () => this.show(this.whole), Escape: () => this.readOut.hide(),
    };
    this.plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
      event.preventDefault();
      actions[event.key]();
    });
    new ResizeObserver(() => {
      const size = this.size();
      if (size.width !== this.plotter.width) this.plotter.setSize(size);
    }).observe(this.plot);
    const printing = (isOnPaper) => {
      this.isOnPaper = isOnPaper;
      this.plotter.setSize(this.size());
    };
    addEventListener("beforeprint", () => printing(true));
    addEventListener("afterprint", () => printing(false));
    theme.onChange(() => this.plotter.redraw(false, true));
  }

  /** Show a range of x, clipped to the whole range. */
  show([low, high]) {
    this.view = [Math.max(low, this.whole[0]), Math.min(high, this.whole[1])];
    this.plotter.setScale("x", { min: this.view[0], max: this.view[1] });
    const isWhole = this.view[0] === this.whole[0] && this.view[1] === this.whole[1];
    this.range.textContent = isWhole ? "" : this.view.map(readNumber).join(" to ");
  }

  zoom(factor) {
    const [low, high] = this.view.map(this.xScale.linear), [start, end] = this.whole.map(this.xScale.linear);
    const half = ((high - low) * factor) / 2, middle = (low + high) / 2;
    if (half < (end - start) * 1e-5) return;
    this.show([middle - half, middle + half].map(this.xScale.back));
  }

  pan(share) {
    const [low, high] = this.view.map(this.xScale.linear), [start, end] = this.whole.map(this.xScale.linear);
    const shift = Math.max(start - low, Math.min(end - high, (high - low) * share));
    this.show([low + shift, high + shift].map(this.xScale.back));
  }

  zoomToSelection(plotter) {
    const { left, width } = plotter.select;
    if (width < 4) return;
    this.show([plotter.posToVal(left, "x"), plotter.posToVal(left + width, "x")]);
    plotter.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  toggle(index, isShown) {
    this.lines[index].isShown = isShown;
    this.plotter.setSeries(index + 1, { show: isShown });
    this.show(this.view);
  }

  /** uPlot calls this for each line in turn; the first call finds the points near the pointer. */
  nearestPoint(index) {
    if (index === 1) this.near = this.pointsNear(this.plotter);
    return this.near.get(index - 1)?.index ?? null;
  }

  /** Return each visible line's point nearest in x; if there are many lines, only those nearest in y. */
  pointsNear(plotter) {
    const { left, top } = plotter.cursor, at = plotter.posToVal(left, "x"), found = [];
    this.lines.forEach((line, number) => {
      if (!line.isShown) return;
      const index = nearestIndex(line.x, at), place = plotter.valToPos(line.x[index], "x");
      if (line.y[index] === null) return;
      const height = Math.abs(plotter.valToPos(line.y[index], "y") - top);
      found.push([number, { line, index, place, away: Math.abs(place - left), height }]);
    });
    const nearest = found.reduce((best, [, point]) => (best && best.away <= point.away ? best : point), null);
    const beside = found.filter(([, point]) => Math.abs(point.place - nearest.place) < SAME_PLACE_PIXELS);
    return new Map(beside.sort(([, a], [, b]) => a.height - b.height).slice(0, MOST_READ_OUT));
  }

  showValues(plotter) {
    const { left, top } = plotter.cursor, points = [...this.near.values()];
    if (left < 0 || !points.length) return this.readOut.hide();
    const nearest = points.reduce((best, point) => (point.away < best.away ? point : best));
    const x = nearest.line.x[nearest.index];
    const rows = points.sort((a, b) => b.line.y[b.index] - a.line.y[a.index]).map(({ line, index }) => {
      const elsewhere = line.x[index] === x ? "" : ` at ${readNumber(line.x[index])}`;
      return { line, text: valueWithSpread(line, index) + elsewhere };
    });
    const over = plotter.over;
    this.readOut.show(`${this.data.xLabel}: ${readNumber(x)}`, rows, left + over.offsetLeft, top + over.offsetTop);
  }

  /** Draw spreads as bands, and marks as thin lines with labels above where there is room. */
  drawBelow(plotter) {
    const { ctx, bbox } = plotter, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.fillStyle = ctx.strokeStyle = theme.color("muted");
    ctx.lineWidth = 1;
    let free = 0;
    for (const mark of this.data.marks.filter(({ x }) => x >= this.view[0] && x <= this.view[1])) {
      const x = Math.round(plotter.valToPos(mark.x, "x", true)) + 0.5, width = ctx.measureText(mark.text).width;
      ctx.stroke(new Path2D(`M${x},${bbox.top}V${bbox.top + bbox.height}`));
      const start = Math.max(free, Math.min(x - width / 2, plotter.ctx.canvas.width - width));
      if (start > x || start + width > ctx.canvas.width) continue;
      ctx.fillText(mark.text, start, bbox.top - 6 * ratio);
      free = start + width + 8 * ratio;
    }
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const line of this.lines) {
      if (!line.isShown || !line.low || !line.high) continue;
      if (line.look === "points") this.drawErrorBars(plotter, line);
      else this.drawBand(plotter, line);
    }
    ctx.restore();
  }

  drawBand(plotter, line) {
    const { ctx } = plotter, band = new Path2D();
    const place = (index, values) => [plotter.valToPos(line.x[index], "x", true), plotter.valToPos(values[index], "y", true)];
    for (const stretch of stretches(line, ...this.inView(line, 1))) {
      band.moveTo(...place(stretch[0], line.high));
      for (const index of stretch) band.lineTo(...place(index, line.high));
      for (const index of stretch.reverse()) band.lineTo(...place(index, line.low));
      band.closePath();
    }
    ctx.globalAlpha = 0.18;
    ctx.fillStyle = theme.color(line.color);
    ctx.fill(band);
    ctx.globalAlpha = 1;
  }

  drawErrorBars(plotter, line) {
    const { ctx } = plotter, [first, last] = this.inView(line, 0);
    ctx.strokeStyle = theme.color(line.color);
    for (let index = first; index <= last; index++) {
      if (line.low[index] === null || line.high[index] === null) continue;
      const x = plotter.valToPos(line.x[index], "x", true);
      const low = plotter.valToPos(line.low[index], "y", true), high = plotter.valToPos(line.high[index], "y", true);
      ctx.stroke(new Path2D(`M${x},${low}V${high}`));
    }
  }

  /** Draw remarks to the right of the axes, each at its line's last visible point or below the previous remark. */
  drawRemarks(plotter) {
    const { ctx, bbox } = plotter, ratio = devicePixelRatio, remarks = [];
    for (const line of this.lines.filter((line) => line.isShown && line.remark)) {
      const [first, last] = this.inView(line, 0);
      const value = line.y.slice(first, last + 1).findLast((value) => value !== null);
      if (value !== undefined) remarks.push({ line, top: plotter.valToPos(value, "y", true) });
    }
    ctx.save();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    let free = 0;
    for (const { line, top } of remarks.sort((a, b) => a.top - b.top)) {
      const y = Math.max(free, top);
      ctx.fillStyle = theme.color(line.color);
      ctx.fillText(line.remark, bbox.left + bbox.width + 6 * ratio, y);
      free = y + 15 * ratio;
    }
    ctx.restore();
  }

  /** Draw markers if points are few; otherwise only at isolated points, which have no line segment. */
  drawMarkers(plotter, line) {
    const { ctx, bbox } = plotter, [first, last] = this.inView(line, 0), size = (this.isCrowded ? 2.2 : 3.6) * devicePixelRatio;
    const isEach = line.look === "points" || (line.marker !== null && last - first < FEW_POINTS);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - size, bbox.top - size, bbox.width + 2 * size, bbox.height + 2 * size);
    ctx.clip();
    ctx.fillStyle = theme.color(line.color);
    for (let index = first; index <= last; index++) {
      const isAlone = line.y[index - 1] == null && line.y[index + 1] == null;
      if (line.y[index] === null || !(isEach || isAlone)) continue;
      const x = plotter.valToPos(line.x[index], "x", true), y = plotter.valToPos(line.y[index], "y", true);
      ctx.fill(new Path2D(markerPath(line.marker ?? 0, x, y, size)));
    }
    ctx.restore();
  }
}

function valueWithSpread(line, index) {
  const low = line.low?.[index], high = line.high?.[index], value = readNumber(line.y[index]);
  return low == null || high == null ? value : `${value} (${readNumber(low)} to ${readNumber(high)})`;
}

/** Return the width that the y axis needs for its tick labels. */
function fitted(plotter, values, axis, cycle) {
  if (cycle > 1) return plotter.axes[axis]._size;
  const longest = (values ?? []).reduce((best, value) => (value.length > best.length ? value : best), "");
  return 18 + longest.length * 7;
}
