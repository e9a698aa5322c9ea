// All charts of a run on one page: which there are, in which order, over which steps.

import { config, onTheme, say } from "../lib/config.js";
import { metricOf } from "../lib/metrics.js";
import { si } from "../lib/numbers.js";
import { moved, pins } from "../lib/remembered.js";
import { Cursor } from "./cursor.js";
import { enlargedTools } from "./enlarged.js";
import { Painter } from "./painter.js";
import { specOf } from "./panels.js";
import { Section } from "./sections.js";
import { Chart } from "./series_chart.js";
import { StepChart } from "./step_chart.js";
import { XAxis } from "./x_axis.js";

const { charts: KNOWN } = config;
const MAX_CARDS = 160;
const YOUNG_STEPS = 20; // of a run: then a line that has not moved yet is not called unchanging
const SECTIONS = ["pinned", "own", "training", "logged", "speed", "device", "host"];
const IS_LOSS = /loss/i;

export class Board {
  /** run: id; host: where the sections go; bare: without sections and menus; only: the names of sections or of series that
   * are shown, all where there are none; onRange(): the range changed; kind: of chart. */
  constructor({ run, host, bare, only, onRange, kind = Chart }) {
    Object.assign(this, { run, host, bare, only, onRange, kind });
    this.sections = new Map();
    this.values = new Map(); // the newest of each name
    this.prefixes = new Map(); // how many names of the script begin with each
    this.marked = []; // steps
    this.over = []; // [run, name] of all runs that are drawn over each other, the first included
    this.first = ""; // the series whose chart comes before all
    this.columns = 0; // as many as fit
    this.enlarged = "";
    this.charts = new Map();
    this.names = new Set(); // that the run has, shown here or not
    this.panels = [];
    this.notes = [];
    this.hiddenNames = [];
    this.log = false;
    this.clip = false; // spikes are shown unless somebody asks to look past them
    this.smoothing = 0;
    this.range = null; // null: everything; [a, b]: these steps; {last: n}: the newest n, moving on
    this.firstStep = 0;
    this.lastStep = 0;
    this.started = null;
    this.world = 1;
    this.alerts = [];
    this.marks = {};
    this.axis = new XAxis(this);
    this.cursor = new Cursor(this);
    this.painter = new Painter();
    this.filter = { text: "", problem: "", fits: () => true };
    this.observer = new IntersectionObserver((entries) => this.#seen(entries), { rootMargin: "160px" });
    this.sight = new IntersectionObserver((entries) => this.#inSight(entries)); // live values are drawn where somebody looks
    this.resizer = new ResizeObserver(() => {
      clearTimeout(this.resizing);
      this.resizing = setTimeout(() => this.redraw(), 120);
    });
    this.resizer.observe(host);
    this.offTheme = onTheme(() => this.redraw());
  }

  // --- which charts ----------------------------------------------------------------------------------------------------------

  /** Adds charts for names that are new, in the order of the page. True when there were any. */
  addNames(names) {
    const { names: wanted } = this.only;
    for (const name of names) this.names.add(name);
    const hides = (name) => (wanted.length ? !wanted.includes(name) : config.hidden.some((one) => (one.endsWith("/") ? name.startsWith(one) : name === one)));
    const fresh = names.filter((name) => !this.charts.has(name) && !hides(name) && !this.hiddenNames.includes(name));
    if (!fresh.length) return false;
    for (const name of fresh) if (!metricOf(name).known) this.prefixes.set(name.split("/")[0], (this.prefixes.get(name.split("/")[0]) ?? 0) + 1);
    for (const name of fresh) {
      if (this.charts.size >= MAX_CARDS && !metricOf(name).known) {
        this.hiddenNames.push(name);
        continue;
      }
      const spec = KNOWN.find((known) => known.name === name) ?? { name, group: name.startsWith("node_gpu") ? "device" : "logged", from_zero: false };
      if (this.#shows(this.sectionOf(spec))) this.charts.set(name, new this.kind(this, spec));
      const chart = this.charts.get(name);
      if (chart && this.values.has(name)) chart.latest = this.values.get(name);
    }
    this.arrange();
    return true;
  }

  /** Of the project: charts of them are made anew where they have changed, and shown where the run has their series. */
  setPanels(panels) {
    this.panels = panels;
    const specs = panels.map((panel) => specOf(panel, (name) => this.names.has(name))).filter(Boolean);
    for (const [name, chart] of this.charts) {
      if (!chart.panel || specs.some((spec) => JSON.stringify(spec) === JSON.stringify(chart.spec))) continue;
      chart.destroy();
      this.observer.unobserve(chart.card);
      this.charts.delete(name);
    }
    for (const spec of specs) if (!this.charts.has(spec.name)) this.charts.set(spec.name, new Chart(this, spec));
    this.arrange();
  }

  /** loss, evaluations: names as the server knows them. Losses of evaluations are drawn beside the loss that is trained on, too. */
  setLosses({ loss, evaluations }) {
    const chart = this.charts.get(loss);
    if (!chart || this.bare || this.over.length) return;
    const fresh = evaluations.filter((name) => this.charts.has(name) && !chart.lines.some((line) => line.label === name));
    chart.lines.push(...fresh.map((name) => ({ label: name, query: { name } })));
    if (fresh.length && !chart.stale) chart.loadLines();
  }

  /** The newest value of a name: one on the whole page, whichever came first, the value or its chart. */
  tell(name, value) {
    this.values.set(name, value);
    const chart = this.charts.get(name);
    if (chart) chart.latest = value;
    // React owns the node, and would not find another one again.
    const tile = chart && value != null && document.querySelector(`[data-figure=loss][data-goto="${CSS.escape(name)}"] .value`);
    if (tile?.firstChild) tile.firstChild.nodeValue = si(value / chart.scale.by);
  }

  // --- sections --------------------------------------------------------------------------------------------------------------

  /** What the catalogue says; what the script logs by the first part of its name, but for its losses. */
  sectionOf({ name, group }) {
    if (pins.has(name)) return "pinned";
    if (name === this.first) return "training";
    if (group === "logged" && IS_LOSS.test(name)) return "training";
    const [prefix, rest] = name.split("/");
    return group === "logged" && rest !== undefined && this.prefixes.get(prefix) > 1 ? `logged:${prefix}` : group;
  }

  #shows(section) {
    const { sections } = this.only;
    return !sections.length || sections.includes(section.split(":")[0]);
  }

  /** Puts every card into its section, in the order of the catalogue. */
  arrange() {
    const place = (name) => {
      if (name === this.first) return -1;
      const at = KNOWN.findIndex((known) => known.name === name);
      return at >= 0 ? at : IS_LOSS.test(name) ? 0.5 : KNOWN.length;
    };
    const front = (name) => moved.indexOf(name) + 1 || Infinity;
    const ordered = [...this.charts.values()].toSorted((a, b) => front(a.name) - front(b.name) || place(a.name) - place(b.name) || (a.name < b.name ? -1 : 1));
    const cards = new Map();
    const put = (key, part) => cards.set(key, [...(cards.get(key) ?? []), part]);
    if (!this.only.names.length && this.#shows("speed") && !this.over.length && ordered.some((chart) => chart.name.startsWith("phase/"))) put("speed", (this.stack ??= new StepChart(this)));
    const isOld = this.lastStep - this.firstStep >= YOUNG_STEPS;
    for (const chart of ordered) {
      const key = this.bare || this.only.names.length ? "only" : this.sectionOf(chart);
      chart.unchanging = isOld && !this.bare && !this.over.length && key !== "pinned" && !chart.panel && !IS_LOSS.test(chart.name) && chart.isUnchanging;
      put(key, chart);
    }
    const rank = (key) => (SECTIONS.indexOf(key.split(":")[0]) + 1 || SECTIONS.length + 1) + (key.includes(":") ? -0.5 : 0);
    const keys = [...cards.keys()].toSorted((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
    for (const [key, section] of this.sections) if (!cards.has(key)) section.put([]);
    keys.forEach((key, at) => {
      const section = this.sections.get(key) ?? new Section(this, key);
      this.sections.set(key, section);
      if (this.host.children[at] !== section.node) this.host.insertBefore(section.node, this.host.children[at] ?? null);
      section.put(cards.get(key));
    });
    for (const part of this.parts()) {
      if (part.observed) continue;
      part.observed = true;
      part.card.chartPart = part;
      this.observer.observe(part.card);
      this.sight.observe(part.card);
    }
    this.applyFilter();
  }

  parts() {
    return [...this.charts.values(), ...[this.stack].filter(Boolean)];
  }

  /** Words that all must be in a name or its title; each may be a regular expression. */
  search(text) {
    this.filter = { text: text.trim(), problem: "", fits: () => true };
    try {
      const parts = this.filter.text.split(/\s+/).filter(Boolean).map((word) => new RegExp(word, "i"));
      this.filter.fits = (label) => parts.every((part) => part.test(label));
    } catch (error) {
      this.filter.problem = say("bad_regex", { why: error.message });
    }
    if (this.filter.text && !this.filter.problem) this.#reveal();
    this.applyFilter();
  }

  /** Makes charts for hidden names that the search asks for. */
  #reveal() {
    const found = this.hiddenNames.filter((name) => this.filter.fits(name)).slice(0, 40);
    if (!found.length) return;
    this.hiddenNames = this.hiddenNames.filter((name) => !found.includes(name));
    for (const name of found) this.charts.set(name, new this.kind(this, { name, group: "logged", from_zero: false }));
    this.arrange();
  }

  applyFilter() {
    for (const part of this.parts()) {
      const label = `${part.name ?? ""} ${part.card.querySelector("h2").textContent}`;
      part.card.hidden = part.unchanging || !this.filter.fits(label);
    }
    for (const section of this.sections.values()) section.show(this.filter.text !== "");
  }

  isFilteredAway() {
    return this.parts().every((part) => part.card.hidden);
  }

  setColumns(count) {
    this.columns = count;
    this.host.style.setProperty("--columns", count || "");
    this.host.classList.toggle("fixed-columns", count > 0);
    this.redraw();
  }

  /** Brings a chart into sight. False where there is none of that name. */
  show(name) {
    const chart = this.charts.get(name);
    if (!chart) return false;
    if (!this.filter.fits(name)) this.search("");
    this.sections.get(this.sectionOf(chart))?.unfold();
    const shown = (chart.unchanging && this.sections.get(this.sectionOf(chart))?.table) || chart.card;
    shown.scrollIntoView({ block: "center", behavior: "smooth" });
    shown.classList.add("shown");
    setTimeout(() => shown.classList.remove("shown"), 1500);
    return true;
  }

  /** One chart over the whole width, with a range of its own; "" for none. */
  enlarge(name) {
    this.enlarged = name;
    for (const chart of this.charts.values()) {
      chart.card.classList.toggle("enlarged", chart.name === name);
      enlargedTools(chart, chart.name === name);
    }
    this.redraw();
    if (name) this.show(name);
    this.onRange();
  }

  #seen(entries) {
    for (const entry of entries) {
      const part = entry.target.chartPart;
      part.visible = entry.isIntersecting;
      if (!part.visible) continue;
      if (part.stale) (part.fetch ?? part.load).call(part);
      else this.painter.want(part, part.needsDraw || !part.drawnTo ? "draw" : "extend");
      if (part === this.stack) for (const [, chart] of part.parts()) chart.fetch();
    }
  }

  #inSight(entries) {
    for (const { target, isIntersecting } of entries) {
      target.chartPart.inSight = isIntersecting;
      if (isIntersecting) this.painter.want(target.chartPart, "extend");
    }
  }

  // --- the horizontal axis -----------------------------------------------------------------------------------------------------

  points() {
    const width = this.host.querySelector(".chart")?.clientWidth || 400;
    return Math.max(240, Math.min(1000, Math.round(width * 0.9)));
  }

  /** The steps that are asked for, null for all. */
  window() {
    if (!this.range) return null;
    if (Array.isArray(this.range)) return this.range;
    return [Math.max(this.firstStep, this.lastStep - this.range.last + 1), Math.max(this.lastStep, this.firstStep + 1)];
  }

  /** True when the range does not move with the run. */
  fixed() {
    return Array.isArray(this.range);
  }

  saw(step) {
    if (step > this.lastStep) this.lastStep = step;
  }

  zoomTo(x0, x1) {
    const value = (x) => (this.axis.isLog ? 10 ** x : x);
    const [a, b] = [this.axis.stepAt(value(x0)), this.axis.stepAt(value(x1))].toSorted((p, q) => p - q);
    this.setRange([Math.max(this.firstStep, a), Math.max(a + 1, b)]);
  }

  setRange(range, { quiet = false } = {}) {
    this.range = range;
    if (quiet) return;
    this.onRange();
    this.reload();
  }

  // --- what is held ------------------------------------------------------------------------------------------------------------

  /** Everything on screen is fetched again, the rest when it is scrolled to. */
  reload() {
    for (const part of this.parts()) {
      if (!part.load) continue;
      part.stale = true;
      if (part.visible) part.load();
    }
    if (this.stack?.visible) for (const [, chart] of this.stack.parts()) chart.fetch();
    if (this.stack?.visible) this.charts.get("step_time_s")?.fetch();
  }

  append(band) {
    const end = band.step.length - 1;
    if (end < 0) return;
    this.axis.forget();
    this.saw(band.step[end]);
    this.charts.get(band.name)?.append(band);
    for (const chart of this.charts.values()) if (chart.panel && chart.spec.reads.includes(band.name)) chart.loadSoon();
    this.wantStack(band, "extend");
  }

  /** Where a step goes is drawn from the series of other charts. */
  wantStack({ name }, what) {
    if (this.stack && (name === "step_time_s" || name.startsWith("phase/"))) this.painter.want(this.stack, what);
  }

  changed(chart) {
    this.axis.forget();
    if (chart.data.step.length && !this.range) {
      const first = Math.min(...[...this.charts.values()].map((one) => one.data.step[0] ?? Infinity));
      if (first !== this.firstStep) {
        this.firstStep = first;
        this.redraw();
      }
      this.saw(chart.data.step[chart.data.step.length - 1]);
    }
    this.wantStack(chart, "draw");
    if (chart.unchanging !== undefined && chart.isUnchanging !== chart.unchanging) this.#arrangeSoon();
    if (chart.name === this.axis.mode) this.redraw();
  }

  #arrangeSoon() {
    this.arranging ??= setTimeout(() => {
      this.arranging = 0;
      if (!this.closed) this.arrange();
    }, 200);
  }

  /** marks: rule -> the series on whose charts its alert is marked, best first. */
  setAlerts(alerts, marks) {
    this.marks = marks;
    this.alerts = alerts.filter((alert) => alert.since_step != null && alert.state !== "pending");
    this.redraw();
  }

  setNotes(notes) {
    this.notes = notes;
    this.redraw();
  }

  marksOf(name) {
    return this.alerts.filter((alert) => {
      const places = [alert.evidence?.series, ...(this.marks[alert.rule] ?? []), "loss", "step_time_s"];
      return places.find((place) => this.charts.has(place)) === name;
    });
  }

  /** Fades all lines but those of these runs or groups; null: none. */
  pick(keys) {
    this.picked = keys && new Set(keys);
    for (const chart of this.charts.values()) chart.fade();
  }

  isFaded(key) {
    return Boolean(this.picked) && !this.picked.has(key);
  }

  redraw() {
    for (const part of this.parts()) {
      if (part instanceof Chart) part.needsDraw = true;
      this.painter.want(part, "draw");
    }
  }

  close() {
    this.closed = true;
    this.painter.close();
    clearTimeout(this.resizing);
    clearTimeout(this.arranging);
    this.observer.disconnect();
    this.sight.disconnect();
    this.resizer.disconnect();
    this.offTheme();
    for (const part of this.parts()) part.destroy();
  }
}
