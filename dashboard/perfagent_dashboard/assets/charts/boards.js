// Starts what draws in every element of the classes `board` and `parallel`.

import { GroupBoard } from "./group_board.js";
import { boards } from "./open_boards.js";
import { Parallel } from "./parallel.js";
import { RunBoard } from "./run_board.js";

const drawn = new Map(); // parallel coordinates, by their element

/** Starts those that have come into the page, and ends those that are gone. */
export function findBoards() {
  found(boards, ".board:is([data-run], [data-query])", (node) => (node.dataset.query ? new GroupBoard(node) : new RunBoard(node)));
  found(drawn, ".parallel[data-found]", (node) => new Parallel(node));
}

function found(known, selector, start) {
  for (const [node, part] of known) {
    if (node.isConnected) continue;
    part.close();
    known.delete(node);
  }
  for (const node of document.querySelectorAll(selector)) if (!known.has(node)) known.set(node, start(node));
}
