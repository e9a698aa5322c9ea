// Starts a board of charts in every element of the class `board`.

import { boards } from "./open_boards.js";
import { RunBoard } from "./run_board.js";

/** Starts the boards that have come into the page, and ends those that are gone. */
export function findBoards() {
  for (const [node, board] of boards) {
    if (node.isConnected) continue;
    board.close();
    boards.delete(node);
  }
  for (const node of document.querySelectorAll(".board[data-run]")) if (!boards.has(node)) boards.set(node, new RunBoard(node));
}
