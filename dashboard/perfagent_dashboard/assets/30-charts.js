// The charts of a run: what is fetched, what is appended, and when it is drawn.
//
// A chart holds at most MAX_POINTS buckets. It is fetched at a level of detail that fits its width (the server keeps min, max
// and mean of every bucket), live samples are appended, and when there are too many it is fetched again. Only charts on
// screen are drawn, each at most once in an animation frame, and a frame stops drawing when its time is used up.
(function () {
  "use strict";
  const pa = window.perfagent;
  const { words, charts: KNOWN, phases: PHASES } = pa.config;

  const MAX_POINTS = 1600;
  const FRAME_MS = 24;
  const MIN_LIVE_MS = 120;
  const MAX_CARDS = 160;
  const [BAND, LOW, HIGH, MEAN, SMOOTH, NONFINITE, POINTS] = [0, 1, 2, 3, 4, 5, 6]; // as in figures/series.py
  const DIMMED = "0.25";
  const PLOT = { displayModeBar: false, doubleClick: false, scrollZoom: false, showAxisDragHandles: false, showTips: false };
  const UNITS = [[180, 1, "unit_s"], [3 * 3600, 60, "unit_min"], [4 * 86400, 3600, "unit_h"], [Infinity, 86400, "unit_d"]];
  const coarse = window.matchMedia("(pointer: coarse)");

  const empty = () => ({ step: [], time: [], min: [], max: [], mean: [], count: [], bad: [] });

  /** Position of the last element that is <= value, -1 when all are greater. */
  function lastAtOrBefore(sorted, value) {
    let low = 0;
    let high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] <= value) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  function finite(value) {
    return value != null && Number.isFinite(value) ? value : null;
  }

  /** Samples [from, to) as one: mean, min, max, and how many are not finite. */
  function together(data, from, to) {
    const one = { min: null, max: null, mean: null, bad: 0 };
    let [sum, finite] = [0, 0];
    for (let i = from; i < to; i++) {
      one.bad += data.bad[i];
      if (data.mean[i] == null) continue;
      const weight = Math.max(1, data.count[i] - data.bad[i]);
      sum += data.mean[i] * weight;
      finite += weight;
      one.min = Math.min(one.min ?? Infinity, data.min[i] ?? Infinity);
      one.max = Math.max(one.max ?? -Infinity, data.max[i] ?? -Infinity);
    }
    if (finite) one.mean = to - from === 1 ? data.mean[from] : sum / finite;
    return one;
  }

  /** The same with one row a step: the host is looked at by the clock, many times in a long step. */
  function byStep(data) {
    const { step } = data;
    if (!step.some((one, i) => i > 0 && one === step[i - 1])) return data;
    const rows = empty();
    for (let from = 0, to; from < step.length; from = to) {
      for (to = from + 1; step[to] === step[from]; ) to++;
      rows.step.push(step[from]);
      for (const [name, value] of Object.entries(together(data, from, to))) rows[name].push(value);
    }
    return rows;
  }

  /** The edge of the band: along low and back along high, again for every stretch without a gap. A line from one stretch to
   * the next would enclose values that never were; a stretch without width has no band. */
  function bandOf(x, low, high) {
    const [xs, ys] = [[], []];
    for (let from = 0, to; from < x.length; from = to + 1) {
      let wide = false;
      for (to = from; to < x.length && low[to] != null && high[to] != null; to++) wide ||= low[to] < high[to];
      if (!wide) continue;
      xs.push(...x.slice(from, to), ...x.slice(from, to).reverse(), null);
      ys.push(...low.slice(from, to), ...high.slice(from, to).reverse(), null);
    }
    return [xs, ys];
  }

  // --- the vertical axis -----------------------------------------------------------------------------------------------------

  function linearTicks([low, high]) {
    const size = Math.max(Math.abs(low), Math.abs(high));
    const far = size < 1e-3 || size >= 1e15;
    // 1,000,000.2: such labels are longer than the margin, and cut off they would be other numbers. Making room for them costs
    // time at every drawing, so only here.
    const long = high - low < size / 1000;
    const exponentformat = far ? "e" : long && size < 1e7 ? "none" : "SI";
    return { type: "linear", exponentformat, separatethousands: long, automargin: long || far, dtick: undefined };
  }

  /** A step of 1, 2 or 5 times a power of ten that is not smaller. */
  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return Number(([1, 2, 5].find((one) => one * power >= least) ?? 10) * power).toPrecision(1);
  }

  /** low and high are powers of ten. */
  function logTicks([low, high]) {
    let dtick = Math.max(1, Math.ceil((high - low) / 5));
    if (high - low <= 1.2) {
      const decades = [0, 1, 2].map((more) => Math.floor(low) + more);
      const ticks = decades.flatMap((one) => [one, one + Math.log10(2), one + Math.log10(5)]);
      const enough = ticks.filter((one) => one >= low && one <= high).length >= 2;
      dtick = enough ? "D2" : `L${niceStep((10 ** high - 10 ** low) / 4)}`;
    }
    return { type: "log", exponentformat: "SI", separatethousands: false, automargin: false, dtick };
  }

  // --- one series ------------------------------------------------------------------------------------------------------------

  class Chart {
    #latest = null;

    constructor(board, spec) {
      this.board = board;
      this.name = spec.name;
      this.group = spec.group;
      this.fromZero = spec.from_zero;
      this.metric = pa.metric(spec.name);
      this.scale = pa.scale(this.metric, 0);
      this.data = empty();
      this.waiting = [];
      this.visible = false;
      this.stale = true; // what is held is not what should be shown: fetch when on screen
      this.drawnTo = 0;
      this.failed = ""; // why what should be shown could not be fetched
      this.title = pa.el("h2", { title: this.metric.meaning || this.name }, this.metric.title);
      this.unit = pa.el("span", { class: "unit" });
      this.flag = pa.el("span", { class: "flag" });
      this.value = pa.el("span", { class: "now" }); // no <output>: a screen reader would speak every value of every chart
      this.plot = pa.el("div", { class: "plot", role: "img", "aria-label": this.metric.title });
      this.cursor = pa.el("i", { class: "cursor", hidden: true });
      this.empty = pa.el("p", { class: "empty" }, words.loading);
      this.frame = pa.el("div", { class: "frame" }, this.plot, this.cursor, this.empty);
      this.card = pa.el(
        "figure",
        { class: "card chart", "data-name": this.name, "data-group": this.group },
        pa.el("figcaption", null, this.title, this.unit, this.flag, this.value),
        this.frame,
      );
      this.frame.addEventListener("pointermove", (event) => this.board.hover(this, event));
      this.frame.addEventListener("pointerleave", () => this.board.unhover());
    }

    /** The newest value of the run; null as long as it is not known. */
    get latest() {
      return this.#latest;
    }

    set latest(value) {
      this.#latest = value;
      this.board.want(this, "value");
    }

    /** Loads unless it is loaded or about to be; what is on its way for steps that are no longer asked for is given up. */
    fetch() {
      if (this.stale) this.load();
    }

    async load() {
      this.abort?.abort();
      const abort = (this.abort = new AbortController());
      this.stale = false;
      this.loading = true;
      const query = new URLSearchParams({ name: this.name, points: String(this.board.points()) });
      const window = this.board.window();
      if (window) {
        query.set("from", String(window[0]));
        query.set("to", String(window[1]));
      }
      try {
        const body = await pa.api(`/runs/${encodeURIComponent(this.board.run)}/series?${query}`, { signal: abort.signal });
        if (abort.signal.aborted) return;
        this.#replace(body);
      } catch (error) {
        if (abort.signal.aborted || error.name === "AbortError") return;
        this.stale = true;
        this.failed = pa.say("chart_failed", { message: error.message });
        this.#tell();
        this.board.wantStack(this, "draw");
        return;
      } finally {
        if (this.abort === abort) this.loading = false;
      }
      this.board.want(this, "draw");
      this.board.changed(this);
    }

    #replace(body) {
      this.failed = "";
      const numbers = (column) => column.map((value) => finite(pa.num(value)));
      this.data = {
        step: body.step,
        time: body.time?.length === body.step.length ? body.time : [],
        min: numbers(body.min),
        max: numbers(body.max),
        mean: numbers(body.mean),
        count: body.count,
        bad: body.nonfinite,
      };
      const end = this.data.step.length - 1;
      // A bucket is named by its first step, and what it holds must not be appended again. How far it reaches is told by its
      // count, unless a step has several samples; then by how far the run is known to be. In doubt a step is drawn twice.
      const inside = end >= 0 ? Math.ceil(body.count[end] / Math.max(1, this.board.world)) : 0;
      this.covered = end >= 0 ? Math.max(this.data.step[end], Math.min(this.data.step[end] + inside - 1, this.board.lastStep)) : -1;
      // The mean of many samples is not the newest of them, and the last one of a part of the run is not the run's.
      if (this.latest == null && body.count[end] === 1 && !this.board.fixed()) this.latest = this.data.mean[end];
      const typical = this.data.mean.filter((value) => value != null && value !== 0).map(Math.abs);
      typical.sort((a, b) => a - b);
      this.scale = pa.scale(this.metric, typical.length ? typical[typical.length >> 1] : 0);
      const largest = this.data.max.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
      if (largest >= 1000 * this.scale.by) this.scale = pa.scale(this.metric, largest); // an axis to 40 ms, not to 40k µs
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
      this.latest = pa.num(band.mean[end]);
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
      this.board.want(this, "extend");
    }

    #push(band) {
      const d = this.data;
      const single = this.metric.over === "sum"; // over ranks the line is their sum: the band of single ranks is another quantity
      for (let i = 0; i < band.step.length; i++) {
        if (band.step[i] <= this.covered) continue;
        const mean = finite(pa.num(band.mean[i]));
        d.step.push(band.step[i]);
        if (d.time.length === d.step.length - 1) d.time.push(band.time[i]);
        d.min.push(single ? mean : finite(pa.num(band.min[i])));
        d.max.push(single ? mean : finite(pa.num(band.max[i])));
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
      return board.mode === "step" || time.length !== step.length ? step : time.map((t) => board.timeX(t));
    }

    ys(column) {
      const { by } = this.scale;
      const log = this.board.log;
      return column.map((value) => (value == null || (log && value <= 0) ? null : value / by));
    }

    /** Exponential moving average without the bias of its start. */
    smooth(mean) {
      const weight = this.board.smoothing;
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
      this.unseen = this.board.log && high <= 0 && low <= high;
      if (low > high) return null;
      if (this.board.clip) [low, high] = this.usual(low, high);
      const { by } = this.scale;
      if (this.board.log) {
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

    /** The extremes without spikes: what lies further from the middle nine tenths than three times their width is left out. */
    usual(low, high) {
      const shown = this.shown();
      const values = [...this.data.min.slice(...shown), ...this.data.max.slice(...shown)].filter((value) => value != null);
      values.sort((a, b) => a - b);
      const at = (share) => values[Math.min(values.length - 1, Math.floor(share * values.length))];
      const [a, b] = [at(0.05), at(0.95)];
      const reach = 3 * (b - a);
      if (!(reach > 0)) return [low, high];
      if (high > b + reach) {
        this.clipped.push(pa.say("clipped_above", { value: pa.si(high / this.scale.by) }));
        high = values.findLast((value) => value <= b + reach);
      }
      if (low < a - reach) {
        this.clipped.push(pa.say("clipped_below", { value: pa.si(low / this.scale.by) }));
        low = values.find((value) => value >= a - reach);
      }
      return [low, high];
    }

    axes(layout) {
      this.board.xAxis(layout.xaxis);
      const x = this.board.xRange();
      if (x) layout.xaxis.range = x;
      const y = this.yRange();
      const range = y ?? [0, 1]; // nothing to scale by: an axis without labels
      Object.assign(layout.yaxis, { range, showticklabels: y != null }, this.board.log ? logTicks(range) : linearTicks(range));
    }

    /** Puts what is held into the traces of a figure. */
    fill(traces) {
      const rows = this.board.mode === "step" ? byStep(this.data) : this.data;
      const put = (trace, x, y) => Object.assign(traces[trace], { x, y });
      const x = this.xs(rows);
      const [low, high, mean] = [rows.min, rows.max, rows.mean].map((column) => this.ys(column));
      const wide = low.some((value, i) => value !== high[i]); // else both edges would be the line itself, drawn three times
      put(BAND, ...(wide ? bandOf(x, low, high) : [[], []]));
      put(LOW, ...(wide ? [x, low] : [[], []]));
      put(HIGH, ...(wide ? [x, high] : [[], []]));
      put(MEAN, x, mean);
      if (this.board.smoothing > 0) put(SMOOTH, x, this.smooth(rows.mean));
      const bad = x.filter((_, i) => rows.bad[i]);
      put(NONFINITE, bad, bad.map(() => 0.94));
      // A line begins with two points: one between gaps is a dot, with its range.
      const alone = [...mean.keys()].filter((i) => mean[i] != null && mean[i - 1] == null && mean[i + 1] == null);
      put(POINTS, alone.map((i) => x[i]), alone.map((i) => mean[i]));
      const error = { array: alone.map((i) => (high[i] ?? mean[i]) - mean[i]), arrayminus: alone.map((i) => mean[i] - (low[i] ?? mean[i])) };
      traces[POINTS].error_y = { ...traces[POINTS].error_y, ...error };
    }

    draw() {
      const { data, layout } = structuredClone(pa.config.figures[pa.theme].series);
      this.fill(data);
      if (this.board.smoothing > 0) {
        data[SMOOTH].visible = true;
        data[MEAN].opacity = 0.35;
      }
      layout.width = this.frame.clientWidth;
      layout.height = this.frame.clientHeight;
      layout.dragmode = coarse.matches ? false : "zoom";
      this.axes(layout);
      this.marks(layout);
      const first = !this.plot.classList.contains("js-plotly-plot");
      window.Plotly.react(this.plot, data, layout, PLOT);
      if (first) {
        this.plot.on("plotly_relayout", (change) => {
          if ("xaxis.range[0]" in change) this.board.zoomTo(change["xaxis.range[0]"], change["xaxis.range[1]"]);
        });
        this.plot.on("plotly_doubleclick", () => this.board.setRange(null));
      }
      this.needsDraw = false;
      this.#drawn();
    }

    /** Draws what came since. Plotly looks at all points again in any case, so they are all handed to it again. */
    extend() {
      if (this.drawnTo === this.data.step.length) return this.showValue();
      if (!this.drawnTo || this.needsDraw || this.plot.layout?.width !== this.frame.clientWidth) return this.draw();
      this.fill(this.plot.data);
      this.axes(this.plot.layout);
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
      const none = !this.data.step.length ? words.no_samples : this.unseen ? words.no_positive : "";
      pa.setText(this.empty, this.failed || none);
      this.empty.hidden = !(this.failed || none);
      this.plot.style.opacity = this.failed ? DIMMED : "";
    }

    /** The samples of the last step up to this one; none before the first. */
    at(step) {
      const to = lastAtOrBefore(this.data.step, step) + 1;
      return together(this.data, lastAtOrBefore(this.data.step, this.data.step[to - 1] - 1) + 1, to);
    }

    /** The newest value, or the one under the cursor. */
    showValue() {
      const { by } = this.scale;
      const pointed = this.cursor.hidden || !this.data.step.length ? null : this.board.pointed;
      const one = pointed == null ? { mean: this.latest, bad: 0 } : this.at(pointed);
      const bad = one.mean == null ? one.bad > 0 : !Number.isFinite(one.mean);
      // Of a bucket it is only known how many are not finite, not which of both they are.
      const absent = bad ? words.legend_nonfinite : pointed == null && this.data.step.length ? "" : words.na;
      pa.setText(this.unit, this.scale.unit === this.title?.textContent ? "" : this.scale.unit);
      pa.setText(this.value, one.mean == null ? absent : pa.si(one.mean / by));
      const [low, high] = [one.min, one.max].map((value) => (value == null ? "" : pa.si(value / by)));
      if (low !== high) this.value.append(pa.el("small", null, ` ${low} … ${high}`));
      this.value.classList.toggle("bad", bad);
      const lost = this.data.bad.slice(...this.shown()).reduce((sum, count) => sum + count, 0);
      pa.setText(this.flag, [...(this.clipped ?? []), ...(lost ? [pa.say("nonfinite", { count: pa.count(lost) })] : [])].join(" · "));
    }

    marks(layout) {
      const color = getComputedStyle(document.documentElement);
      layout.shapes = [];
      layout.annotations = [];
      const window = this.board.window();
      for (const alert of this.board.marksOf(this.name)) {
        const step = alert.since_step;
        if (window && (step < window[0] || step > window[1])) continue;
        const x = this.board.stepX(step);
        if (x == null) continue;
        const paint = color.getPropertyValue(alert.severity === "critical" ? "--critical" : alert.severity === "warning" ? "--warning" : "--info");
        layout.shapes.push({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: paint, width: 1.2, dash: "dot" } });
        const range = this.board.xRange();
        const right = range && x > range[0] + (range[1] - range[0]) * 0.5;
        layout.annotations.push({
          x, yref: "paper", y: this.data.bad.some(Boolean) ? 0.88 : 1, yanchor: "top", xanchor: right ? "right" : "left", showarrow: false, borderpad: 1,
          text: `▼ ${alert.rule.replaceAll("_", " ").replace(/[<>&]/g, "")}`, font: { size: 10, color: paint }, bgcolor: color.getPropertyValue("--card"), opacity: 0.95,
        });
      }
    }

    destroy() {
      this.abort?.abort();
      window.Plotly.purge(this.plot);
    }
  }

  // --- where a step goes -----------------------------------------------------------------------------------------------------

  class StepChart {
    constructor(board) {
      this.board = board;
      this.visible = false;
      this.plot = pa.el("div", { class: "plot", role: "img", "aria-label": words.where });
      this.empty = pa.el("p", { class: "empty" }, words.where_empty);
      this.unit = pa.el("span", { class: "unit" });
      this.total = pa.el("span", { class: "now" });
      this.legend = pa.el("div", { class: "shares" });
      this.cursor = pa.el("i", { class: "cursor", hidden: true });
      this.frame = pa.el("div", { class: "frame" }, this.plot, this.cursor, this.empty);
      this.card = pa.el(
        "figure",
        { class: "card chart wide", "data-name": "step", "data-group": "speed" },
        pa.el("figcaption", null, pa.el("h2", null, words.where), this.unit, this.total),
        this.legend,
        this.frame,
      );
      this.frame.addEventListener("pointermove", (event) => this.board.hover(this, event));
      this.frame.addEventListener("pointerleave", () => this.board.unhover());
      this.drawn = 0;
    }

    parts() {
      return PHASES.map((phase) => [phase, this.board.charts.get(`phase/${phase}_s`)]).filter(([, chart]) => chart);
    }

    /** Seconds a step by phase, over equal bins of steps. A phase that happens rarely is spread over the steps of its bin. */
    bins(count) {
      const chart = this.board.charts.get("step_time_s");
      const whole = chart?.data ?? empty();
      const [from, to] = chart?.shown() ?? [0, 0];
      if (from >= to) return null;
      const first = whole.step[from];
      const last = whole.step[to - 1];
      const n = Math.max(1, Math.min(count, to - from));
      const width = (last - first + 1) / n;
      const steps = new Float64Array(n);
      const times = new Float64Array(n);
      // A bucket reaches over as many steps as it counts; where it crosses the edge of a bin, both get their share.
      const spread = (data, i, into, value) => {
        const reach = Math.max(1, data.count[i] / this.board.world);
        const begin = Math.max(0, (data.step[i] - first) / width);
        const end = Math.min(n, (data.step[i] + reach - first) / width);
        for (let bin = Math.floor(begin); bin < end; bin++) {
          into[bin] += value * data.count[i] * ((Math.min(bin + 1, end) - Math.max(bin, begin)) * (width / reach));
        }
      };
      let seconds = 0;
      let all = 0;
      for (let i = from; i < to; i++) {
        spread(whole, i, steps, 1);
        times[Math.min(n - 1, Math.floor((whole.step[i] - first) / width))] ||= whole.time[i] ?? 0;
        seconds += (whole.mean[i] ?? 0) * whole.count[i];
        all += whole.count[i];
      }
      const used = [...steps.keys()].filter((i) => steps[i] && times[i]);
      const phases = {};
      const totals = {};
      for (const [phase, chart] of this.parts()) {
        const { data } = chart;
        const sums = new Float64Array(n);
        let any = false;
        let total = 0;
        data.step.forEach((step, i) => {
          if (step < first || step > last || data.mean[i] == null) return;
          spread(data, i, sums, data.mean[i]);
          total += data.mean[i] * data.count[i];
          any = true;
        });
        if (!any) continue;
        phases[phase] = used.map((i) => sums[i] / steps[i]);
        totals[phase] = total / all;
      }
      const x = used.map((i) => (this.board.mode === "step" ? Math.round(first + i * width) : this.board.timeX(times[i])));
      return { x, phases, totals, mean: seconds / all };
    }

    draw() {
      const binned = this.bins(240);
      const drawable = binned && Object.keys(binned.phases).length > 0;
      const charts = [this.board.charts.get("step_time_s"), ...this.parts().map(([, chart]) => chart)];
      const failed = charts.find((chart) => chart?.failed)?.failed;
      pa.setText(this.empty, failed ?? words.where_empty);
      this.empty.hidden = Boolean(drawable) && !failed;
      this.plot.style.opacity = failed ? DIMMED : "";
      this.drawn = performance.now();
      if (!drawable) return;
      const scale = pa.scale({ name: "step_time_s", unit: "s" }, binned.mean);
      const { data, layout } = structuredClone(pa.config.figures[pa.theme].step);
      PHASES.forEach((phase, i) => {
        data[i].x = phase in binned.phases ? binned.x : [];
        data[i].y = (binned.phases[phase] ?? []).map((value) => value / scale.by);
      });
      layout.width = this.frame.clientWidth;
      layout.height = this.frame.clientHeight;
      layout.dragmode = coarse.matches ? false : "zoom";
      layout.yaxis.rangemode = "tozero";
      this.board.xAxis(layout.xaxis);
      const range = this.board.xRange();
      if (range) layout.xaxis.range = range;
      const first = !this.plot.classList.contains("js-plotly-plot");
      window.Plotly.react(this.plot, data, layout, PLOT);
      if (first) {
        this.plot.on("plotly_relayout", (change) => {
          if ("xaxis.range[0]" in change) this.board.zoomTo(change["xaxis.range[0]"], change["xaxis.range[1]"]);
        });
        this.plot.on("plotly_doubleclick", () => this.board.setRange(null));
      }
      this.plot.dataset.points = String(binned.x.length);
      pa.setText(this.unit, `${scale.unit}, ${words.where_unit}`);
      pa.setText(this.total, pa.si(binned.mean / scale.by));
      const sum = Object.values(binned.totals).reduce((a, b) => a + b, 0);
      pa.put(this.legend,
        ...Object.entries(binned.totals).map(([phase, seconds]) => {
          const swatch = pa.el("i", { "aria-hidden": "true" });
          swatch.style.background = `var(--phase-${phase})`;
          const [value, unit] = pa.show({ name: "", unit: "s" }, seconds);
          return pa.el(
            "span",
            { class: "share", title: `${value} ${unit}` },
            swatch,
            pa.metric(`phase/${phase}_s`).title,
            pa.el("b", null, `${((100 * seconds) / sum).toFixed(seconds / sum < 0.1 ? 1 : 0)} %`),
          );
        }),
      );
    }

    extend() {
      // A stack is redrawn as a whole, so less often than a line grows.
      if (performance.now() - this.drawn > 1000) this.draw();
      else {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.board.want(this, "extend"), 1000);
      }
    }

    destroy() {
      clearTimeout(this.timer);
      window.Plotly.purge(this.plot);
    }
  }

  // --- ranks against time ------------------------------------------------------------------------------------------------------

  class RankChart {
    constructor(board) {
      this.board = board;
      this.visible = false;
      this.stale = true;
      this.plot = pa.el("div", { class: "plot", role: "img", "aria-label": words.rank_map });
      this.frame = pa.el("div", { class: "frame" }, this.plot);
      this.card = pa.el(
        "figure",
        { class: "card chart wide", "data-name": "ranks", "data-group": "speed" },
        pa.el("figcaption", null, pa.el("h2", null, words.rank_map), pa.el("span", { class: "unit" }, words.rank_map_unit)),
        this.frame,
      );
    }

    async load() {
      this.stale = false;
      this.loadedAt = this.board.lastStep;
      const query = new URLSearchParams({ name: "step_time_s", points: "120" });
      const window = this.board.window();
      if (window) {
        query.set("from", String(window[0]));
        query.set("to", String(window[1]));
      }
      try {
        this.matrix = await pa.api(`/runs/${encodeURIComponent(this.board.run)}/ranks?${query}`);
        this.plot.style.opacity = "";
      } catch {
        this.plot.style.opacity = DIMMED; // the other charts say why
        return;
      }
      this.board.want(this, "draw");
    }

    draw() {
      if (!this.matrix?.step?.length) return;
      const { data, layout } = structuredClone(pa.config.figures[pa.theme].ranks);
      const rows = this.matrix.mean.map((row) => row.map((value) => finite(pa.num(value))));
      const middle = this.matrix.step.map((_, i) => {
        const column = rows.map((row) => row[i]).filter((value) => value != null).sort((a, b) => a - b);
        return column.length ? (column[(column.length - 1) >> 1] + column[column.length >> 1]) / 2 : null;
      });
      data[0].x = this.matrix.step.map((step) => this.board.stepX(step));
      data[0].y = this.matrix.ranks;
      data[0].z = rows.map((row) => row.map((value, i) => (value == null || !middle[i] ? null : value / middle[i])));
      layout.width = this.frame.clientWidth;
      layout.height = this.frame.clientHeight;
      layout.dragmode = false;
      this.board.xAxis(layout.xaxis);
      const range = this.board.xRange();
      if (range) layout.xaxis.range = range;
      window.Plotly.react(this.plot, data, layout, PLOT);
    }

    /** The map is a level of detail of its own: fetched again when the run has grown by one of its columns. */
    extend() {
      const columns = this.matrix?.step?.length || 1;
      if (!this.board.fixed() && this.board.lastStep - (this.loadedAt ?? 0) > this.board.lastStep / Math.max(columns, 20)) this.load();
    }

    destroy() {
      window.Plotly.purge(this.plot);
    }
  }

  // --- all of them ---------------------------------------------------------------------------------------------------------------

  pa.Board = class {
    /** run: id; host: the grid; onChange(chart): its data changed; onRange(): the range changed. */
    constructor({ run, host, onChange, onRange }) {
      Object.assign(this, { run, host, onChange, onRange });
      this.charts = new Map();
      this.hiddenNames = [];
      this.extra = [];
      this.mode = "step";
      this.log = false;
      this.clip = false; // spikes are shown unless somebody asks to look past them
      this.smoothing = 0;
      this.range = null; // null: everything; [a, b]: these steps; {last: n}: the newest n, moving on
      this.firstStep = 0;
      this.lastStep = 0;
      this.started = null;
      this.world = 1;
      this.table = null;
      this.alerts = [];
      this.marks = {};
      this.wanted = new Map();
      this.nextLive = 0;
      this.filter = { text: "", group: "all" };
      this.observer = new IntersectionObserver((entries) => this.#seen(entries), { rootMargin: "160px" });
      this.resizer = new ResizeObserver(() => {
        clearTimeout(this.resizing);
        this.resizing = setTimeout(() => this.redraw(), 120);
      });
      this.resizer.observe(host);
      this.offTheme = pa.onTheme(() => this.redraw());
    }

    // --- which charts ----------------------------------------------------------------------------------------------------------

    /** Adds charts for names that are new, in the order of the page. True when there were any. */
    addNames(names) {
      const hides = (name) => pa.config.hidden.some((one) => (one.endsWith("/") ? name.startsWith(one) : name === one));
      const fresh = names.filter((name) => !this.charts.has(name) && !hides(name) && !this.hiddenNames.includes(name));
      if (!fresh.length) return false;
      for (const name of fresh) {
        if (this.charts.size >= MAX_CARDS && !pa.metric(name).known) {
          this.hiddenNames.push(name);
          continue;
        }
        const spec = KNOWN.find((known) => known.name === name) ?? { name, group: name.startsWith("node_gpu") ? "device" : "logged", from_zero: false };
        this.charts.set(name, new Chart(this, spec));
      }
      this.#arrange();
      return true;
    }

    /** Makes a chart for a hidden name that the filter asks for. */
    reveal(text) {
      const found = this.hiddenNames.filter((name) => name.toLowerCase().includes(text)).slice(0, 40);
      if (!found.length) return;
      this.hiddenNames = this.hiddenNames.filter((name) => !found.includes(name));
      for (const name of found) this.charts.set(name, new Chart(this, { name, group: "logged", from_zero: false }));
      this.#arrange();
    }

    addRanks() {
      if (!this.ranks && this.charts.size) {
        this.ranks = new RankChart(this);
        this.#arrange();
      }
    }

    #arrange() {
      const logged = KNOWN.findIndex((known) => known.name === "lr") + 0.5;
      const place = (name) => {
        const at = KNOWN.findIndex((known) => known.name === name);
        return at < 0 ? (name.startsWith("node_gpu") ? KNOWN.length : logged) : at;
      };
      const ordered = [...this.charts.values()].sort((a, b) => place(a.name) - place(b.name) || (a.name < b.name ? -1 : 1));
      const cards = ordered.map((chart) => chart.card);
      if (ordered.some((chart) => chart.name.startsWith("phase/"))) {
        this.stack ??= new StepChart(this);
        cards.splice(Math.min(4, cards.length), 0, this.stack.card);
      }
      if (this.ranks) cards.splice(Math.min(5, cards.length), 0, this.ranks.card);
      let previous = null;
      for (const card of cards) {
        // Cards that are in place are not touched: moving a node makes the browser forget what it has laid out.
        const next = previous ? previous.nextElementSibling : this.host.firstElementChild;
        if (next !== card) this.host.insertBefore(card, next);
        previous = card;
      }
      for (const part of this.#all()) {
        if (part.observed) continue;
        part.observed = true;
        part.card.chartPart = part;
        this.observer.observe(part.card);
      }
      this.applyFilter();
    }

    #all() {
      return [...this.charts.values(), ...[this.stack, this.ranks].filter(Boolean)];
    }

    applyFilter() {
      const { text, group } = this.filter;
      for (const part of this.#all()) {
        const label = `${part.name ?? ""} ${part.card.querySelector("h2").textContent}`.toLowerCase();
        part.card.hidden = (group !== "all" && part.card.dataset.group !== group) || (text !== "" && !label.includes(text));
      }
    }

    groups() {
      return new Set([...this.charts.values()].map((chart) => chart.group));
    }

    #seen(entries) {
      for (const entry of entries) {
        const part = entry.target.chartPart;
        part.visible = entry.isIntersecting;
        if (!part.visible) continue;
        if (part.stale) part.fetch ? part.fetch() : part.load();
        else this.want(part, part.needsDraw || !part.drawnTo ? "draw" : "extend");
        if (part === this.stack) for (const [, chart] of part.parts()) chart.fetch();
      }
    }

    // --- the horizontal axis -----------------------------------------------------------------------------------------------------

    points() {
      const width = this.host.firstElementChild?.clientWidth || 400;
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

    timeX(unix) {
      if (this.mode === "relative") return (unix - this.origin()) / this.timeUnit()[0];
      return (unix - new Date(unix * 1000).getTimezoneOffset() * 60) * 1000;
    }

    #unixOf(x) {
      if (this.mode === "relative") return x * this.timeUnit()[0] + this.origin();
      const local = typeof x === "number" ? x : Date.parse(String(x).replace(" ", "T") + "Z");
      return local / 1000 + new Date(local).getTimezoneOffset() * 60;
    }

    origin() {
      return this.started ?? this.#table().time[0] ?? 0;
    }

    timeUnit() {
      const { time } = this.#table();
      const span = time.length ? time[time.length - 1] - this.origin() : 0;
      const [, unit, word] = UNITS.find(([limit]) => span < limit);
      return [unit, words[word]];
    }

    /** Steps and times of the series that has most of them: the bridge between steps and clocks. */
    #table() {
      if (this.table) return this.table;
      let best = { step: [], time: [] };
      for (const chart of this.charts.values()) {
        const d = chart.data;
        if (d.time.length === d.step.length && d.step.length > best.step.length) best = d;
      }
      return (this.table = best);
    }

    stepX(step) {
      if (this.mode === "step") return step;
      const { step: steps, time } = this.#table();
      if (!steps.length) return null;
      const at = Math.max(0, Math.min(lastAtOrBefore(steps, step), steps.length - 2));
      if (steps.length === 1) return this.timeX(time[0]);
      const share = (step - steps[at]) / (steps[at + 1] - steps[at] || 1);
      return this.timeX(time[at] + share * (time[at + 1] - time[at]));
    }

    xStep(x) {
      if (this.mode === "step") return Math.round(x);
      const { step: steps, time } = this.#table();
      if (!steps.length) return 0;
      const unix = this.#unixOf(x);
      const at = Math.max(0, Math.min(lastAtOrBefore(time, unix), steps.length - 2));
      if (steps.length === 1) return steps[0];
      const share = (unix - time[at]) / (time[at + 1] - time[at] || 1);
      return Math.round(steps[at] + share * (steps[at + 1] - steps[at]));
    }

    xRange() {
      const window = this.window();
      const [a, b] = window ?? [this.firstStep, this.lastStep];
      if (!this.fixed() && !(this.lastStep > this.firstStep)) return this.#oneStep();
      if (!(b > a)) return [a - 0.5, b + 0.5];
      const [from, to] = [this.stepX(a), this.stepX(b)];
      if (from == null || to == null || !(to > from)) return null;
      const pad = window && this.fixed() ? 0 : (to - from) * 0.01;
      return [from - (window ? 0 : pad), to + pad];
    }

    /** One step is all there is: it stands in the middle, or the time of its samples goes from edge to edge. */
    #oneStep() {
      if (this.mode === "step") return [this.lastStep - 0.5, this.lastStep + 0.5];
      const { time } = this.#table();
      if (!time.length) return null;
      const [from, to] = [time[0], time[time.length - 1]];
      const pad = Math.max(0.5, (to - from) * 0.01);
      return [this.timeX(from - pad), this.timeX(to + pad)];
    }

    xAxis(axis) {
      delete axis.dtick; // of a run that had few steps when it was drawn
      if (this.mode === "clock") {
        axis.type = "date";
        axis.nticks = 4;
      }
      if (this.mode === "relative") axis.ticksuffix = ` ${this.timeUnit()[1]}`;
      if (this.mode === "step") {
        const range = this.xRange();
        axis.tickformat = range && range[1] - range[0] < 5000 && range[1] < 1e6 ? ",d" : "~s";
        axis.tickformat = range && range[1] - range[0] < 8 ? ",d" : axis.tickformat;
        if (range && range[1] - range[0] < 8) axis.dtick = 1;
      }
    }

    zoomTo(x0, x1) {
      const [a, b] = [this.xStep(x0), this.xStep(x1)].sort((p, q) => p - q);
      this.setRange([Math.max(this.firstStep, a), Math.max(a + 1, b)]);
    }

    setRange(range) {
      this.range = range;
      this.onRange();
      this.reload();
    }

    // --- what is held ------------------------------------------------------------------------------------------------------------

    /** Everything on screen is fetched again, the rest when it is scrolled to. */
    reload() {
      for (const part of this.#all()) {
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
      this.table = null;
      this.saw(band.step[end]);
      this.charts.get(band.name)?.append(band);
      this.wantStack(band, "extend");
      if (this.ranks && band.name === "step_time_s") this.want(this.ranks, "extend");
    }

    /** Where a step goes is drawn from the series of other charts. */
    wantStack({ name }, what) {
      if (this.stack && (name === "step_time_s" || name.startsWith("phase/"))) this.want(this.stack, what);
    }

    changed(chart) {
      this.table = null;
      if (chart.data.step.length && !this.range) {
        const first = Math.min(...[...this.charts.values()].map((one) => one.data.step[0] ?? Infinity));
        if (first !== this.firstStep) {
          this.firstStep = first;
          this.redraw();
        }
        this.saw(chart.data.step[chart.data.step.length - 1]);
      }
      this.wantStack(chart, "draw");
      this.onChange(chart);
    }

    setAlerts(alerts) {
      this.alerts = alerts.filter((alert) => alert.since_step != null && alert.state !== "pending");
      this.redraw();
    }

    /** marks: rule -> the series on whose charts its alerts stand, best first. */
    setMarks(marks) {
      this.marks = marks;
      this.redraw();
    }

    marksOf(name) {
      return this.alerts.filter((alert) => {
        const places = [alert.evidence?.series, ...(this.marks[alert.rule] ?? []), "loss", "step_time_s"];
        return places.find((place) => this.charts.has(place)) === name;
      });
    }

    // --- when it is drawn --------------------------------------------------------------------------------------------------------

    redraw() {
      for (const part of this.#all()) {
        if (part instanceof Chart) part.needsDraw = true;
        this.want(part, "draw");
      }
    }

    /** Asks for `what` ("draw", "extend" or "value") at the next frame; the greatest wish wins. */
    want(part, what) {
      const order = { value: 0, extend: 1, draw: 2 };
      const now = this.wanted.get(part);
      if (now === undefined || order[now] < order[what]) this.wanted.set(part, what);
      this.#schedule();
    }

    #schedule() {
      if (this.frame || this.closed) return;
      const wait = [...this.wanted.values()].includes("draw") ? 0 : this.nextLive - performance.now();
      if (wait > 16) {
        if (!this.waiting) {
          this.waiting = setTimeout(() => {
            this.waiting = 0;
            this.#schedule();
          }, wait);
        }
        return;
      }
      this.frame = requestAnimationFrame(() => this.#tick());
    }

    #tick() {
      this.frame = 0;
      const begin = performance.now();
      let spent = 0;
      for (const [part, what] of [...this.wanted]) {
        if (spent > FRAME_MS) break;
        this.wanted.delete(part);
        if (!part.visible || part.card.hidden) {
          if (what !== "value") part.needsDraw = true;
          continue;
        }
        if (part.stale) {
          if (what === "draw" && part.drawnTo) part.draw();
          else if (what === "value") part.showValue();
          continue;
        }
        if (what === "draw") part.draw();
        else if (what === "extend") part.extend();
        else part.showValue();
        spent = performance.now() - begin;
      }
      this.cost = (this.cost ?? 0) + spent;
      if (this.wanted.size) {
        this.frame = requestAnimationFrame(() => this.#tick());
        return;
      }
      // Live data may take half of the page's time at most: what a slow machine cannot draw comes less often, not late.
      this.nextLive = performance.now() + Math.min(1500, Math.max(MIN_LIVE_MS, this.cost));
      this.cost = 0;
    }

    // --- one cursor --------------------------------------------------------------------------------------------------------------

    hover(part, event) {
      if (event.buttons) return;
      const axis = part.plot._fullLayout?.xaxis;
      if (!axis) return;
      const box = part.plot.getBoundingClientRect();
      const px = event.clientX - box.left - axis._offset;
      if (px < 0 || px > axis._length) return this.unhover();
      this.pointed = this.xStep(axis.p2l(px));
      this.pointing ??= requestAnimationFrame(() => {
        this.pointing = undefined;
        this.#point(part, this.pointed);
      });
      return undefined;
    }

    #point(part, step) {
      if (step == null) return;
      for (const one of this.#all()) this.#place(one, step);
      this.#label(part, step);
    }

    #place(part, step) {
      if (!part.visible || !part.cursor) return;
      const axis = part.plot._fullLayout?.xaxis;
      const x = this.stepX(step);
      const at = axis && x != null ? axis.l2p(x) : -1;
      part.cursor.hidden = !(at >= 0 && at <= axis?._length);
      if (part.cursor.hidden) return;
      part.cursor.style.transform = `translateX(${Math.round(axis._offset + at)}px)`;
      if (part instanceof Chart) part.showValue();
    }

    /** Which step the cursor is on, in the chart that is pointed at. */
    #label(part, step) {
      this.tag ??= pa.el("span", { class: "tag-at" });
      const { step: steps, time } = this.#table();
      const at = lastAtOrBefore(steps, step);
      pa.setText(this.tag, `${words.step} ${pa.count(step)}${at >= 0 && time[at] ? ` · ${pa.clock(time[at])}` : ""}`);
      if (this.tag.parentElement !== part.frame) part.frame.append(this.tag);
      const x = part.plot._fullLayout.xaxis._offset + part.plot._fullLayout.xaxis.l2p(this.stepX(step));
      const right = x > part.frame.clientWidth / 2;
      this.tag.style.left = right ? "" : `${Math.round(x + 6)}px`;
      this.tag.style.right = right ? `${Math.round(part.frame.clientWidth - x + 6)}px` : "";
    }

    unhover() {
      this.pointed = null;
      this.tag?.remove();
      for (const part of this.#all()) {
        if (!part.cursor || part.cursor.hidden) continue;
        part.cursor.hidden = true;
        if (part instanceof Chart) part.showValue();
      }
    }

    close() {
      this.closed = true;
      cancelAnimationFrame(this.frame);
      clearTimeout(this.waiting);
      clearTimeout(this.resizing);
      this.observer.disconnect();
      this.resizer.disconnect();
      this.offTheme();
      for (const part of this.#all()) part.destroy();
    }
  };
})();
