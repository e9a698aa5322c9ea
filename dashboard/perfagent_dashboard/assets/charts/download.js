// A chart as a file.

import { api } from "../lib/api.js";
import { el } from "../lib/dom.js";

/** As it is drawn, with what it is of: the file is shown elsewhere. */
export async function savePng({ name, metric, scale, board, plot, card }) {
  const run = document.querySelector("main h1")?.textContent ?? board.run;
  const text = `${metric.title}${scale.unit ? `, ${scale.unit}` : ""}  ·  ${run}`.replace(/[<>&]/g, "");
  const { layout, data } = plot;
  const wide = { ...layout, width: 1000, height: 500, title: { text, x: 0.01, xanchor: "left", font: { size: 15 } }, margin: { ...layout.margin, t: 48, b: 48 }, paper_bgcolor: getComputedStyle(card).backgroundColor };
  wide.xaxis = { ...layout.xaxis, title: { text: board.axis.title() } };
  await window.Plotly.downloadImage({ data, layout: wide }, { format: "png", scale: 2, width: 1000, height: 500, filename: name.replaceAll("/", "_") });
}

/** The steps that are shown, as exact as the server has them in 20,000 rows. */
export async function saveCsv(chart) {
  const { board, name } = chart;
  const query = new URLSearchParams({ ...chart.query, points: "20000" });
  const window = board.window();
  if (window) for (const [key, step] of [["from", window[0]], ["to", window[1]]]) query.set(key, String(step));
  const body = await api(`/runs/${encodeURIComponent(board.run)}/series?${query}`);
  const columns = ["step", "time", "mean", "min", "max", "count", "nonfinite"].filter((column) => body[column]?.length === body.step.length);
  const rows = body.step.map((_, i) => columns.map((column) => body[column][i]).join(","));
  const link = el("a", { href: URL.createObjectURL(new Blob([[columns.join(","), ...rows, ""].join("\n")], { type: "text/csv" })), download: `${board.run}-${name.replaceAll("/", "_")}.csv` });
  link.click();
  URL.revokeObjectURL(link.href);
}
