"use strict";
// Brings the page to life. All charts are drawn at once, also for captures of the whole page; a chart's table is made when
// it is opened.

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
