// Panels of one's own: charts of several series, or of expressions over them, which the server keeps for all runs of a project.

import { api, change } from "../lib/api.js";
import { say, words } from "../lib/config.js";
import { el, setChildren, setText } from "../lib/dom.js";
import { seriesOf } from "../lib/series.js";
import { formDialog, showDeleted } from "../lib/form_dialog.js";

const MOST_PANEL_LINES = 8;
const SUGGESTED = 50;

const panelsPath = ({ project }, id = "") => `/panels${id && `/${id}`}?${new URLSearchParams({ project })}`;
const inExpression = (name) => (/[\s()]/.test(name) ? `\`${name}\`` : name);

async function putPanel(board, id, title, lines) {
  await change("PUT", panelsPath(board, id), { title, lines });
  board.setPanels((await api(panelsPath(board))).panels);
}

/** How a chart draws a panel: those of its lines whose series the run has; null where it has none of them. */
export function specOf(panel, has) {
  const lines = panel.lines.filter(({ names }) => names.every(has)).map(({ expression, unit, names }) => ({ label: expression, unit, names, query: expression === names[0] ? { name: expression } : { expression } }));
  if (!lines.length) return null;
  const [{ label, unit, query }, ...more] = lines;
  const metric = { name: "", title: panel.title, unit, meaning: lines.map((line) => line.label).join(", "), over: "mean", known: false };
  return { name: `panel:${panel.id}`, group: "own", metric, label, query, lines: more, panel, reads: lines.flatMap(({ names }) => names) };
}

export const panelButton = (board) => el("button", { type: "button", class: "button small quiet panel-add", on: { click: () => editPanel(board) } }, `+ ${words.panel_add}`);

/** panel: the one that is changed, none for a new one. */
export function editPanel(board, panel) {
  const title = el("input", { type: "text", maxlength: 128, value: panel?.title ?? "", placeholder: words.panel_title_usual });
  const options = el("datalist", { id: "panel-names" });
  const names = [...board.names].toSorted();
  /** Completes the name that is being typed, behind what stands before it. */
  const suggest = (field) => {
    const [before] = /^(.*[\s(])?/.exec(field.value);
    const typed = field.value.slice(before.length).toLowerCase();
    setChildren(options, names.filter((name) => name.toLowerCase().includes(typed)).slice(0, SUGGESTED).map((name) => el("option", { value: before + inExpression(name) })));
  };
  const lines = el("div", { class: "lines" });
  const add = (text) => {
    const field = el("input", { type: "text", list: options.id, maxlength: 300, value: text, "aria-label": words.panel_line, placeholder: words.panel_line_usual, autocomplete: "off" });
    for (const event of ["input", "focus"]) field.addEventListener(event, () => suggest(field));
    lines.append(field);
    more.hidden = lines.childElementCount >= MOST_PANEL_LINES;
    return field;
  };
  const more = el("button", { type: "button", class: "button small", on: { click: () => add("").focus() } }, words.panel_line_add);
  for (const { expression } of panel?.lines ?? [{ expression: "" }]) add(expression);
  formDialog(panel ? words.panel_change : words.panel_add, [el("label", null, words.panel_lines, lines), more, options, el("p", { class: "quiet" }, words.panel_hint), el("label", null, words.panel_title, title)], async () => {
    const wanted = [...lines.children].map((field) => field.value.trim()).filter(Boolean);
    await Promise.all(wanted.map((expression) => seriesOf(board.run, { expression, points: 1 }))); // else it says what is wrong
    await putPanel(board, panel?.id ?? Date.now().toString(36), title.value.trim() || wanted.join(", ").slice(0, 128), wanted);
  });
}

export async function deletePanel(chart) {
  const { board, panel } = chart;
  try {
    await change("DELETE", panelsPath(board, panel.id));
  } catch (problem) {
    setText(chart.flag, problem.message);
    return;
  }
  const told = el("div");
  board.host.before(told);
  board.setPanels(board.panels.filter((one) => one.id !== panel.id));
  showDeleted(told, say("panel_deleted", { title: panel.title }), () => putPanel(board, panel.id, panel.title, panel.lines.map(({ expression }) => expression)));
}
