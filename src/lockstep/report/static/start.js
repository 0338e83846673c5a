"use strict";
// Starts the page. All charts are drawn at once, so that captures of the whole page have them; a chart's table is
// created when it is opened.

(() => {
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const data = JSON.parse(figure.querySelector("script").textContent), host = figure.querySelector(".host");
    if (data.kind === "bars") new BarChart(host, data);
    else new CurveChart(host, data);
    figure.dataset.drawn = "yes";
    const details = figure.querySelector("details");
    details.addEventListener("toggle", () => {
      if (!details.open || details.childElementCount > 1) return;
      details.append(...dataTable(data));
      addScrollHint(details.querySelector(".scroll"));
    });
  }

  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll(".scroll").forEach(addScrollHint);

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
