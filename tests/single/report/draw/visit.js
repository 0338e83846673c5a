// What a reader does with the report page, and what is seen then, for test_page_in_browser.py.

const seen = { errors: [] };
addEventListener("error", (event) => seen.errors.push(String(event.message)));
addEventListener("unhandledrejection", (event) => seen.errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => seen.errors.push(`${event.violatedDirective} ${event.blockedURI}`));
for (const level of ["warn", "error"]) console[level] = (...texts) => seen.errors.push(texts.join(" "));

async function visit() {
  const pause = () => new Promise((done) => setTimeout(done, 100));
  const all = (css, within = document) => [...within.querySelectorAll(css)];
  const one = (css) => document.querySelector(css);
  const press = async (element, key) => {
    element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    await pause();
  };
  const chart = (key) => document.getElementById(key).chart;
  const domain = (key, axis) => chart(key).view.scale(axis).domain();

  // A browser whose time is virtual may draw no frame, so that nothing comes into view.
  while (all("figure[data-chart]:not([data-drawn])").length && !seen.errors.length) await pause();
  seen.charts = all("figure[data-chart]").length;
  seen.drawn = all("figure[data-drawn]").length;
  seen.texts = all("svg text").map((text) => text.textContent);
  seen.tooWide = all(".table .scroll").filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.parentElement.id);
  seen.widths = all(".canvas").map((canvas) => [canvas.clientWidth, canvas.querySelector("svg").clientWidth]);
  seen.pageWidth = [document.documentElement.scrollWidth, innerWidth];
  seen.hints = all(".table .hint").map((hint) => [hint.parentElement.id, hint.hidden]);
  seen.title = document.title;
  seen.columns = all(".grid").map((grid) => getComputedStyle(grid).gridTemplateColumns.split(" ").length);
  const small = one(".grid figure");
  if (small) {
    seen.color = getComputedStyle(one(".grid .mark-symbol path")).fill;
    await press(one(".grid .plot"), "ArrowLeft");
    seen.smallReadOut = one(".grid .read-out").innerText;
    seen.smallToolbar = all(".toolbar", small).length;
  }
  if (!one("#many")) return;

  const plot = one("#many .plot");
  seen.reachable = plot.tabIndex;
  seen.views = [];
  for (const key of ["+", "ArrowRight", "-", "0"]) {
    await press(plot, key);
    seen.views.push(one("#many output").textContent);
  }
  seen.ranges = [domain("many", "y")];
  chart("many").show([0, 10]);
  await pause();
  seen.ranges.push(domain("many", "y"));
  await press(plot, "0");

  const at = (key, right, down) => {
    const box = one(`#${key} .canvas`).getBoundingClientRect(), [left, top] = chart(key).view.origin();
    return { clientX: box.left + left + right, clientY: box.top + top + down, bubbles: true, view: window };
  };
  seen.expected = [100, 300].map((right) => chart("many").view.scale("x").invert(right));
  one("#many .background").dispatchEvent(new PointerEvent("pointerdown", at("many", 100, 50)));
  for (const right of [150, 300]) window.dispatchEvent(new PointerEvent("pointermove", at("many", right, 60)));
  await pause();
  window.dispatchEvent(new PointerEvent("pointerup", at("many", 300, 60)));
  await pause();
  seen.dragged = domain("many", "x");
  plot.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  await pause();
  seen.views.push(one("#many output").textContent);

  one("#throughput .plot").dispatchEvent(new PointerEvent("pointermove", at("throughput", chart("throughput").place(4) + 5, 20)));
  seen.readOut = one("#throughput .read-out").innerText;
  await press(one("#split .plot"), "ArrowRight");
  seen.barReadOut = one("#split .read-out").innerText;

  const lines = () => all("#many .mark-line path").length;
  const entry = one("#many .legend button");
  seen.lines = [lines()];
  entry.click();
  await pause();
  seen.lines.push(lines());
  seen.legend = [all("#many .legend button").length, entry.getAttribute("aria-pressed")];
  const [none] = all("#many .toolbar button").filter((button) => button.textContent === "No lines");
  none.click();
  await pause();
  seen.lines.push(lines());

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
  seen.csv = csvRows(chart("split").data);

  const wholes = all(".toolbar button").filter((button) => button.textContent === "0–100");
  seen.switches = wholes.length;
  seen.percents = [domain("percents", "y")];
  for (let click = 0; click < 2; click++) {
    one("#percents .toolbar button").click();
    await pause();
    seen.percents.push(domain("percents", "y"));
  }
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
