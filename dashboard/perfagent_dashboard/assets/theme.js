// Stands in the head and runs before the first paint: chooses the theme that was chosen before, or that the system prefers.
(function () {
  "use strict";
  const pa = (window.perfagent = window.perfagent || {});
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  const KEY = "perfagent.theme";
  let choice = "auto";
  try {
    const kept = localStorage.getItem(KEY);
    if (kept === "light" || kept === "dark") choice = kept;
  } catch {
    // Storage can be forbidden; the choice then lasts as long as the page.
  }

  function apply() {
    pa.theme = choice === "auto" ? (dark.matches ? "dark" : "light") : choice;
    const root = document.documentElement;
    root.dataset.theme = pa.theme;
    root.dataset.mantineColorScheme = pa.theme;
    root.style.colorScheme = pa.theme;
    for (const listener of listeners) listener(pa.theme);
  }

  // What was chosen, "auto" to follow the system, and the next choice of the three.
  pa.themeChoice = () => choice;
  pa.nextTheme = function () {
    choice = { auto: "light", light: "dark", dark: "auto" }[choice];
    try {
      localStorage.setItem(KEY, choice);
    } catch {
      // As above.
    }
    apply();
  };
  pa.onTheme = (listener) => {
    listeners.push(listener);
    return () => listeners.splice(listeners.indexOf(listener), 1);
  };
  dark.addEventListener("change", apply);
  apply();
})();
