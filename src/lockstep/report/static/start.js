"use strict";
// Starts the page. All charts are drawn at once, so that captures of the whole page have them; a chart's table is
// created when it is opened.

(() => {
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    figure.chart = new FigureChart(figure.querySelector(".host"), data);
    const failed = (error) => figure.querySelector(".host").append(`This chart cannot be drawn: ${error.message}`);
    figure.chart.draw().then(() => (figure.dataset.drawn = "yes"), failed);
    const details = figure.querySelector("details");
    details?.addEventListener("toggle", () => {
      if (!details.open || details.childElementCount > 1) return;
      details.append(...dataTable(data));
      addScrollHint(details.querySelector(".scroll"));
    });
  }

  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll(".scroll").forEach(addScrollHint);
})();
