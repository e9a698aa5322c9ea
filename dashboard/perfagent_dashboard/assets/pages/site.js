// Which page is up: links stay inside the page, and what a page needs is loaded once.

import { isUp } from "../lib/api.js";
import { need } from "../lib/bundles.js";
import { config } from "../lib/config.js";

const ARRIVE_MS = 3000;
let arriving = 0;
let back = false;

/** Whether the page that is up was reached by the browser's Back or Forward. */
export const cameBack = () => back;

function unquoted(path) {
  try {
    return decodeURIComponent(path);
  } catch {
    return path; // a stray %: the server reads it as it stands, too
  }
}

/** Whether the page that is up is the one of the address. */
export function arrived() {
  const path = unquoted(location.pathname);
  const run = path.startsWith("/run/") ? path.slice(5).replace(/^\/+|\/+$/g, "") : "";
  const { page, run: shown } = document.querySelector("[data-page]")?.dataset ?? {};
  if (run) return page === "missing" || shown === run;
  const known = config.pages.some((one) => one.path === path);
  return known ? page !== undefined && page !== "missing" : page === "missing";
}

/** Dash does not ask again for a page whose request was lost. Then all is loaded anew, once the server answers. */
async function insist() {
  clearTimeout(arriving);
  if (arrived()) return;
  if (!(await isUp(ARRIVE_MS))) {
    await new Promise((done) => setTimeout(done, ARRIVE_MS));
    return insist();
  }
  if (!arrived()) location.reload();
  return undefined;
}

/** Goes to an address without loading everything again. Dash's Location listens to popstate. */
export function go(path) {
  if (path === location.pathname + location.search) {
    if (!arrived()) insist();
    return;
  }
  history.pushState(null, "", path);
  window.dispatchEvent(new PopStateEvent("popstate"));
  window.scrollTo(0, 0);
}

/** Dash draws a component only if its script has run. So Dash learns of a page with a table once that script is there. */
async function hold(event) {
  const there = config.pages.find((page) => page.path === location.pathname);
  if (!there?.grid || window.dash_ag_grid) return;
  event.stopImmediatePropagation();
  try {
    await need("grid");
  } catch {
    return insist(); // the server is away
  }
  window.dispatchEvent(new PopStateEvent("popstate"));
  return undefined;
}

// A link or the browser's Back; a callback of Dash.
for (const kind of ["popstate", "_dashprivate_pushstate"]) window.addEventListener(kind, hold, { capture: true });

window.addEventListener("popstate", (event) => {
  back = event.isTrusted;
  clearTimeout(arriving);
  arriving = setTimeout(insist, ARRIVE_MS);
});

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-nav]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  go(link.getAttribute("href"));
});
