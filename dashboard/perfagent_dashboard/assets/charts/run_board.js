// A board of charts in a page: its tools, and what of it stands in the address.
//
// data-run: of one run. data-over: [[run, name], ...] of all that are drawn in each chart, this run first; data-series: the names of their series. data-sections, data-names: only these. data-axis, data-x: at first. data-bare: no tools, no sections.

import { api } from "../lib/api.js";
import { say, words } from "../lib/config.js";
import { connection } from "../lib/connection.js";
import { el, setChildren, setText } from "../lib/dom.js";
import { numberOf } from "../lib/numbers.js";
import { unixOf } from "../lib/times.js";
import { arrived } from "../pages/site.js";
import { Board } from "./board.js";
import { noteList, showNotes } from "./notes.js";
import { panelButton } from "./panels.js";
import { toolsOf } from "./toolbar.js";

const KEYS = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.25, -0.25], ArrowRight: [0.25, 0.25] };
const listed = (text) => (text ?? "").split(",").filter(Boolean);

export class RunBoard {
  constructor(root) {
    const { run, over, sections, names, axis, x, bare, marks } = root.dataset;
    this.root = root;
    this.waiting = []; // messages that came while the board was fetching
    this.bare = bare !== undefined;
    this.host = el("div", { class: "sections" });
    this.note = el("p", { class: "hint", hidden: true });
    const only = { sections: listed(sections), names: listed(names) };
    this.board = new Board({ run, host: this.host, bare: this.bare, only, onRange: () => this.#rangeChanged(), kind: this.kind });
    this.board.over = over ? JSON.parse(over) : [];
    this.board.mayChange = Boolean(root.closest("[data-may=change]"));
    this.board.hasPanels = listed(sections).includes("own");
    this.notes = noteList();
    this.board.setRange(rangeOf(x ?? ""), { quiet: true });
    if (axis) this.board.axis.mode = axis;
    this.board.marked = listed(marks).map(Number);
    if (!this.bare) this.#readAddress();
    setChildren(root, this.bare ? null : [toolsOf(this), this.notes], this.note, this.board.mayChange && this.board.hasPanels ? panelButton(this.board) : null, this.host);
    this.keys = (event) => this.#key(event);
    if (!this.bare) document.addEventListener("keydown", this.keys);
    if (connection.isListening) this.start(); // else the page refreshes its boards when the subscription is confirmed
  }

  get path() {
    return `/runs/${encodeURIComponent(this.board.run)}`;
  }

  /** Fetches what has been. Messages that arrive meanwhile may be newer than the answers, so they wait until those are shown. */
  async start() {
    if (this.starting) {
      this.startAgain = true;
      return;
    }
    clearTimeout(this.again);
    this.starting = true;
    this.startAgain = false;
    let delay_ms = 0;
    try {
      await this.fetch();
      this.say();
    } catch (problem) {
      if (this.closed) return;
      setText(this.note, say("chart_failed", { message: problem.message }));
      this.note.hidden = false;
      this.startAgain = true;
      delay_ms = 3000;
    }
    if (this.closed) return;
    this.starting = false;
    for (const message of this.waiting.splice(0)) this.message(message);
    if (this.startAgain) this.again = setTimeout(() => this.start(), delay_ms);
  }

  async fetch() {
    const { names: named, latest, alerts, marks, annotations, panels, ...summary } = await api(`${this.path}?with=names,latest,alerts,marks,annotations,panels`);
    if (this.closed) return;
    this.board.world = Math.max(summary.world_size || 1, 1);
    this.board.started = unixOf(summary.started);
    this.board.project = summary.project;
    this.board.saw(summary.step);
    this.board.addNames([...named.names, ...JSON.parse(this.root.dataset.series ?? "[]")]);
    this.board.setLosses(named);
    for (const [name, sample] of Object.entries(latest)) this.board.tell(name, numberOf(sample.value));
    if (Object.values(latest).some((sample) => sample.rank === "all")) await this.#ranks();
    this.board.setAlerts(alerts, marks);
    if (this.bare || this.board.over.length) return;
    showNotes(this, annotations);
    if (this.board.hasPanels) this.board.setPanels(panels);
  }

  /** A run that only its script reports says nowhere how many processes it has. */
  async #ranks() {
    if (this.board.world > 1) return;
    const { ranks } = await api(`${this.path}/ranks?${new URLSearchParams({ name: [...this.board.charts.keys()][0] ?? "loss", points: "1" })}`);
    this.board.world = Math.max(1, ranks.length);
  }

  /** Why charts are missing, over them. */
  say() {
    const hidden = this.board.hiddenNames.length;
    const none = this.board.filter.text && this.board.isFilteredAway() ? words.no_chart_fits : "";
    const empty = !this.board.charts.size;
    const text = this.board.filter.problem || none || (hidden ? say("too_many", { count: hidden }) : empty ? words.no_charts : "");
    setText(this.note, this.bare ? "" : text);
    this.note.hidden = this.bare || !text;
  }

  /** A series is new: what it is, the server knows. */
  #learn() {
    this.say();
    clearTimeout(this.learning);
    this.learning = setTimeout(() => api(`${this.path}/names`).then((named) => this.closed || (this.board.setLosses(named), this.board.setPanels(this.board.panels))).catch(() => {}), 500);
  }

  /** After a gap: everything at its level of detail, and what came meanwhile. */
  refresh() {
    this.board.reload();
    this.start();
  }

  message(message) {
    if (this.starting) {
      this.waiting.push(message);
      return;
    }
    for (const band of message.bands ?? []) {
      if (band.run !== this.board.run || !band.step.length) continue;
      this.board.tell(band.name, numberOf(band.mean.at(-1)));
      if (this.board.charts.has(band.name)) this.board.append(band);
      else if (this.board.addNames([band.name])) this.#learn();
    }
    if (message.run?.run === this.board.run) this.board.saw(message.run.step);
    if (message.alert?.run === this.board.run) api(`${this.path}?with=alerts,marks`).then(({ alerts, marks }) => this.closed || this.board.setAlerts(alerts, marks)).catch(() => {});
  }

  // --- in the address ----------------------------------------------------------------------------------------------------------

  #readAddress() {
    const query = new URLSearchParams(location.search);
    const { board } = this;
    if (query.get("x")) board.setRange(rangeOf(query.get("x")), { quiet: true });
    if (query.get("axis")) board.axis.mode = query.get("axis");
    board.log = query.get("log") === "1";
    board.axis.wantsLog = query.get("logx") === "1";
    board.clip = query.get("clip") === "1";
    board.smoothing = Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0));
    board.columns = Math.min(4, Math.max(0, Number(query.get("columns")) || 0));
    board.search(query.get("charts") ?? "");
    board.enlarged = query.get("chart") ?? "";
  }

  writeAddress() {
    if (this.bare || !arrived()) return;
    const { range, log, clip, smoothing, filter, columns, enlarged } = this.board;
    const { mode, wantsLog } = this.board.axis;
    const url = new URL(location);
    const set = (name, value) => (value ? url.searchParams.set(name, value) : url.searchParams.delete(name));
    set("x", !range ? "" : Array.isArray(range) ? `${range[0]}-${range[1]}` : `last${range.last}`);
    set("axis", mode === (this.root.dataset.axis ?? "step") ? "" : mode);
    set("log", log ? "1" : "");
    set("logx", wantsLog ? "1" : "");
    set("clip", clip ? "1" : "");
    set("smooth", smoothing ? String(smoothing) : "");
    set("columns", columns ? String(columns) : "");
    set("charts", filter.text);
    set("chart", enlarged);
    if (url.href !== location.href) history.replaceState(null, "", url);
  }

  #rangeChanged() {
    this.writeAddress();
    this.showRange?.();
  }

  /** + and − zoom, arrows move, 0 shows everything; never while somebody types, or for a board that is out of sight. */
  #key(event) {
    if (event.target.closest("input, select, textarea, [role=tab], [role=menu]") || event.metaKey || event.ctrlKey || event.altKey || !this.root.offsetParent) return;
    const { board } = this;
    const [a, b] = board.window() ?? [board.firstStep, board.lastStep];
    const move = KEYS[event.key];
    if (event.key === "0" && board.range) board.setRange(null);
    else if (move && (board.range || move[0] > 0 !== move[1] > 0)) {
      const [from, to] = move.map((share, i) => Math.round([a, b][i] + share * (b - a)));
      const [first, last] = [Math.max(board.firstStep, from), Math.min(board.lastStep, to)];
      if (last - first < 1) return;
      board.setRange(first <= board.firstStep && last >= board.lastStep ? null : [first, last]);
    } else return;
    event.preventDefault();
  }

  close() {
    this.closed = true;
    clearTimeout(this.again);
    clearTimeout(this.typing);
    clearTimeout(this.learning);
    document.removeEventListener("keydown", this.keys);
    this.board.close();
  }
}

/** `59-157` or `last100`; null: everything. */
function rangeOf(text) {
  const between = /^(\d+)-(\d+)$/.exec(text);
  const last = /^last(\d+)$/.exec(text);
  if (between) return [Number(between[1]), Math.max(Number(between[1]) + 1, Number(between[2]))];
  return last ? { last: Math.max(2, Number(last[1])) } : null;
}
