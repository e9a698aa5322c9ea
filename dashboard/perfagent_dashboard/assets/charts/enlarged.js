// The tools of a chart over the whole width.

import { words } from "../lib/config.js";
import { el } from "../lib/dom.js";

/** Its range, and what else is drawn in it: other metrics, or single ranks. */
export function enlargedTools(chart, isLarge) {
  chart.card.querySelector(".chart-tools")?.remove();
  if (!isLarge) return;
  const { board } = chart;
  const draw = () => {
    chart.needsDraw = true;
    board.painter.want(chart, "draw");
  };
  const bound = (name, label) => {
    const field = el("input", { type: "number", step: "any", "aria-label": label, placeholder: label, value: chart.own[name] ?? "" });
    field.addEventListener("change", () => {
      chart.own[name] = field.value === "" ? null : Number(field.value);
      draw();
    });
    return field;
  };
  const add = (label, entries, lineOf) => {
    const field = el("select", { "aria-label": label }, el("option", { value: "" }, label), entries.map((entry) => el("option", { value: entry }, entry)));
    field.addEventListener("change", () => {
      const line = field.value && lineOf(field.value);
      field.value = "";
      if (!line || chart.lines.some((one) => one.label === line.label)) return;
      chart.lines.push(line);
      chart.loadLines();
    });
    return field;
  };
  const names = [...board.charts.values()].filter((one) => one !== chart && !one.panel).map(({ name }) => name).toSorted();
  const ranks = Array.from({ length: Math.min(board.world, 512) }, (_, rank) => String(rank));
  const clear = el("button", { type: "button", class: "button small" }, words.remove_lines);
  clear.addEventListener("click", () => {
    chart.lines = [];
    draw();
  });
  const leave = el("button", { type: "button", class: "button small leave", "aria-label": words.shrink, title: `${words.shrink} (Esc)`, on: { click: () => board.enlarge("") } }, "✕");
  chart.frame.before(el("div", { class: "chart-tools" }, bound("low", words.y_from), bound("high", words.y_to),
    add(words.add_metric, names, (name) => ({ label: name, query: { name } })),
    board.world > 1 ? add(words.add_rank, ranks, (rank) => ({ label: `${words.rank} ${rank}`, query: { ...chart.query, rank } })) : null,
    clear, leave));
}
