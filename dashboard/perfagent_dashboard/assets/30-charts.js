// The charts of a run: what is fetched, what is appended, and when it is drawn.
//
// A chart holds at most MAX_POINTS buckets. It is fetched at a level of detail that fits its width (the server keeps min, max
// and mean of every bucket), live samples are appended, and when there are too many it is fetched again. Only charts on
// screen are drawn, each at most once in an animation frame, and a frame stops drawing when its time is used up.
(function () {
  "use strict";
  const pa = window.perfagent;
  const { words, charts: KNOWN, phases: PHASES, marks: MARKS } = pa.config;

  const MAX_POINTS = 1600;
  const FRAME_MS = 24;
  const MIN_LIVE_MS = 120;
  const MAX_CARDS = 160;
  const [LOW, HIGH, MEAN, SMOOTH, NONFINITE] = [0, 1, 2, 3, 4];
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

  // --- one series ------------------------------------------------------------------------------------------------------------

  class Chart {
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
      this.latest = null;
      this.title = pa.el("h2", { title: this.metric.meaning || this.name }, this.metric.title);
      this.unit = pa.el("span", { class: "unit" });
      this.flag = pa.el("span", { class: "flag" });
      this.value = pa.el("output", { class: "now" });
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

    /** Loads unless it is loaded or about to be. */
    fetch() {
      if (this.stale && !this.loading) this.load();
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
        this.empty.textContent = pa.say("chart_failed", { message: error.message });
        this.empty.hidden = this.data.step.length > 0;
        return;
      } finally {
        if (this.abort === abort) this.loading = false;
      }
      this.board.want(this, "draw");
      this.board.changed(this);
    }

    #replace(body) {
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
      if (this.latest == null && end >= 0) this.latest = this.data.mean[end] ?? (this.data.bad[end] ? NaN : null);
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
      if (this.board.fixed()) {
        this.board.want(this, "value");
        return;
      }
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

    xs(from) {
      const { step, time } = this.data;
      const board = this.board;
      if (board.mode === "step" || time.length !== step.length) return step.slice(from);
      return time.slice(from).map((t) => board.timeX(t));
    }

    ys(column, from) {
      const { by } = this.scale;
      const log = this.board.log;
      return column.slice(from).map((value) => (value == null || (log && value <= 0) ? null : value / by));
    }

    /** Exponential moving average without the bias of its start; continues from where it was drawn to. */
    smooth(from) {
      const weight = this.board.smoothing;
      if (from === 0) this.ema = { sum: 0, mass: 0 };
      const { by } = this.scale;
      return this.data.mean.slice(from).map((value) => {
        if (value == null) return null;
        this.ema.sum = this.ema.sum * weight + (1 - weight) * (value / by);
        this.ema.mass = this.ema.mass * weight + (1 - weight);
        return this.ema.sum / this.ema.mass;
      });
    }

    yRange() {
      let low = Infinity;
      let high = -Infinity;
      let above = Infinity; // smallest positive value, for a logarithmic axis
      for (const column of [this.data.min, this.data.max]) {
        for (const value of column) {
          if (value == null) continue;
          if (value < low) low = value;
          if (value > high) high = value;
          if (value > 0 && value < above) above = value;
        }
      }
      this.clipped = [];
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
      const values = [...this.data.min, ...this.data.max].filter((value) => value != null).sort((a, b) => a - b);
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
      const x = this.board.xRange();
      if (x) layout.xaxis.range = x;
      const y = this.yRange();
      layout.yaxis.type = this.board.log ? "log" : "linear";
      if (y) layout.yaxis.range = y;
      else delete layout.yaxis.range;
      const size = y && !this.board.log ? Math.max(Math.abs(y[0]), Math.abs(y[1])) : 1;
      layout.yaxis.exponentformat = size < 1e-3 || size >= 1e15 ? "e" : "SI";
      if (this.board.log) layout.yaxis.dtick = y && y[1] - y[0] > 1.2 ? Math.max(1, Math.ceil((y[1] - y[0]) / 5)) : "D2";
      else delete layout.yaxis.dtick;
    }

    draw() {
      const pattern = structuredClone(pa.config.figures[pa.theme].series);
      const { data, layout } = pattern;
      const x = this.xs(0);
      const smoothing = this.board.smoothing > 0;
      data[LOW].x = data[HIGH].x = data[MEAN].x = x;
      data[LOW].y = this.ys(this.data.min, 0);
      data[HIGH].y = this.ys(this.data.max, 0);
      data[MEAN].y = this.ys(this.data.mean, 0);
      if (smoothing) {
        data[SMOOTH].visible = true;
        data[SMOOTH].x = x;
        data[SMOOTH].y = this.smooth(0);
        data[MEAN].opacity = 0.35;
      }
      if (x.length === 1) data[MEAN].mode = "lines+markers";
      const bad = [];
      for (let i = 0; i < x.length; i++) if (this.data.bad[i]) bad.push(x[i]);
      data[NONFINITE].x = bad;
      data[NONFINITE].y = bad.map(() => 0.94);
      layout.width = this.frame.clientWidth;
      layout.height = this.frame.clientHeight;
      layout.dragmode = coarse.matches ? false : "zoom";
      this.board.xAxis(layout.xaxis);
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
      this.drawnTo = this.data.step.length;
      this.needsDraw = false;
      this.plot.dataset.points = String(this.drawnTo);
      this.plot.dataset.lastStep = String(this.data.step[this.drawnTo - 1] ?? "");
      this.empty.hidden = this.drawnTo > 0;
      if (!this.drawnTo) this.empty.textContent = words.no_samples;
      this.showValue();
    }

    extend() {
      const from = this.drawnTo;
      const x = this.xs(from);
      if (!x.length) return this.showValue();
      if (from === 0 || this.needsDraw || this.plot.layout?.width !== this.frame.clientWidth) return this.draw();
      const traces = [LOW, HIGH, MEAN];
      const update = { x: [x, x, x], y: [this.ys(this.data.min, from), this.ys(this.data.max, from), this.ys(this.data.mean, from)] };
      if (this.board.smoothing > 0) {
        traces.push(SMOOTH);
        update.x.push(x);
        update.y.push(this.smooth(from));
      }
      const bad = x.filter((_, i) => this.data.bad[from + i]);
      if (bad.length) {
        traces.push(NONFINITE);
        update.x.push(bad);
        update.y.push(bad.map(() => 0.94));
      }
      this.axes(this.plot.layout);
      window.Plotly.extendTraces(this.plot, update, traces);
      this.drawnTo = this.data.step.length;
      this.plot.dataset.points = String(this.drawnTo);
      this.plot.dataset.lastStep = String(this.data.step[this.drawnTo - 1]);
      this.showValue();
      return undefined;
    }

    /** The newest value, or the one under the cursor. */
    showValue() {
      const pointed = this.board.pointed;
      const at = pointed == null || this.cursor.hidden || !this.data.step.length ? -1 : Math.max(0, lastAtOrBefore(this.data.step, pointed));
      let value = this.latest;
      let spread = "";
      if (at >= 0) {
        value = this.data.mean[at] ?? (this.data.bad[at] ? NaN : null);
        const [low, high] = [this.data.min[at], this.data.max[at]];
        if (low != null && high != null && pa.si(low / this.scale.by) !== pa.si(high / this.scale.by)) {
          spread = ` ${pa.si(low / this.scale.by)} … ${pa.si(high / this.scale.by)}`;
        }
      }
      pa.setText(this.unit, this.scale.unit === this.title?.textContent ? "" : this.scale.unit);
      pa.setText(this.value, value == null ? words.na : pa.si(value / this.scale.by));
      if (spread) this.value.append(pa.el("small", null, spread));
      this.value.classList.toggle("bad", Number.isNaN(value));
      const bad = this.data.bad.reduce((sum, count) => sum + count, 0);
      pa.setText(this.flag, [...(this.clipped ?? []), ...(bad ? [pa.say("nonfinite", { count: pa.count(bad) })] : [])].join(" · "));
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
      this.total = pa.el("output", { class: "now" });
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
      const whole = this.board.charts.get("step_time_s")?.data ?? empty();
      if (!whole.step.length) return null;
      const first = whole.step[0];
      const last = whole.step[whole.step.length - 1];
      const n = Math.max(1, Math.min(count, whole.step.length));
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
      whole.step.forEach((step, i) => {
        spread(whole, i, steps, 1);
        times[Math.min(n - 1, Math.floor((step - first) / width))] ||= whole.time[i] ?? 0;
        seconds += (whole.mean[i] ?? 0) * whole.count[i];
      });
      const used = [...steps.keys()].filter((i) => steps[i] && times[i]);
      const all = whole.count.reduce((sum, count) => sum + count, 0);
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
      this.empty.hidden = Boolean(drawable);
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
      this.shares = Object.entries(binned.totals).map(([phase, seconds]) => ({
        phase, title: pa.metric(`phase/${phase}_s`).title, share: seconds / sum,
      }));
      if (!this.board.range) this.board.onShares?.(this.shares);
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
      } catch {
        return; // the other charts say that the server is away
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
    /** run: id; host: the grid; onChange(chart): its data changed; onRange(): the range changed; onShares(list): phases of a step. */
    constructor({ run, host, onChange, onRange, onShares }) {
      Object.assign(this, { run, host, onChange, onRange, onShares });
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
      if (!(b > a)) return window ? [a - 0.5, b + 0.5] : null;
      const [from, to] = [this.stepX(a), this.stepX(b)];
      if (from == null || to == null || !(to > from)) return null;
      const pad = window && this.fixed() ? 0 : (to - from) * 0.01;
      return [from - (window ? 0 : pad), to + pad];
    }

    xAxis(axis) {
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
      if (this.stack && (band.name === "step_time_s" || band.name.startsWith("phase/"))) this.want(this.stack, "extend");
      if (this.ranks && band.name === "step_time_s") this.want(this.ranks, "extend");
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
      if (this.stack && (chart.name === "step_time_s" || chart.name.startsWith("phase/"))) this.want(this.stack, "draw");
      this.onChange(chart);
    }

    setAlerts(alerts) {
      this.alerts = alerts.filter((alert) => alert.since_step != null && alert.state !== "pending");
      this.redraw();
    }

    marksOf(name) {
      return this.alerts.filter((alert) => {
        const places = [alert.evidence?.series, ...(MARKS[alert.rule] ?? []), "loss", "step_time_s"];
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
