// Every rank against time: its own work, the step less its wait for others, beside the median.

import { api } from "../lib/api.js";
import { say, words } from "../lib/config.js";
import { el } from "../lib/dom.js";
import { finite, numberOf } from "../lib/numbers.js";
import { figureOf } from "./figures.js";
import { DIMMED, drawPlot } from "./plot.js";
import { lastAtOrBefore } from "./samples.js";

export class RankChart {
  constructor(board) {
    this.board = board;
    this.visible = false;
    this.stale = true;
    this.plot = el("div", { class: "plot", role: "img", "aria-label": words.rank_map });
    this.cursor = el("i", { class: "cursor", hidden: true });
    this.frame = el("div", { class: "frame" }, this.plot, this.cursor);
    this.card = el(
      "figure",
      { class: "card chart wide", "data-name": "ranks", "data-group": "speed" },
      el("figcaption", null, el("h2", null, words.rank_map), el("span", { class: "unit" }, words.rank_map_unit)),
      this.frame,
    );
    board.cursor.follow(this);
  }

  /** The rank under the pointer and how long it takes beside the median. */
  told(step, event) {
    const axis = this.plot._fullLayout?.yaxis;
    const column = lastAtOrBefore(this.matrix?.step ?? [], step);
    if (!axis || column < 0) return "";
    const row = Math.round(axis.p2l(event.clientY - this.plot.getBoundingClientRect().top - axis._offset));
    const value = this.plot.data?.[0].z[row]?.[column];
    return value == null ? "" : say("rank_told", { rank: this.matrix.ranks[row], share: value.toFixed(2) });
  }

  async load() {
    this.stale = false;
    this.loadedAt = this.board.lastStep;
    const query = new URLSearchParams({ name: "own_work_s", points: "120" });
    const window = this.board.window();
    if (window) {
      query.set("from", String(window[0]));
      query.set("to", String(window[1]));
    }
    try {
      this.matrix = await api(`/runs/${encodeURIComponent(this.board.run)}/ranks?${query}`);
      this.plot.style.opacity = "";
    } catch {
      this.plot.style.opacity = DIMMED; // the other charts say why
      return;
    }
    this.board.painter.want(this, "draw");
  }

  draw() {
    if (!this.matrix?.step?.length) return;
    const { data, layout } = figureOf("ranks");
    const rows = this.matrix.mean.map((row) => row.map((value) => finite(numberOf(value))));
    const middle = this.matrix.step.map((_, i) => {
      const column = rows.map((row) => row[i]).filter((value) => value != null).toSorted((a, b) => a - b);
      return column.length ? (column[(column.length - 1) >> 1] + column[column.length >> 1]) / 2 : null;
    });
    data[0].x = this.matrix.step.map((step) => this.board.axis.ofStep(step));
    const { ranks } = this.matrix;
    data[0].y = ranks.map((_, row) => row);
    const every = Math.max(1, Math.ceil(ranks.length / 8));
    const labelled = ranks.map((_, row) => row).filter((row) => row % every === 0);
    Object.assign(layout.yaxis, { tickmode: "array", tickvals: labelled, ticktext: labelled.map((row) => String(ranks[row])), range: [-0.5, ranks.length - 0.5] });
    data[0].z = rows.map((row) => row.map((value, i) => (value == null || !middle[i] ? null : value / middle[i])));
    drawPlot(this, data, layout, { zooms: false });
  }

  /** The map is a level of detail of its own: fetched again when the run has grown by one of its columns. */
  extend() {
    const columns = this.matrix?.step?.length || 1;
    if (!this.board.fixed() && this.board.lastStep - (this.loadedAt ?? 0) > this.board.lastStep / Math.max(columns, 20)) this.load();
  }

  destroy() {
    window.Plotly?.purge(this.plot);
  }
}
