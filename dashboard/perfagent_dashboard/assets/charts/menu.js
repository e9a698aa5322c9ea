// The menu of a chart: enlarge, pin, move, save; and how it is dragged.

import { say, words } from "../lib/config.js";
import { el, setChildren } from "../lib/dom.js";
import { dropDown } from "../lib/drop_down.js";
import { moved, pins, remember } from "../lib/remembered.js";
import { saveCsv, savePng } from "./download.js";
import { writeNote } from "./notes.js";
import { boards } from "./open_boards.js";
import { deletePanel, editPanel } from "./panels.js";

const item = (text, act, pressed) => el("button", { type: "button", role: "menuitem", "aria-pressed": pressed === undefined ? null : String(pressed), on: { click: act } }, text);

export function chartMenu(chart) {
  const list = el("div", { class: "chart-items", role: "menu" });
  const head = el("summary", { "aria-label": say("chart_menu", { name: chart.metric.title }), title: words.chart_menu_title }, "⋯");
  return dropDown(head, list, (close) => setChildren(list, itemsOf(chart, close)));
}

function itemsOf(chart, close) {
  const { board } = chart;
  const after = (act) => () => {
    close();
    act();
  };
  const isLarge = board.enlarged === chart.name;
  return [
    item(isLarge ? words.shrink : words.enlarge, after(() => board.enlarge(isLarge ? "" : chart.name))),
    item(pins.has(chart.name) ? words.unpin : words.pin, after(() => pin(chart))),
    item(words.log_y, after(() => setLog(chart)), chart.isLog),
    item(words.move_left, after(() => move(chart, -1))),
    item(words.move_right, after(() => move(chart, 1))),
    ...(board.mayChange ? [item(words.chart_note_menu, after(() => writeNote(board, board.lastStep)))] : []),
    ...(board.mayChange && chart.panel ? [item(words.panel_change, after(() => editPanel(board, chart.panel))), item(words.panel_delete, after(() => deletePanel(chart)))] : []),
    item(words.as_axis, after(() => setAxis(board, chart.name))),
    item(words.save_png, after(() => savePng(chart))),
    item(words.save_csv, after(() => saveCsv(chart))),
  ];
}

function pin(chart) {
  if (!pins.delete(chart.name)) pins.add(chart.name);
  remember();
  for (const { board } of boards.values()) if (!board.bare) board.arrange();
}

function setLog(chart) {
  chart.own.log = !chart.isLog;
  chart.needsDraw = true;
  chart.board.painter.want(chart, "draw");
}

function setAxis(board, name) {
  board.axis.mode = name;
  board.charts.get(name)?.fetch();
  board.redraw();
  board.onRange();
}

/** One place to the left or right among the cards of its section. */
function move(chart, by) {
  const names = namesBeside(chart);
  place(chart, Math.max(0, Math.min(names.length - 1, names.indexOf(chart.name) + by)));
}

const namesBeside = (chart) => [...chart.card.parentElement.children].map((card) => card.chartPart?.name).filter(Boolean);

function place(chart, to) {
  const names = namesBeside(chart);
  names.splice(to, 0, ...names.splice(names.indexOf(chart.name), 1));
  moved.splice(0, Infinity, ...moved.filter((name) => !names.includes(name)), ...names);
  remember();
  chart.board.arrange();
}

/** Lets a chart be dragged by its title to the place of another one of its section. */
export function letDrag(chart) {
  const { board, card, title } = chart;
  title.draggable = true;
  title.addEventListener("dragstart", ({ dataTransfer }) => {
    board.dragged = chart;
    dataTransfer.setDragImage(card, 0, 0);
  });
  card.addEventListener("dragover", (event) => board.dragged?.card.parentElement === card.parentElement && event.preventDefault());
  card.addEventListener("drop", (event) => {
    event.preventDefault();
    place(board.dragged, namesBeside(chart).indexOf(chart.name));
  });
}
