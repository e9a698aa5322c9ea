// The horizontal axis that all charts of a board share: from steps to what is shown (steps, times, values of a series), and back.

import { words } from "../lib/config.js";
import { lastAtOrBefore } from "./samples.js";
import { logTicks } from "./ticks.js";

const UNITS = [[180, 1, "unit_s"], [3 * 3600, 60, "unit_min"], [4 * 86400, 3600, "unit_h"], [Infinity, 86400, "unit_d"]];

export class XAxis {
  constructor(board) {
    this.board = board;
    this.mode = "step"; // or relative, clock, or the name of a series
    this.wantsLog = false;
    this.table = null;
  }

  /** After new samples. */
  forget() {
    this.table = null;
  }

  get isByTime() {
    return this.mode === "relative" || this.mode === "clock";
  }

  /** Whether a series is the axis: one that may go up and down. */
  get isOwn() {
    return this.mode !== "step" && !this.isByTime;
  }

  /** Clocks have no logarithm. */
  get isLog() {
    return this.wantsLog && this.mode !== "clock";
  }

  ofTime(unix) {
    if (this.mode === "relative") return (unix - this.origin()) / this.timeUnit()[0];
    return (unix - new Date(unix * 1000).getTimezoneOffset() * 60) * 1000;
  }

  ofStep(step) {
    if (this.mode === "step") return step;
    const { step: steps, at } = this.#bridge();
    const value = between(steps, at, step);
    return value != null && this.isByTime ? this.ofTime(value) : value;
  }

  stepAt(x) {
    if (this.mode === "step") return Math.round(x);
    const { step: steps, at } = this.#bridge();
    return Math.round(between(at, steps, this.isByTime ? this.#unixOf(x) : x) ?? 0);
  }

  /** Where something stands in a plot, in pixels from its left edge; -1 where it does not. */
  pixelOf(step, { xaxis }) {
    const x = this.ofStep(step);
    return x == null ? -1 : xaxis.l2p(this.isLog ? Math.log10(x) : x);
  }

  stepOfPixel(pixel, { xaxis }) {
    const x = xaxis.p2l(pixel);
    return this.stepAt(this.isLog ? 10 ** x : x);
  }

  /** From where to where the charts go, as what is shown. */
  range() {
    const window = this.board.window();
    const [a, b] = window ?? [this.board.firstStep, this.board.lastStep];
    if (!this.board.fixed() && !(this.board.lastStep > this.board.firstStep)) return this.#oneStep();
    if (!(b > a)) return [a - 0.5, b + 0.5];
    const [from, to] = this.isOwn ? this.#extremes(a, b) : [this.ofStep(a), this.ofStep(b)];
    if (from == null || to == null || !(to > from)) return null;
    const pad = window && this.board.fixed() ? 0 : (to - from) * 0.01;
    return [from - (window ? 0 : pad), to + pad];
  }

  /** One step is all there is: it stands in the middle, or the time of its samples goes from edge to edge. */
  #oneStep() {
    if (!this.isByTime) return [this.ofStep(this.board.lastStep) - 0.5, this.ofStep(this.board.lastStep) + 0.5];
    const { time } = this.timed();
    if (!time.length) return null;
    const [from, to] = [time[0], time[time.length - 1]];
    const pad = Math.max(0.5, (to - from) * 0.01);
    return [this.ofTime(from - pad), this.ofTime(to + pad)];
  }

  /** Of the axis's own series over these steps. */
  #extremes(from, to) {
    const { step, at } = this.#bridge();
    const values = at.filter((_, i) => step[i] >= from && step[i] <= to);
    return values.length ? [Math.min(...values), Math.max(...values)] : [null, null];
  }

  /** Range and ticks of a plot's axis. */
  describe(axis) {
    const range = this.range();
    delete axis.dtick; // of a run that had few steps when it was drawn
    if (this.isLog && range?.[1] > 0) {
      axis.range = [Math.max(range[0], this.mode === "step" ? 1 : range[1] / 1000), range[1]].map(Math.log10);
      Object.assign(axis, logTicks(axis.range));
      return;
    }
    if (range) axis.range = range;
    if (this.mode === "clock") {
      axis.type = "date";
      axis.nticks = 4;
    }
    if (this.mode === "relative") axis.ticksuffix = ` ${this.timeUnit()[1]}`;
    if (this.mode === "step") {
      axis.tickformat = range && range[1] - range[0] < 5000 && range[1] < 1e6 ? ",d" : "~s";
      axis.tickformat = range && range[1] - range[0] < 8 ? ",d" : axis.tickformat;
      if (range && range[1] - range[0] < 8) axis.dtick = 1;
    }
  }

  title() {
    return { step: words.step, relative: words.x_relative, clock: words.x_clock }[this.mode] ?? this.mode;
  }

  timeUnit() {
    const { time } = this.timed();
    const span = time.length ? time[time.length - 1] - this.origin() : 0;
    const [, unit, word] = UNITS.find(([limit]) => span < limit);
    return [unit, words[word]];
  }

  origin() {
    return this.board.started ?? this.timed().time[0] ?? 0;
  }

  #unixOf(x) {
    if (this.mode === "relative") return x * this.timeUnit()[0] + this.origin();
    const local = typeof x === "number" ? x : Date.parse(String(x).replace(" ", "T") + "Z");
    return local / 1000 + new Date(local).getTimezoneOffset() * 60;
  }

  /** Steps, and what stands at each of them: its time, or the value of the series that the mode names. */
  #bridge() {
    if (this.isByTime) return { step: this.timed().step, at: this.timed().time };
    const data = this.board.charts.get(this.mode)?.data;
    const known = data ? [...data.step.keys()].filter((i) => data.mean[i] != null) : [];
    return { step: known.map((i) => data.step[i]), at: known.map((i) => data.mean[i]) };
  }

  /** Steps and times of the series that has most of them: the bridge between steps and clocks. */
  timed() {
    if (this.table) return this.table;
    let best = { step: [], time: [] };
    for (const chart of this.board.charts.values()) {
      const d = chart.data;
      if (d.time.length === d.step.length && d.step.length > best.step.length) best = d;
    }
    return (this.table = best);
  }
}

/** The value at a place between two rows; beyond the ends it goes on as straight. */
function between(from, to, value) {
  if (from.length < 2) return from.length ? to[0] : null;
  const at = Math.max(0, Math.min(lastAtOrBefore(from, value), from.length - 2));
  return to[at] + ((value - from[at]) / (from[at + 1] - from[at] || 1)) * (to[at + 1] - to[at]);
}
