// The chart of one series: what is fetched, what is appended, how it is drawn.
//
// It holds at most MAX_POINTS buckets. It is fetched at a level of detail that fits its width (the server keeps min, max and
// mean of every bucket), live samples are appended, and when there are too many it is fetched again.

import { say, words } from "../lib/config.js";
import { el, setText } from "../lib/dom.js";
import { metricOf, scaleOf } from "../lib/metrics.js";
import { finiteOf, numberOf, si, thousands } from "../lib/numbers.js";
import { seriesOf } from "../lib/series.js";
import { colorOf, figureOf } from "./figures.js";
import { chartMenu, letDrag } from "./menu.js";
import { DIMMED, drawPlot } from "./plot.js";
import { bandOf, byStep, empty, lastAtOrBefore, together } from "./samples.js";
import { linearTicks, logTicks } from "./ticks.js";

const MAX_POINTS = 1600;
const LINES_MS = 3000;
const [BAND, LOW, HIGH, MEAN, SMOOTH, NONFINITE, POINTS] = [0, 1, 2, 3, 4, 5, 6]; // in the order of figures.js

const BY_ITSELF = 0.9;
const NOISY = 0.3; // of the range from the lowest to the highest tenth
const FEWEST = 60;
const COLOURS = 20; // of series, in 00-theme.css
const MANY = 8; // lines: their legend scrolls
const FADED = 0.12; // a line that is not among those picked

function isNoisy(mean) {
  const known = mean.filter((value) => value != null);
  if (known.length < FEWEST) return false;
  const sorted = known.toSorted((a, b) => a - b);
  const jumps = known.slice(1).map((value, i) => Math.abs(value - known[i])).toSorted((a, b) => a - b);
  return jumps[jumps.length >> 1] > NOISY * (sorted[Math.floor(0.9 * sorted.length)] - sorted[Math.floor(0.1 * sorted.length)]);
}

export class Chart {
  #latest = null;

  constructor(board, spec) {
    this.board = board;
    this.name = spec.name;
    this.group = spec.group;
    this.fromZero = spec.from_zero;
    this.metric = spec.metric ?? metricOf(spec.name);
    this.query = spec.query ?? { name: spec.name };
    this.panel = spec.panel; // of one's own: what it draws is computed by the server
    this.spec = spec;
    this.scale = scaleOf(this.metric, 0);
    this.data = empty();
    this.waiting = [];
    this.visible = false;
    this.stale = true; // what is held is not what should be shown: fetch when on screen
    this.drawnTo = 0;
    this.failed = ""; // why what should be shown could not be fetched
    // Names that scripts gave differ at their end: there the head is cut (30-charts.css).
    this.title = el("h2", { title: this.metric.meaning || this.name }, this.metric.known ? this.metric.title : el("bdi", { dir: "ltr" }, this.metric.title));
    this.unit = el("span", { class: "unit" });
    this.flag = el("span", { class: "flag" });
    this.value = el("span", { class: "now" }); // no <output>: a screen reader would speak every value of every chart
    this.plot = el("div", { class: "plot", role: "img", "aria-label": this.metric.title });
    this.cursor = el("i", { class: "cursor", hidden: true });
    this.empty = el("p", { class: "empty" }, words.loading);
    this.frame = el("div", { class: "frame" }, this.plot, this.cursor, this.empty);
    this.card = el(
      "figure",
      { class: "card chart", "data-name": this.name, "data-group": this.group },
      el("figcaption", null, this.title, this.flag, this.value, this.unit, board.bare ? null : chartMenu(this)),
      this.frame,
    );
    // Further series in this chart, single ranks, or the same of other runs: {label, run, query, data}.
    this.lines = spec.lines?.map((line) => ({ ...line })) ?? board.over.slice(1).map(([run, label]) => ({ run, label, key: run, query: { name: this.name } }));
    this.own = {}; // log, low, high: of this chart alone
    board.cursor.follow(this);
    if (!board.bare) letDrag(this);
  }

  /** The newest value of the run; null as long as it is not known. */
  get latest() {
    return this.#latest;
  }

  set latest(value) {
    this.#latest = value;
    this.board.painter.want(this, "value");
  }

  /** Loads unless it is loaded or about to be; what is on its way for steps that are no longer asked for is given up. */
  fetch() {
    return this.stale ? this.load() : this.loaded;
  }

  load() {
    return (this.loaded = this.#load());
  }

  async #load() {
    this.abort?.abort();
    const abort = (this.abort = new AbortController());
    this.stale = false;
    this.loading = true;
    this.loadLines(); // in one request with the first
    try {
      const body = await this.read({ ...this.#over(), ...this.query });
      if (abort.signal.aborted) return;
      this.#replace(body);
    } catch (error) {
      if (abort.signal.aborted || error.name === "AbortError") return;
      this.stale = true;
      this.failed = say("chart_failed", { message: error.message });
      this.#tell();
      this.board.wantStack(this, "draw");
      return;
    } finally {
      if (this.abort === abort) this.loading = false;
    }
    this.board.painter.want(this, "draw");
    this.board.changed(this);
  }

  /** What is drawn, as the API has a series. */
  read(query) {
    return seriesOf(this.board.run, query);
  }

  /** A panel has no live samples: it is asked for again, now and then. */
  loadSoon() {
    if (this.board.fixed() || this.stale) return;
    this.reloading ??= setTimeout(() => {
      this.reloading = undefined;
      this.stale = true;
      if (this.visible) this.load();
    }, LINES_MS);
  }

  /** Further lines: other metrics, or single ranks. Fetched with the chart, and anew now and then while the run goes on. Of
   * what has a chart of its own, that one's samples are drawn. */
  async loadLines() {
    this.linesAt = performance.now();
    await Promise.all(this.lines.map(async (line) => {
      const own = !line.run && Object.keys(line.query).length === 1 && this.board.charts.get(line.query.name);
      if (own) {
        await own.fetch();
        line.data = own.data;
        return;
      }
      const body = await seriesOf(line.run ?? this.board.run, { ...this.#over(), ...line.query }).catch(() => null);
      if (!body) return;
      this.board.saw(body.step.at(-1) ?? 0); // another run may be longer
      line.data = { step: body.step, time: body.time ?? [], mean: body.mean.map(finiteOf) };
    }));
    if (this.lines.length) this.board.painter.want(this, "draw");
  }

  /** The steps that are asked for, and in how many buckets. */
  #over() {
    const [from, to] = this.board.window() ?? [];
    return { points: this.board.points(), ...(from == null ? {} : { from, to }) };
  }

  get isLog() {
    return this.own.log ?? this.board.log;
  }

  /** Whether every value of the run is the same: then it is a line in a table, not a chart. */
  get isUnchanging() {
    const { min, max, step } = this.data;
    return step.length > 0 && min[0] != null && min.every((value, i) => value === min[0] && max[i] === min[0]);
  }

  #replace(body) {
    this.failed = "";
    this.data = { // of its own: the answer may be another chart's, too
      step: [...body.step],
      time: body.time?.length === body.step.length ? [...body.time] : [],
      min: body.min.map(finiteOf),
      max: body.max.map(finiteOf),
      mean: body.mean.map(finiteOf),
      count: [...body.count],
      bad: [...body.nonfinite],
    };
    const end = this.data.step.length - 1;
    // A bucket is named by its first step, and what it holds must not be appended again. How far it reaches is told by its
    // count, unless a step has several samples; then by how far the run is known to be. In doubt a step is drawn twice.
    const inside = end >= 0 ? Math.ceil(body.count[end] / Math.max(1, this.board.world)) : 0;
    this.covered = end >= 0 ? Math.max(this.data.step[end], Math.min(this.data.step[end] + inside - 1, this.board.lastStep)) : -1;
    // The mean of many samples is not the newest of them, and the last one of a part of the run is not the run's.
    if ((this.panel && end >= 0) || (this.latest == null && body.count[end] === 1 && !this.board.fixed())) this.latest = this.data.mean[end];
    const typical = this.data.mean.filter((value) => value != null && value !== 0).map(Math.abs).toSorted((a, b) => a - b);
    this.scale = scaleOf(this.metric, typical.length ? typical[typical.length >> 1] : 0);
    const largest = this.data.max.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
    if (largest >= 1000 * this.scale.by) this.scale = scaleOf(this.metric, largest); // an axis to 40 ms, not to 40k µs
    const waiting = this.waiting;
    this.waiting = [];
    if (!this.board.fixed()) for (const band of waiting) this.#push(band);
    this.drawnTo = 0;
    this.needsDraw = true;
  }

  /** A live band: columns step, time, min, max, mean, count, nonfinite. */
  append(band) {
    const end = band.step.length - 1;
    if (end < 0) return;
    this.latest = numberOf(band.mean[end]);
    if (this.stale) return;
    if (this.loading) {
      if (this.waiting.length < 200) this.waiting.push(band);
      else this.stale = true;
      return;
    }
    if (this.board.fixed()) return;
    this.#push(band);
    if (this.data.step.length > MAX_POINTS) {
      if (this.visible) this.load();
      else this.stale = true;
      return;
    }
    this.board.painter.want(this, "extend");
  }

  #push(band) {
    const d = this.data;
    const single = this.metric.over === "sum"; // over ranks the line is their sum: the band of single ranks is another quantity
    for (let i = 0; i < band.step.length; i++) {
      if (band.step[i] <= this.covered) continue;
      const mean = finiteOf(band.mean[i]);
      d.step.push(band.step[i]);
      if (d.time.length === d.step.length - 1) d.time.push(band.time[i]);
      d.min.push(single ? mean : finiteOf(band.min[i]));
      d.max.push(single ? mean : finiteOf(band.max[i]));
      d.mean.push(mean);
      d.count.push(band.count?.[i] ?? 1);
      d.bad.push(band.nonfinite?.[i] ?? (mean == null ? 1 : 0));
      this.covered = band.step[i];
    }
  }

  // --- drawing -----------------------------------------------------------------------------------------------------------

  /** Positions [from, to) of what lies in the steps that are shown: live data that has left them is still held. */
  shown() {
    const { step, count } = this.data;
    const window = this.board.window();
    if (!window) return [0, step.length];
    let from = lastAtOrBefore(step, window[0] - 1) + 1;
    const reaches = from > 0 && step[from - 1] + Math.ceil(count[from - 1] / Math.max(1, this.board.world)) > window[0];
    if (reaches) from--; // a bucket that begins before them and ends in them
    return [from, lastAtOrBefore(step, window[1]) + 1];
  }

  xs({ step, time }) {
    const board = this.board;
    if (board.axis.mode === "step" || (board.axis.isByTime && time.length !== step.length)) return step;
    return board.axis.isByTime ? time.map((t) => board.axis.ofTime(t)) : step.map((one) => board.axis.ofStep(one));
  }

  ys(column) {
    const { by } = this.scale;
    const log = this.isLog;
    return column.map((value) => (value == null || (log && value <= 0) ? null : value / by));
  }

  /** Somebody's choice; else a line that goes up and down by a good part of its whole range is smoothed by itself. */
  get smoothing() {
    return this.board.smoothing || (!this.board.bare && isNoisy(this.data.mean) ? BY_ITSELF : 0);
  }

  /** Exponential moving average without the bias of its start. */
  smooth(mean) {
    const weight = this.smoothing;
    const { by } = this.scale;
    let [sum, mass] = [0, 0];
    return mean.map((value) => {
      if (value == null) return null;
      sum = sum * weight + (1 - weight) * (value / by);
      mass = mass * weight + (1 - weight);
      return sum / mass;
    });
  }

  yRange() {
    let low = Infinity;
    let high = -Infinity;
    let above = Infinity; // smallest positive value, for a logarithmic axis
    const [from, to] = this.shown();
    for (const column of [this.data.min, this.data.max]) {
      for (const value of column.slice(from, to)) {
        if (value == null) continue;
        if (value < low) low = value;
        if (value > high) high = value;
        if (value > 0 && value < above) above = value;
      }
    }
    this.clipped = [];
    for (const { data } of this.lines) for (const value of [data?.mean, data?.low, data?.high].flat()) if (value != null) [low, high, above] = [Math.min(low, value), Math.max(high, value), value > 0 ? Math.min(above, value) : above];
    this.unseen = this.isLog && high <= 0 && low <= high;
    if (low > high) return null;
    if (this.board.clip) [low, high] = this.usual(low, high);
    const { by } = this.scale;
    if (this.own.low != null || this.own.high != null) return this.#chosen(low / by, high / by);
    if (this.isLog) {
      if (high <= 0) return null;
      const [a, b] = [Math.log10(above / by), Math.log10(high / by)];
      const pad = Math.max((b - a) * 0.06, 0.05);
      return [a - pad, b + pad];
    }
    low /= by;
    high /= by;
    if (this.fromZero && low >= 0) return [0, high === 0 ? 1 : high * 1.08];
    const pad = high - low > 1e-9 * Math.abs(high) ? (high - low) * 0.07 : Math.abs(high) * 0.05 || 1;
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  }

  /** The range that somebody has typed; what they left out is that of the data. */
  #chosen(low, high) {
    const [from, to] = [this.own.low ?? low, this.own.high ?? high];
    if (!(to > from)) return [low, low === high ? low + 1 : high];
    return this.isLog ? [Math.log10(Math.max(from, Number.MIN_VALUE)), Math.log10(Math.max(to, Number.MIN_VALUE))] : [from, to];
  }

  /** The extremes without spikes: what lies further from the middle nine tenths than three times their width is left out. */
  usual(low, high) {
    const shown = this.shown();
    const values = [...this.data.min.slice(...shown), ...this.data.max.slice(...shown)].filter((value) => value != null).toSorted((a, b) => a - b);
    const at = (share) => values[Math.min(values.length - 1, Math.floor(share * values.length))];
    const [a, b] = [at(0.05), at(0.95)];
    const reach = 3 * (b - a);
    if (!(reach > 0)) return [low, high];
    if (high > b + reach) {
      this.clipped.push(say("clipped_above", { value: si(high / this.scale.by) }));
      high = values.findLast((value) => value <= b + reach);
    }
    if (low < a - reach) {
      this.clipped.push(say("clipped_below", { value: si(low / this.scale.by) }));
      low = values.find((value) => value >= a - reach);
    }
    return [low, high];
  }

  #scaleY(layout) {
    const y = this.yRange();
    const range = y ?? [0, 1]; // nothing to scale by: an axis without labels
    Object.assign(layout.yaxis, { range, showticklabels: y != null }, this.isLog ? logTicks(range) : linearTicks(range));
  }

  /** Puts what is held into the traces of a figure. */
  fill(traces) {
    const rows = this.board.axis.isByTime ? this.data : byStep(this.data);
    const put = (trace, x, y) => Object.assign(traces[trace], { x, y, visible: x.length > 0 }); // plotly works on empty ones, too
    const x = this.xs(rows);
    const [low, high, mean] = [rows.min, rows.max, rows.mean].map((column) => this.ys(column));
    const wide = low.some((value, i) => value !== high[i]); // else both edges would be the line itself, drawn three times
    put(BAND, ...(wide ? bandOf(x, low, high) : [[], []]));
    put(LOW, ...(wide ? [x, low] : [[], []]));
    put(HIGH, ...(wide ? [x, high] : [[], []]));
    put(MEAN, x, mean);
    if (this.smoothing > 0) put(SMOOTH, x, this.smooth(rows.mean));
    const bad = x.filter((_, i) => rows.bad[i]);
    put(NONFINITE, bad, bad.map(() => 0.94));
    // A line begins with two points: one between gaps is a dot, with its range.
    const alone = [...mean.keys()].filter((i) => mean[i] != null && mean[i - 1] == null && mean[i + 1] == null);
    put(POINTS, alone.map((i) => x[i]), alone.map((i) => mean[i]));
    const error = { array: alone.map((i) => (high[i] ?? mean[i]) - mean[i]), arrayminus: alone.map((i) => mean[i] - (low[i] ?? mean[i])) };
    traces[POINTS].error_y = { ...traces[POINTS].error_y, ...error };
  }

  /** The further lines, one hue each, with a legend that tells their values under the cursor and brings out what is pointed at. */
  #further() {
    this.card.querySelector(".shares")?.remove();
    if (!this.lines.some((line) => line.data)) return [];
    this.lines.forEach((line, i) => Object.assign(line, { colour: colorOf(`series-${(i + 1) % COLOURS}`), told: el("b") }));
    const [key, label] = this.board.over[0] ?? ["", this.spec.label ?? this.metric.title];
    const first = { key, label, colour: colorOf("accent"), data: this.data, told: this.board.over.length ? (this.valueOfFirst = el("b")) : null };
    this.frame.before(el("div", { class: "shares", tabindex: this.board.over.length > MANY ? 0 : null }, [first, ...this.lines.filter((line) => line.data)].map((line) => {
      const swatch = el("i", { "aria-hidden": "true" });
      swatch.style.background = line.colour;
      const point = (at) => () => ((this.pointed = at), this.fade());
      return el("span", { class: "share", title: line.label, on: { pointerenter: point(line.key), pointerleave: point(null) } }, swatch, el("span", null, line.label), line.told);
    })));
    return this.lines.filter((line) => line.data?.mean.length).flatMap((line) => {
      const { data, colour } = line;
      const x = this.xs(data);
      const meta = { key: line.key, opacity: 1 };
      const [low, high] = [data.low, data.high].map((column) => this.ys(column ?? []));
      const [xs, ys] = bandOf(x, low, high);
      const band = xs.length ? [{ type: "scatter", mode: "none", hoverinfo: "skip", fill: "toself", fillcolor: `${colour}22`, x: xs, y: ys, meta }] : [];
      return [...band, { type: "scatter", mode: "lines", hoverinfo: "skip", line: { width: 1.4, color: colour }, x, y: this.smoothing > 0 ? this.smooth(data.mean) : this.ys(data.mean), meta }];
    });
  }

  /** Of a line that is not pointed at, or not among those picked: faded. */
  #opacity({ meta }) {
    const isFaded = this.pointed ? meta.key !== this.pointed : this.board.isFaded(meta.key);
    return isFaded ? FADED : meta.opacity;
  }

  fade() {
    if (this.plot.data && this.board.over.length) window.Plotly.restyle(this.plot, { opacity: this.plot.data.map((trace) => this.#opacity(trace)) });
  }

  /** In the legend: the value of each further line at a step; null where there is no cursor. */
  #tellLines(step) {
    for (const { data, told } of [{ data: this.data, told: this.valueOfFirst }, ...this.lines]) {
      if (!told) continue;
      const value = step == null || !data ? null : data.mean[lastAtOrBefore(data.step, step)];
      setText(told, value == null ? "" : si(value / this.scale.by));
    }
  }

  draw() {
    const { data, layout } = figureOf("series");
    this.fill(data);
    if (this.smoothing > 0) {
      data[SMOOTH].visible = true;
      data[MEAN].opacity = 0.35;
    }
    data.push(...this.#further());
    for (const trace of this.board.over.length ? data : []) {
      trace.meta ??= { key: this.board.over[0][0], opacity: trace.opacity ?? 1 };
      trace.opacity = this.#opacity(trace);
    }
    this.#scaleY(layout);
    this.marks(layout);
    this.frame.dataset.axis = this.board.axis.title();
    drawPlot(this, data, layout);
    this.needsDraw = false;
    this.#drawn();
  }

  /** Draws what came since. Plotly looks at all points again in any case, so they are all handed to it again. */
  extend() {
    if (this.drawnTo === this.data.step.length) return this.showValue();
    if (!this.drawnTo || this.needsDraw || this.plot.layout?.width !== this.frame.clientWidth) return this.draw();
    if (this.lines.length && performance.now() - this.linesAt > LINES_MS) this.loadLines();
    this.fill(this.plot.data);
    this.board.axis.describe(this.plot.layout.xaxis);
    this.#scaleY(this.plot.layout);
    window.Plotly.redraw(this.plot);
    return this.#drawn();
  }

  #drawn() {
    this.drawnTo = this.data.step.length;
    this.plot.dataset.points = String(this.drawnTo);
    this.plot.dataset.lastStep = String(this.data.step[this.drawnTo - 1] ?? "");
    this.#tell();
    this.showValue();
  }

  /** What stands over the plot: why it is empty, or that it is not what was asked for. */
  #tell() {
    const none = !this.data.step.length && !this.lines.some((line) => line.data?.mean.length) ? words.no_samples : this.unseen ? words.no_positive : "";
    setText(this.empty, this.failed || none);
    this.empty.hidden = !(this.failed || none);
    this.plot.style.opacity = this.failed ? DIMMED : "";
  }

  /** The samples of the last step up to this one; none before the first. */
  at(step) {
    const to = lastAtOrBefore(this.data.step, step) + 1;
    return together(this.data, lastAtOrBefore(this.data.step, this.data.step[to - 1] - 1) + 1, to);
  }

  /** What the pointer is on, in words. */
  told(step) {
    const { mean } = this.at(step);
    return mean == null ? "" : `${si(mean / this.scale.by)} ${this.scale.unit}`.trim();
  }

  /** The newest value, or the one under the cursor. */
  showValue() {
    const { by } = this.scale;
    const pointed = this.cursor.hidden || !this.data.step.length ? null : this.board.cursor.pointed;
    this.#tellLines(pointed);
    const one = pointed == null ? { mean: this.latest, bad: 0 } : this.at(pointed);
    const bad = one.mean == null ? one.bad > 0 : !Number.isFinite(one.mean);
    // Of a bucket it is only known how many are not finite, not which of both they are.
    const absent = bad ? words.legend_nonfinite : pointed == null && this.data.step.length ? "" : words.na;
    setText(this.unit, this.scale.unit === this.title?.textContent ? "" : this.scale.unit);
    setText(this.value, one.mean == null ? absent : si(one.mean / by));
    const [low, high] = [one.min, one.max].map((value) => (value == null ? "" : si(value / by)));
    if (low !== high) this.value.append(el("small", null, ` ${low} … ${high}`));
    this.value.classList.toggle("bad", bad);
    const lost = this.data.bad.slice(...this.shown()).reduce((sum, count) => sum + count, 0);
    const told = lost ? [say(this.board.window() ? "nonfinite_shown" : "nonfinite", { count: thousands(lost) })] : [];
    setText(this.flag, [...(this.clipped ?? []), ...told].join(" · "));
  }

  /** Lines at steps: what the page marks, what people wrote, and where alerts began. */
  marks(layout) {
    const { axis, marked, notes } = this.board;
    const [from, to] = this.board.window() ?? [-Infinity, Infinity];
    Object.assign(layout, { shapes: [], annotations: [] });
    const mark = (step, color, look, noteAt) => {
      const x = step >= from && step <= to ? axis.ofStep(step) : null;
      if (x == null) return;
      layout.shapes.push({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color, width: 1.2, dash: "dot" }, ...look });
      if (noteAt) layout.annotations.push({ x: axis.isLog ? Math.log10(x) : x, yref: "paper", showarrow: false, captureevents: true, ...noteAt(x) });
    };
    for (const step of marked) mark(step, colorOf("critical"));
    if (this.board.bare) return;
    for (const { step, text } of notes) {
      const color = colorOf("accent");
      mark(step, color, { line: { color, width: 1 }, opacity: 0.6 }, () => ({ name: "note", y: 0, yanchor: "bottom", text: "◆", hovertext: text.replace(/[<>&]/g, ""), font: { size: 11, color } }));
    }
    for (const { rule, severity, since_step } of this.board.marksOf(this.name)) {
      const color = colorOf(severity);
      const [low, high] = axis.range() ?? [-Infinity, Infinity];
      mark(since_step, color, null, (x) => ({
        y: this.data.bad.some(Boolean) ? 0.88 : 1, yanchor: "top", xanchor: x > low + (high - low) * 0.5 ? "right" : "left", borderpad: 1,
        text: `▼ ${rule.replaceAll("_", " ").replace(/[<>&]/g, "")}`, font: { size: 10, color }, bgcolor: colorOf("card"), opacity: 0.95,
      }));
    }
  }

  destroy() {
    this.abort?.abort();
    clearTimeout(this.reloading);
    window.Plotly?.purge(this.plot);
  }
}
