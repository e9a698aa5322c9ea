// The tools over a board: search, axis, range, smoothing, columns.

import { say, words } from "../lib/config.js";
import { el, setText } from "../lib/dom.js";
import { thousands } from "../lib/numbers.js";

export function toolsOf(runBoard) {
  const { board } = runBoard;
  const changed = () => {
    board.redraw();
    runBoard.writeAddress();
  };
  const segment = (label, entries, isOn, choose, title) => {
    const buttons = entries.map(([value, text]) => el("button", { type: "button", "data-value": value }, text));
    const group = el("div", { class: "segment", role: "group", "aria-label": label, title }, buttons);
    group.show = () => buttons.forEach((button) => button.setAttribute("aria-pressed", String(isOn(button.dataset.value))));
    buttons.forEach((button) => button.addEventListener("click", () => (choose(button.dataset.value), group.show())));
    group.show();
    return group;
  };
  const toggle = (label, name, title) => segment(label, [[name, label]], () => board[name], () => ((board[name] = !board[name]), changed()), title);
  const axis = segment(words.x_axis, [["step", words.x_step], ["relative", words.x_relative], ["clock", words.x_clock]], (value) => board.axis.mode === value, (value) => ((board.axis.mode = value), changed()));
  const logX = segment(words.log_x, [["logx", words.log_x]], () => board.axis.wantsLog, () => ((board.axis.wantsLog = !board.axis.wantsLog), changed()));
  const ranges = segment(words.range, [["all", words.range_all], ...[1000, 100].map((n) => [String(n), say("range_last", { steps: thousands(n) })])],
    (value) => (value === "all" ? !board.range : board.range?.last === Number(value)), (value) => board.setRange(value === "all" ? null : { last: Number(value) }));
  const told = () => (board.smoothing ? board.smoothing.toFixed(2) : words.smoothing_auto);
  const shown = el("output", null, told());
  const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: board.smoothing, id: "smoothing", "aria-label": words.smoothing });
  slider.addEventListener("input", () => {
    board.smoothing = Number(slider.value);
    setText(shown, told());
    board.redraw();
    clearTimeout(runBoard.typing);
    runBoard.typing = setTimeout(() => runBoard.writeAddress(), 300);
  });
  const find = el("input", { type: "search", class: "search", value: board.filter.text, placeholder: words.filter, "aria-label": words.filter });
  find.addEventListener("input", () => {
    board.search(find.value);
    runBoard.say();
    runBoard.writeAddress();
  });
  const columns = el("select", { "aria-label": words.columns_of_charts }, [0, 1, 2, 3, 4].map((n) => el("option", { value: n, selected: n === board.columns }, n ? say("columns_n", { count: n }) : words.columns_auto)));
  columns.addEventListener("change", () => {
    board.setColumns(Number(columns.value));
    runBoard.writeAddress();
  });
  const zoomed = el("span", { class: "zoomed" });
  const own = el("button", { type: "button", class: "button small", title: words.x_step, on: { click: () => ((board.axis.mode = "step"), changed(), runBoard.showRange()) } });
  const reset = el("button", { type: "button", class: "button small", on: { click: () => board.setRange(null) } }, words.reset_zoom);
  runBoard.showRange = () => {
    const fixed = Array.isArray(board.range);
    setText(zoomed, fixed ? say("zoomed", { from: thousands(board.range[0]), to: thousands(board.range[1]) }) : "");
    zoomed.hidden = reset.hidden = !fixed;
    ranges.show();
    axis.show();
    setText(own, board.axis.isOwn ? `x: ${board.axis.mode} ✕` : "");
    own.hidden = !board.axis.isOwn;
  };
  runBoard.showRange();
  const row = el("div", { class: "tool-row" }, axis, own, ranges, toggle(words.log_y, "log"), logX, toggle(words.clip, "clip", words.clip_title), el("label", { class: "slider", title: words.smoothing_title }, words.smoothing, slider, shown), columns, zoomed, reset);
  const more = el("button", { type: "button", class: "button tools-more", "aria-expanded": "false" }, words.tools);
  more.addEventListener("click", () => more.setAttribute("aria-expanded", String(row.classList.toggle("open"))));
  return el("div", { class: "tools", role: "toolbar", "aria-label": words.tools }, find, more, row);
}
