// Starts a board of charts in every element of the class `board`, and a flame graph in every one of the class `flame`.

import { FlameGraph } from "./flame.js";
import { boards } from "./open_boards.js";
import { RunBoard } from "./run_board.js";

const flames = new Map();

/** Starts what has come into the page, and ends what is gone. */
function follow(open, selector, Kind) {
  for (const [node, one] of open) {
    if (node.isConnected) continue;
    one.close();
    open.delete(node);
  }
  for (const node of document.querySelectorAll(selector)) if (!open.has(node)) open.set(node, new Kind(node));
}

export function findBoards() {
  follow(boards, ".board[data-run]", RunBoard);
  follow(flames, ".flame[data-url]", FlameGraph);
}
