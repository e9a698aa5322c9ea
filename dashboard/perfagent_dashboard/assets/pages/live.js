// What a page of Dash needs beside Dash: the live connection, times in the reader's zone, and its state in the address.

import { boards } from "../charts/open_boards.js";
import { connection } from "../lib/connection.js";
import { setChildren, setText } from "../lib/dom.js";
import { Feed, showFeed } from "../lib/feed.js";
import { finiteOf } from "../lib/numbers.js";
import { Soonest } from "../lib/soonest.js";
import { sparkline } from "../lib/sparkline.js";
import { ago, clockTime, duration, fullTime, shortTime, unixOf } from "../lib/times.js";
import { countAlerts } from "./bar.js";

const TOGETHER_MS = 700;
const TIMES_MS = 10000;
const RUNS_MS = 4000; // steps move all the time
const CLOCKS_S = 1; // between servers that share a database
const OPEN = ".mantine-Menu-dropdown, .mantine-Popover-dropdown"; // what a person has opened

/** Writes times that the server sent, in the reader's zone and language of numbers. */
function writeTimes(root) {
  for (const node of root.querySelectorAll("time[data-time]")) {
    const unix = unixOf(node.dateTime);
    if (unix == null) continue;
    const spent = () => duration((unixOf(node.dataset.until || null) ?? Date.now() / 1000) - unix - Number(node.dataset.paused ?? 0));
    setText(node, { ago: () => ago(unix), clock: () => clockTime(unix), since: spent }[node.dataset.time]?.() ?? shortTime(unix));
    node.title ||= fullTime(unix);
  }
}

/** Small lines of values that the server sent. */
function drawTrends(root) {
  for (const node of root.querySelectorAll("[data-values]")) {
    if (node.drawn !== node.dataset.values) setChildren(node, sparkline(JSON.parse(node.dataset.values).map(finiteOf)));
    node.drawn = node.dataset.values;
  }
}

/** A page whose callbacks show it anew when its store data-tick counts up: after alerts and changes of runs, and after a gap.
 * data-made: when the server began to read for it, in Unix seconds. data-address: `id:parameter:default` of the controls whose
 * values stand in the address. */
export class LivePage {
  constructor(root) {
    this.root = root;
    this.next = new Soonest((ms) => this.#count(ms));
    this.#keepTitle(`${root.dataset.title} · perfagent`);
    setChildren(document.getElementById("crumb"));
    this.times = setInterval(() => writeTimes(root), TIMES_MS);
    const write = () => (writeTimes(root), drawTrends(root));
    this.observer = new MutationObserver(write);
    this.observer.observe(root, { childList: true, subtree: true, attributeFilter: ["data-values"] });
    write();
    this.controls = (root.dataset.address ?? "").split(",").filter(Boolean).map((entry) => entry.split(":"));
    this.address = setInterval(() => this.#writeAddress(), 300);
    this.feed = new Feed({
      subscription: () => (root.dataset.run ? { runs: [root.dataset.run], names: [], bands: true } : { fleet: true, names: [] }),
      fetch: () => {
        connection.isListening = true;
        for (const board of boards.values()) board.refresh();
        if (this.hasFetched || !(this.changed < Number(root.dataset.made ?? Infinity) - CLOCKS_S)) this.next.within(TOGETHER_MS);
        this.hasFetched = true;
      },
      onMessage: (message) => {
        if (message.subscribed) this.changed = message.changed; // when anything last did
        if (message.alert || message.lagged || this.#hasTurned(message.run)) {
          this.next.within(TOGETHER_MS);
          countAlerts();
        }
        else if (message.bands || message.run || (message.fleet && root.dataset.runs)) this.next.within(RUNS_MS);
        for (const board of boards.values()) {
          if (message.lagged) board.refresh();
          else board.message(message);
        }
      },
      onState: showFeed,
    });
  }

  /** Dash writes the page's own title once more, after the page. */
  #keepTitle(title) {
    const write = () => document.title !== title && (document.title = title);
    this.titled = new MutationObserver(write);
    this.titled.observe(document.head, { childList: true, subtree: true, characterData: true });
    write();
  }

  /** Whether a message tells of another state or attempt of the run, or of its very first. */
  #hasTurned(run) {
    const key = run && `${run.state} ${run.attempts}`;
    const turned = Boolean(key) && this.turn !== undefined && key !== this.turn;
    if (key) this.turn = key;
    return turned;
  }

  /** Shows the page anew, but not while a menu is open: that would close it. */
  #count(ms) {
    if (this.closed) return;
    if ([...document.querySelectorAll(OPEN)].some((one) => one.checkVisibility())) {
      this.next.within(ms);
      return;
    }
    if (this.root.dataset.tick) window.dash_clientside.set_props(this.root.dataset.tick, { data: Date.now() });
  }

  #writeAddress() {
    const url = new URL(location);
    for (const [id, name, usual] of this.controls) {
      const value = valueOf(id);
      if (value == null) continue;
      if (value === usual) url.searchParams.delete(name);
      else url.searchParams.set(name, value);
    }
    if (url.href !== location.href && this.root.isConnected) history.replaceState(null, "", url);
  }

  close() {
    this.closed = true;
    this.feed.close();
    this.observer.disconnect();
    this.titled.disconnect();
    clearInterval(this.times);
    clearInterval(this.address);
    this.next.cancel();
  }
}

/** The value of a control by its id: of a segmented control the chosen input, else the field's own. */
function valueOf(id) {
  const node = document.getElementById(id);
  if (!node) return null;
  const chosen = node.querySelector("input:checked");
  const tab = node.querySelector("[role=tab][aria-selected=true]");
  if (tab) return tab.dataset.value;
  return chosen ? chosen.value : (node.value ?? node.querySelector("input")?.value ?? null);
}
