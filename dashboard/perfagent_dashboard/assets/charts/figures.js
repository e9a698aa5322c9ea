// How charts look: plotly's figures without data, in the colors of the theme that is on.

import { config } from "../lib/config.js";

export const colorOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export const fontOfCharts = () => ({ family: getComputedStyle(document.body).fontFamily, size: 11, color: colorOf("muted") });

function plainLayout() {
  // With an angle given, and room for every label, plotly measures none: a third of the time of a live update.
  const axis = { gridcolor: colorOf("grid"), linecolor: colorOf("line"), zeroline: false, automargin: false, tickfont: { size: 11 }, tickangle: 0, ticklabeloverflow: "allow" };
  return {
    template: {}, margin: { l: 52, r: 16, t: 6, b: 22 }, showlegend: false, hovermode: false, dragmode: "zoom", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: fontOfCharts(),
    xaxis: { ...axis, showgrid: false, ticks: "outside", ticklen: 3, tickcolor: colorOf("line"), nticks: 6 },
    yaxis: { ...axis, nticks: 5, fixedrange: true, exponentformat: "SI" },
    newselection: { line: { color: colorOf("accent") } },
  };
}

const trace = (look) => ({ type: "scatter", x: [], y: [], hoverinfo: "skip", ...look });

/** A chart fills the traces by their position. */
const FIGURES = {
  /** From back to front: the band from min to max, its outline twice, the mean, its smoothed form, NaN and Inf, and points between gaps, of which
   * no line can be drawn, with their range. One step of 1e6 among a million is one bucket of a thousand: a band without an outline is then less
   * than one pixel wide and fades away. The band is closed at every gap: filled from line to line, it would reach across, through values that
   * never were. */
  series() {
    const edge = { width: 0.9, color: colorOf("band-edge") };
    const line = { width: 1.5, color: colorOf("accent") };
    const reach = { type: "data", symmetric: false, array: [], arrayminus: [], thickness: 1.5, width: 0, color: colorOf("band-edge") };
    const data = [
      trace({ mode: "none", fill: "toself", fillcolor: colorOf("band") }),
      trace({ mode: "lines", line: edge }),
      trace({ mode: "lines", line: edge }),
      trace({ mode: "lines", line }),
      trace({ mode: "lines", line: { ...line, width: 2 }, visible: false }),
      trace({ mode: "markers", yaxis: "y2", marker: { symbol: "x-thin", size: 8, line: { width: 2, color: colorOf("critical") } } }),
      trace({ mode: "markers", marker: { size: 5, color: colorOf("accent") }, error_y: reach }),
    ];
    return { data, layout: { ...plainLayout(), yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true } } };
  },

  /** Where the time of a step goes: the phases on top of each other. */
  step() {
    const data = config.phases.map((phase) => trace({ name: phase, mode: "lines", line: { width: 0.5, color: colorOf(`phase-${phase}`) }, fillcolor: colorOf(`phase-${phase}`), stackgroup: "step" }));
    return { data, layout: plainLayout() };
  },
};

/** name: series or step. */
export const figureOf = (name) => FIGURES[name]();
