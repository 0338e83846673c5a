// Keep words of code on one line: a flag with its hyphens, the name of a file up to its slashes, a number with its range.
// CSS has no rule for breaks at hyphens. Without this script, the pages only wrap worse.
const LONG = 24;
const LONG_IN_TABLES = 16;
const PARTS = /(?<=[/.,:=(|])(?=[^/.,:=(|])/;
const PARTS_OF_NAMES = /(?<=_)(?=[^_])/;
const NUMBER = /^(?:[\d.,%()×+–−\s-]|to)*\d(?:[\d.,%()×+–−\s-]|to)*$/;
const TABLE = /\S {2,}\S/;

function whole(text) {
  const span = document.createElement("span");
  span.className = "whole";
  span.textContent = text;
  return span;
}

function pieces(word, long) {
  const split = (text, limit, places) => (text.length > limit && !word.startsWith("-") ? text.split(places) : [text]);
  const parts = split(word, long, PARTS).flatMap((part) => split(part, LONG, PARTS_OF_NAMES));
  return parts.flatMap((part, index) => (index ? [document.createElement("wbr"), whole(part)] : [whole(part)]));
}

function keepWords(code) {
  const long = code.closest("table") ? LONG_IN_TABLES : LONG;
  const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    if (!/[^\s\w]/.test(text.data.trim())) continue;
    text.replaceWith(...text.data.split(/(\s+)/).flatMap((word) => (word.trim() ? pieces(word, long) : [word])));
  }
}

// A table that is wider than the page becomes a list: a row is a card, and each cell has its column's name.
function nameCells(table) {
  const names = [...table.querySelectorAll("th")].map((cell) => cell.textContent.trim());
  for (const row of table.tBodies[0]?.rows ?? []) {
    [...row.cells].forEach((cell, index) => names[index] && cell.setAttribute("data-column", `${names[index]}: `));
  }
}

function fit(table) {
  table.removeAttribute("data-cards");
  const frame = table.closest(".md-typeset__scrollwrap") ?? table;
  if (frame.scrollWidth > frame.clientWidth) table.setAttribute("data-cards", "");
}

function fitTables() {
  document.querySelectorAll(".md-content table:not([class])").forEach(fit);
}

window.addEventListener("load", fitTables);
window.addEventListener("resize", fitTables);
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".md-content table:not([class])").forEach(nameCells);
  for (const code of document.querySelectorAll(".md-content code")) {
    const block = code.closest("pre") && code.closest("[class*=language-]");
    if (!code.closest("pre")) keepWords(code);
    else if (block && (block.matches(".language-sh") || (block.matches(".language-text") && !TABLE.test(code.textContent)))) {
      code.classList.add("wraps");
      keepWords(code);
    }
  }
  for (const cell of document.querySelectorAll(".md-content td, .md-content th")) {
    if (cell.textContent.length <= LONG && NUMBER.test(cell.textContent)) cell.classList.add("number");
  }
});
