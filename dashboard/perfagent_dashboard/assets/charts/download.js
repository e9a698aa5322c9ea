// A chart as a file.

import { api } from "../lib/api.js";
import { el } from "../lib/dom.js";

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
