"use strict";
// Light or dark: the reader's last choice, else the system's preference. Prints are always light.

const theme = (() => {
  const KEY = "lockstep-report-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  const colors = new Map();
  let chosen = recall();

  // A browser may forbid storage for local files; then the choice lasts until the page is closed.
  function recall() {
    try {
      const name = localStorage.getItem(KEY);
      return name === "light" || name === "dark" ? name : null;
    } catch {
      return null;
    }
  }

  function remember(name) {
    try {
      localStorage.setItem(KEY, name);
    } catch { /* see recall */ }
  }

  function current() {
    return chosen ?? (system.matches ? "dark" : "light");
  }

  function apply(name) {
    colors.clear();
    document.documentElement.dataset.theme = name;
    listeners.forEach((listener) => listener());
  }

  function toggle() {
    chosen = current() === "dark" ? "light" : "dark";
    remember(chosen);
    apply(chosen);
  }

  /** The value of the style sheet's --name, for a canvas. */
  function color(name) {
    if (!colors.has(name)) {
      colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
    }
    return colors.get(name);
  }

  system.addEventListener("change", () => apply(current()));
  addEventListener("beforeprint", () => apply("light"));
  addEventListener("afterprint", () => apply(current()));
  apply(current());
  return { current, toggle, color, onChange: (listener) => listeners.push(listener) };
})();
