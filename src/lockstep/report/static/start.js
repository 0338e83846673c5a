"use strict";
// Brings the page to life: a chart is made when it comes near the view, its table when it is opened.

(() => {
  const waiting = new Map();

  function make(figure) {
    const read = waiting.get(figure);
    if (!read) return;
    waiting.delete(figure);
    const data = read(), host = figure.querySelector(".host");
    host.replaceChildren();
    if (data.kind === "bars") new BarChart(host, data);
    else new CurveChart(host, data);
    figure.dataset.drawn = "yes";
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((entry) => entry.isIntersecting)) {
      watcher.unobserve(entry.target);
      make(entry.target);
    }
  }, { rootMargin: "300px" });

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    let data = null;
    const read = () => (data ??= JSON.parse(figure.querySelector("script").textContent));
    waiting.set(figure, read);
    watcher.observe(figure);
    const details = figure.querySelector("details");
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) details.append(...dataTable(read()));
    });
  }

  document.querySelectorAll("table.sortable").forEach(makeSortable);
  addEventListener("beforeprint", () => [...waiting.keys()].forEach(make));

  const button = document.getElementById("theme");
  const tell = () => (button.textContent = theme.current() === "dark" ? "Light" : "Dark");
  button.addEventListener("click", () => {
    theme.toggle();
    tell();
  });
  theme.onChange(tell);
  button.hidden = false;
  tell();
})();
