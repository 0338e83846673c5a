"use strict";
// Light or dark: the reader's last choice, else the system's preference. Prints are always light.

const theme = (() => {
  const KEY = "lockstep-report-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
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

  function apply() {
    document.documentElement.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
  }

  function toggle() {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    remember(chosen);
    apply();
  }

  system.addEventListener("change", apply);
  apply();
  return { toggle };
})();
