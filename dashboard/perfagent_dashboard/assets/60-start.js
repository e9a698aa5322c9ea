// Starts the script of whichever page Dash has put up, stops it when the page goes, and keeps links inside the page.
(function () {
  "use strict";
  const pa = window.perfagent;
  const { words } = pa.config;
  let current = null;
  let node = null;

  /** Goes to an address without loading everything again. Dash's Location listens to popstate. */
  pa.go = function (path) {
    if (path === location.pathname) return;
    history.pushState(null, "", path);
    window.dispatchEvent(new PopStateEvent("popstate"));
    window.scrollTo(0, 0);
  };

  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-nav]");
    if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    pa.go(link.getAttribute("href"));
  });

  function themeButton() {
    const button = document.getElementById("theme");
    if (!button || button.dataset.ready) return;
    button.dataset.ready = "1";
    const show = () => {
      const other = pa.theme === "dark" ? words.theme_light : words.theme_dark;
      pa.put(button, pa.el("i", { "aria-hidden": "true" }, pa.theme === "dark" ? "☀" : "☾"), pa.el("span", null, other));
      button.setAttribute("aria-label", pa.say("theme_title", { theme: other }));
      button.title = pa.say("theme_title", { theme: other });
    };
    button.addEventListener("click", () => pa.flipTheme());
    pa.onTheme(show);
    show();
  }

  function look() {
    themeButton();
    const found = document.querySelector("[data-page]");
    if (found === node) return;
    current?.close?.();
    current = null;
    node = found;
    if (!found) return;
    for (const link of document.querySelectorAll(".bar nav a")) {
      const here = link.getAttribute("href") === "/" && found.dataset.page === "fleet";
      if (here) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    const start = pa.pages[found.dataset.page];
    current = start ? start(found) : null;
    if (!start) {
      pa.put(document.getElementById("crumb"));
      pa.put(document.getElementById("feed"));
    }
  }

  new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
  look();
})();
