// Where a step goes: its phases on top of each other.

import { config, words } from "../lib/config.js";
import { el, setChildren, setText } from "../lib/dom.js";
import { metricOf, scaleOf, valueAndUnit } from "../lib/metrics.js";
import { si } from "../lib/numbers.js";
import { figureOf } from "./figures.js";
import { DIMMED, drawPlot } from "./plot.js";
import { empty } from "./samples.js";

const { phases: PHASES } = config;

export class StepChart {
  constructor(board) {
    this.board = board;
    this.visible = false;
    this.plot = el("div", { class: "plot", role: "img", "aria-label": words.where });
    this.empty = el("p", { class: "empty" }, words.loading);
    this.unit = el("span", { class: "unit" });
    this.total = el("span", { class: "now" });
    this.legend = el("div", { class: "shares" });
    this.cursor = el("i", { class: "cursor", hidden: true });
    this.frame = el("div", { class: "frame" }, this.plot, this.cursor, this.empty);
    this.card = el(
      "figure",
      { class: "card chart wide", "data-name": "step", "data-group": "speed" },
      el("figcaption", null, el("h2", null, words.where), this.unit, this.total),
      this.legend,
      this.frame,
    );
    board.cursor.follow(this);
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
    for (const [phase, { data }] of this.parts()) {
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
    const x = used.map((i) => (this.board.axis.isByTime ? this.board.axis.ofTime(times[i]) : this.board.axis.ofStep(Math.round(first + i * width))));
    return { x, phases, totals, mean: seconds / all };
  }

  draw() {
    const binned = this.bins(240);
    const drawable = binned && Object.keys(binned.phases).length > 0;
    const charts = [this.board.charts.get("step_time_s"), ...this.parts().map(([, chart]) => chart)];
    const failed = charts.find((chart) => chart?.failed)?.failed;
    setText(this.empty, failed ?? words.where_empty);
    this.empty.hidden = Boolean(drawable) && !failed;
    this.plot.style.opacity = failed ? DIMMED : "";
    this.drawn = performance.now();
    if (!drawable) return;
    const scale = scaleOf({ name: "step_time_s", unit: "s" }, binned.mean);
    const { data, layout } = figureOf("step");
    PHASES.forEach((phase, i) => {
      data[i].x = phase in binned.phases ? binned.x : [];
      data[i].y = (binned.phases[phase] ?? []).map((value) => value / scale.by);
    });
    layout.yaxis.rangemode = "tozero";
    drawPlot(this, data, layout);
    this.plot.dataset.points = String(binned.x.length);
    setText(this.unit, `${scale.unit}, ${words.where_unit}`);
    setText(this.total, si(binned.mean / scale.by));
    const sum = Object.values(binned.totals).reduce((a, b) => a + b, 0);
    setChildren(this.legend,
      ...Object.entries(binned.totals).map(([phase, seconds]) => {
        const swatch = el("i", { "aria-hidden": "true" });
        swatch.style.background = `var(--phase-${phase})`;
        const [value, unit] = valueAndUnit({ name: "", unit: "s" }, seconds);
        return el(
          "span",
          { class: "share", title: `${value} ${unit}` },
          swatch,
          metricOf(`phase/${phase}_s`).title,
          el("b", null, `${((100 * seconds) / sum).toFixed(seconds / sum < 0.1 ? 1 : 0)} %`),
        );
      }),
    );
  }

  extend() {
    // A stack is redrawn as a whole, so less often than a line grows.
    if (performance.now() - this.drawn > 1000) this.draw();
    else {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.board.painter.want(this, "extend"), 1000);
    }
  }

  destroy() {
    clearTimeout(this.timer);
    window.Plotly?.purge(this.plot);
  }
}
