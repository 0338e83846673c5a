// What a reader does with the report page, and what is seen then, for test_page_in_browser.py.

const seen = { errors: [] };
addEventListener("error", (event) => seen.errors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => seen.errors.push(`${event.violatedDirective} ${event.blockedURI}`));

const texts = new Set();
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  texts.add(text);
  return fillText.call(this, text, ...place);
};

async function visit() {
  const pause = () => new Promise((done) => setTimeout(done, 100));
  const all = (css, within = document) => [...within.querySelectorAll(css)];
  const one = (css) => document.querySelector(css);
  const press = async (element, key) => {
    element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    await pause();
  };

  // A browser whose time is virtual may draw no frame, so that nothing comes into view.
  seen.charts = all("figure[data-chart]").length;
  seen.drawn = all("figure[data-drawn]").length;
  seen.texts = [...texts];
  seen.tooWide = all(".table .scroll").filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.parentElement.id);
  seen.pageWidth = [document.documentElement.scrollWidth, innerWidth];
  seen.hints = all(".table .hint").map((hint) => [hint.parentElement.id, hint.hidden]);
  const theme = () => document.documentElement.dataset.theme;
  seen.themes = { before: theme() };
  const widths = () => all(".uplot").map((plot) => plot.clientWidth);
  seen.widths = { before: widths() };
  dispatchEvent(new Event("beforeprint"));
  seen.themes.print = theme();
  await pause();
  seen.widths.print = widths();
  dispatchEvent(new Event("afterprint"));
  seen.themes.after = theme();
  await pause();
  seen.widths.after = widths();
  seen.title = document.title;

  const plot = one("#many .plot");
  seen.reachable = plot.tabIndex;
  seen.views = [];
  for (const key of ["+", "ArrowRight", "-", "0"]) {
    await press(plot, key);
    seen.views.push(one("#many output").textContent);
  }

  const pointer = one("#throughput .u-over"), box = pointer.getBoundingClientRect();
  const at = { clientX: box.left + box.width / 2 + 40, clientY: box.top + 20, bubbles: true };
  pointer.dispatchEvent(new MouseEvent("mouseenter", at));
  pointer.dispatchEvent(new MouseEvent("mousemove", at));
  await pause();
  seen.readOut = one("#throughput .read-out").innerText;
  await press(one("#split .plot"), "ArrowRight");
  seen.barReadOut = one("#split .read-out").innerText;

  const entry = one("#many .legend button");
  entry.click();
  seen.legend = [all("#many .legend button").length, entry.getAttribute("aria-pressed")];

  const details = one("#many details");
  seen.rowsBefore = all("tr", details).length;
  details.open = true;
  await pause();
  seen.rows = all("tbody tr", details).length;
  seen.columns = all("th", details).length;
  seen.valueHints = all(".hint", details).length;

  const column = (number) => all(`#results td:nth-child(${number})`).map((cell) => cell.textContent);
  const headings = all("#results th button");
  seen.sorted = {};
  for (const [name, number, clicks] of [["up", 2, 1], ["down", 2, 1], ["missing", 3, 1], ["text", 1, 1]]) {
    for (let click = 0; click < clicks; click++) headings[number - 1].click();
    seen.sorted[name] = column(number);
  }
  seen.ariaSort = all("#results th").map((heading) => heading.getAttribute("aria-sort"));

  const data = (key) => JSON.parse(one(`#${key} script`).textContent);
  seen.csv = csvRows(data("split"));
  seen.stretches = stretches({ low: [1, 1, null, 1, 1], high: [2, 2, 2, null, 2] }, 0, 4);
  const host = element("div");
  document.body.append(host);
  const far = data("many").lines.map((line) => ({ ...line, y: line.y.map((value) => value + 1000) }));
  const percents = new CurveChart(host, { ...data("many"), isShare: true });
  const [whole] = all("button", host).filter((button) => button.textContent === "0–100");
  seen.percents = [percents.yRange()];
  for (let click = 0; click < 2; click++) {
    whole.click();
    seen.percents.push(percents.yRange());
  }
  seen.switches = all(".toolbar button").filter((button) => button.textContent === "0–100").length;
  seen.ranges = [false, true].map((fromZero) => new CurveChart(host, { ...data("many"), lines: far, fromZero }).yRange());
  const alone = new CurveChart(host, { ...data("many"), x: [[0]], lines: [{ ...far[0], x: 0, y: [5] }] });
  await pause();
  seen.alone = [alone.whole, alone.plotter.axes[0]._splits];
  host.remove();

  one("#theme").click();
  seen.themes.clicked = theme();
  await pause();
  seen.requests = performance.getEntriesByType("resource").length;
}

addEventListener("load", async () => {
  try {
    await visit();
  } catch (error) {
    seen.errors.push(error.stack);
  }
  document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
});
