// Keys of every page, and the dialog that tells them. Never while somebody types.

import { config, say, words } from "../lib/config.js";
import { el } from "../lib/dom.js";
import { go } from "./site.js";

const PLACES = { o: "overview", r: "runs", c: "compare", a: "alerts", s: "settings" };
const ITEMS = ".ag-row a.name, .alert.card > .what > summary, .alert.card > a.what, .running a.name";
const SEARCH = "main input[type=search], main .search input, main input.search";
const SECOND_KEY_MS = 1200;
let went = -Infinity; // when `g` was pressed

const pathOfPage = (page) => (page === "overview" ? "/" : `/${page}`);
const isTyping = (node) => node.closest?.("input, select, textarea, [contenteditable], [role=menu], [role=listbox]");

document.addEventListener("keydown", (event) => {
  if (event.metaKey || event.ctrlKey || event.altKey || isTyping(event.target)) return;
  const act = performance.now() - went < SECOND_KEY_MS ? () => toPage(event.key) : ACTS[event.key];
  went = -Infinity;
  if (act && act() !== false) event.preventDefault();
});

document.addEventListener("click", (event) => event.target.closest?.("#keys") && tell());

const ACTS = {
  g: () => void (went = performance.now()),
  "/": () => focusOn([...document.querySelectorAll(SEARCH)].find((one) => one.checkVisibility())),
  j: () => step(1),
  k: () => step(-1),
  Enter: () => document.activeElement?.matches(ITEMS) && press(document.activeElement), // a grid keeps it for itself
  a: () => press(document.activeElement?.closest(".alert.card")?.querySelector(":scope > :is(.actions, .tail) :is([id*='\"act\":\"ack\"'], [id*='\"take\"'])")),
  "?": tell,
  Escape: () => press(document.querySelector(".chart.enlarged .leave")),
};

function toPage(key) {
  if (!(key in PLACES)) return false;
  go(pathOfPage(PLACES[key]));
  return true;
}

/** Rows and cards from top to bottom: a grid keeps its rows in another order. */
function step(by) {
  const items = [...document.querySelectorAll(ITEMS)].filter((one) => one.checkVisibility());
  items.sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top);
  const now = items.indexOf(document.activeElement);
  return focusOn(items[now < 0 ? (by > 0 ? 0 : items.length - 1) : Math.max(0, Math.min(items.length - 1, now + by))]);
}

function focusOn(node) {
  node?.focus();
  node?.scrollIntoView({ block: "nearest" });
  return Boolean(node);
}

function press(button) {
  button?.click();
  return Boolean(button);
}

function tell() {
  document.getElementById("keys-told")?.remove();
  const pages = Object.entries(PLACES).map(([key, page]) => [`g ${key}`, say("keys_page", { page: words[`nav_${page}`] })]);
  const rows = [["/", words.keys_search], ["j", words.keys_next], ["k", words.keys_previous], ["Enter", words.keys_open], ["a", words.keys_ack],
    ...pages.filter(([key]) => config.pages.some(({ path }) => path === pathOfPage(PLACES[key.at(-1)]))), ["+ − ← → 0", words.keys_zoom], ["?", words.keys_help], ["Esc", words.keys_close]];
  const list = el("dl", null, rows.map(([key, text]) => el("div", null, el("dt", null, key.split(" ").map((one) => el("kbd", null, one))), el("dd", null, text))));
  const dialog = el("dialog", { id: "keys-told", class: "card", "aria-labelledby": "keys-title" }, el("h2", { id: "keys-title" }, words.keys_title), list,
    el("form", { method: "dialog" }, el("button", { class: "button" }, words.keys_close)));
  document.body.append(dialog);
  dialog.showModal();
}
