// A board in which each line is a group of runs: the mean of its runs, in a band from the lowest to the highest of them.
//
// data-query: which runs, and by what they are grouped. data-over: [[group, label], ...]. data-series: the names of all series.
// data-first: of these the one whose chart comes first.

import { api } from "../lib/api.js";
import { finiteOf } from "../lib/numbers.js";
import { RunBoard } from "./run_board.js";
import { Chart } from "./series_chart.js";

const AGAIN_AFTER_MS = 60000;

class GroupChart extends Chart {
  async read(query) {
    const { groups } = await api(`/groups/series?${this.board.query}&${new URLSearchParams(query)}`);
    const [first, ...others] = this.board.over.map(([key]) => groups.find((one) => (one.value ?? "") === key)?.band);
    this.lines.forEach((line, i) => {
      const band = others[i];
      line.data = band && { step: band.step, time: [], mean: band.mean.map(finiteOf), low: band.low.map(finiteOf), high: band.high.map(finiteOf) };
    });
    const { step, mean, low, high } = first ?? { step: [], mean: [], low: [], high: [] };
    return { step, mean, min: low, max: high, count: step.map(() => 1), nonfinite: step.map(() => 0) };
  }

  fill(traces) {
    super.fill(traces);
    for (const edge of [1, 2]) Object.assign(traces[edge], { x: [], y: [] }); // of the first band: the others have none
  }

  loadLines() {} // they come with the first
}

export class GroupBoard extends RunBoard {
  get kind() {
    return GroupChart;
  }

  async fetch() {
    this.board.query = this.root.dataset.query;
    this.board.first = this.root.dataset.first;
    this.board.addNames(JSON.parse(this.root.dataset.series));
  }

  /** What single runs send is not drawn as it comes: means are asked for anew, once a minute. */
  message({ fleet }) {
    if (fleet) this.later ??= setTimeout(() => ((this.later = null), this.closed || this.board.reload()), AGAIN_AFTER_MS);
  }
}
