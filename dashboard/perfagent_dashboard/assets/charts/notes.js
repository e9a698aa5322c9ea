// Notes at steps of a run: marked in its charts, and listed over them.

import { api, change } from "../lib/api.js";
import { say, words } from "../lib/config.js";
import { el, setChildren, setText } from "../lib/dom.js";
import { formDialog, showDeleted } from "../lib/form_dialog.js";
import { thousands } from "../lib/numbers.js";
import { shortTime, unixOf } from "../lib/times.js";
import { boards } from "./open_boards.js";

const notesPath = ({ run }) => `/runs/${encodeURIComponent(run)}/annotations`;

export const noteList = () => el("details", { class: "chart-notes", hidden: true }, el("summary"), el("ul"));

export function showNotes({ board, notes: list }, notes) {
  board.setNotes(notes);
  list.hidden = !notes.length;
  setText(list.firstElementChild, say("chart_notes", { count: notes.length }));
  setChildren(list.lastElementChild, notes.map((note) => noteItem(board, note)));
}

function noteItem(board, { id, step, text, who, created }) {
  const node = el("li", null, el("b", null, `◆ ${words.step} ${thousands(step)}`), el("span", null, text), el("span", { class: "quiet" }, [who, shortTime(unixOf(created))].filter(Boolean).join(", ")));
  const drop = async () => {
    await change("DELETE", `${notesPath(board)}/${id}`);
    for (const one of boards.values()) if (one.board.run === board.run) one.board.setNotes(one.board.notes.filter((note) => note.id !== id));
    showDeleted(node, words.chart_note_deleted, () => addNote(board, { step, text }));
  };
  if (board.mayChange) node.append(el("button", { type: "button", class: "button small quiet", on: { click: ({ target }) => drop().catch((problem) => setText(target, problem.message)) } }, words.delete_word));
  return node;
}

/** Every board of the page marks it. */
async function addNote(board, note) {
  await change("POST", notesPath(board), note);
  const { annotations } = await api(notesPath(board));
  for (const one of boards.values()) if (!one.bare && one.board.run === board.run) showNotes(one, annotations);
}

export function writeNote(board, at) {
  const step = el("input", { type: "number", min: 0, step: 1, required: true, value: at });
  const text = el("textarea", { rows: 3, maxlength: 500, required: true, autofocus: true });
  formDialog(words.chart_note_menu, [el("label", null, words.step, step), el("label", null, words.chart_note, text)], () => addNote(board, { step: Number(step.value), text: text.value }));
}
