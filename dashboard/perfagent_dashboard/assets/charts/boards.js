// Starts a board of charts in every element of the class `board`, and a flame graph in every one of the class `flame`.

import { FlameGraph } from "./flame.js";
import { boards } from "./open_boards.js";
import { RunBoard } from "./run_board.js";

const flames = new Map();

/** Starts what has come into the page, and ends what is gone. */
export function findBoards() {
  for (const open of [boards, flames]) for (const [node, one] of open) if (!node.isConnected && open.delete(node)) one.close();
  for (const node of document.querySelectorAll(".board[data-run]")) if (!boards.has(node)) boards.set(node, new RunBoard(node));
  for (const node of document.querySelectorAll(".flame[data-url]")) if (!flames.has(node)) flames.set(node, new FlameGraph(node));
}
