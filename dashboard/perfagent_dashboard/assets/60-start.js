// Starts the script of whichever page Dash has put up, stops it when the page goes, and keeps links inside the page.
(function () {
  "use strict";
  const pa = window.perfagent;
  const { words } = pa.config;
  let current = null;
  let node = null;

  const ARRIVE_MS = 3000;
  let arriving = 0;

  function unquoted(path) {
    try {
      return decodeURIComponent(path);
    } catch {
      return path; // a stray %: the server reads it as it stands, too
    }
  }

  /** Whether the page that is up is the one of the address. */
  pa.arrived = function () {
    const path = unquoted(location.pathname);
    const run = path.startsWith("/run/") ? path.slice(5).replace(/^\/+|\/+$/g, "") : "";
    const { page, run: shown } = node?.dataset ?? {};
    if (run) return page === "run" && shown === run;
    return page === (path === "/" ? "fleet" : "missing");
  };

  /** Dash does not ask again for a page whose request was lost. Then all is loaded anew, once the server answers. */
  async function insist() {
    clearTimeout(arriving);
    if (pa.arrived()) return;
    const up = await fetch("/healthz", { cache: "no-store", signal: AbortSignal.timeout(ARRIVE_MS) }).catch(() => null);
    if (!up?.ok) {
      await new Promise((done) => setTimeout(done, ARRIVE_MS));
      return insist();
    }
    if (!pa.arrived()) location.reload();
    return undefined;
  }

  /** Goes to an address without loading everything again. Dash's Location listens to popstate. */
  pa.go = function (path) {
    if (path === location.pathname + location.search) {
      if (!pa.arrived()) insist();
      return;
    }
    history.pushState(null, "", path);
    window.dispatchEvent(new PopStateEvent("popstate"));
    window.scrollTo(0, 0);
  };

  window.addEventListener("popstate", () => {
    if (pa.arrived()) current?.readdress?.();
    clearTimeout(arriving);
    arriving = setTimeout(insist, ARRIVE_MS);
  });

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
