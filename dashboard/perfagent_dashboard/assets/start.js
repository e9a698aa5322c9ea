// Starts the script of whichever page Dash has put up, and stops it when the page goes.

import { findBoards } from "./charts/boards.js";
import { boards } from "./charts/open_boards.js";
import { change } from "./lib/api.js";
import "./lib/clicks.js";
import { config, words } from "./lib/config.js";
import { flash, setChildren, setText } from "./lib/dom.js";
import { enlarge } from "./lib/enlarge.js";
import { connection } from "./lib/connection.js";
import { countAlerts, barButtons } from "./pages/bar.js";
import { LivePage } from "./pages/live.js";
import { RunsPage } from "./pages/runs.js";
import "./pages/keys.js";
import "./pages/site.js";
import { findViews } from "./pages/views.js";

// A tile, a part of the step or a phase leads to its chart; a button takes back what another did, enlarges a picture, or
// copies the address with the view in it.
document.addEventListener("click", (event) => {
  const part = event.target.closest?.("[data-goto]");
  if (part) goToChart(part.dataset.goto);
  const undo = event.target.closest?.("[data-undo]");
  if (undo) takeBack(undo);
  const picture = event.target.closest?.("[data-enlarge]");
  if (picture) enlarge(picture);
  const copied = event.target.closest?.("[data-copy=address]");
  if (copied) navigator.clipboard?.writeText(location.href).then(() => flash(copied, words.copied));
});
document.addEventListener("keydown", (event) => {
  const part = event.key === "Enter" && event.target.closest?.("[data-goto][role=link]");
  if (part) goToChart(part.dataset.goto);
});

async function takeBack(button) {
  button.disabled = true;
  try {
    await Promise.all(JSON.parse(button.dataset.undo).map((one) => change(...one)));
    setText(button.parentElement, words.undone);
    current?.next?.within(0);
  } catch (problem) {
    setText(button, problem.message);
  }
}

const TABS = { speed: "time", device: "hardware", host: "hardware" };
const PATIENCE_MS = 4000;

/** name: a series, or `tab:NAME`. The tab of a chart may have to be fetched first. */
function goToChart(name) {
  const group = config.charts.find((chart) => chart.name === name)?.group;
  const tab = name.startsWith("tab:") ? name.slice(4) : (TABS[group] ?? "charts");
  document.querySelector(`.run-tabs [data-value="${tab}"]`)?.click();
  const until = Date.now() + PATIENCE_MS;
  const show = () => {
    const shown = [...boards.values()].some((one) => !one.bare && one.board.host.checkVisibility() && one.board.show(name));
    if (!shown && !name.startsWith("tab:") && Date.now() < until) setTimeout(show, 100);
  };
  show();
}

const PAGES = { live: LivePage, runs: RunsPage };
let current = null;
let node = null;

function look() {
  barButtons();
  findViews();
  const found = document.querySelector("[data-page]");
  if (found === node) return findBoards();
  current?.close?.();
  current = null;
  node = found;
  if (!found) return findBoards();
  document.getElementById("first")?.remove();
  for (const link of document.querySelectorAll(".bar nav a")) {
    const here = link.getAttribute("href") === location.pathname;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const Page = PAGES[found.dataset.page];
  connection.isListening = false;
  current = Page ? new Page(found) : null;
  findBoards();
  countAlerts();
  if (!Page) {
    setChildren(document.getElementById("crumb"));
    setChildren(document.getElementById("feed"));
  }
  return undefined;
}

new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
look();
