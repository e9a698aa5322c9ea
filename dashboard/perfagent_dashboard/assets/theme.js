// Runs in the head, before the first paint: sets the colors of the theme that was chosen, or that the system prefers.
(function () {
  "use strict";
  const pa = (window.perfagent = window.perfagent || {});
  pa.config = JSON.parse(document.getElementById("perfagent-config").textContent);
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
    for (const [name, value] of Object.entries(pa.config.themes[pa.theme])) root.style.setProperty(name, value);
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
