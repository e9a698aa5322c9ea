// Starts what draws in every element of the classes `board`, `parallel` and `flame`.

import { FlameGraph } from "./flame.js";
import { GroupBoard } from "./group_board.js";
import { boards } from "./open_boards.js";
import { Parallel } from "./parallel.js";
import { RunBoard } from "./run_board.js";

const others = new Map(); // parallel coordinates and flame graphs, by their element

/** Starts those that have come into the page, and ends those that are gone. */
export function findBoards() {
  for (const open of [boards, others]) for (const [node, one] of open) if (!node.isConnected && open.delete(node)) one.close();
  start(boards, ".board:is([data-run], [data-query])", (node) => (node.dataset.query ? new GroupBoard(node) : new RunBoard(node)));
  start(others, ".parallel[data-found]", (node) => new Parallel(node));
  start(others, ".flame[data-url]", (node) => new FlameGraph(node));
}

function start(open, selector, made) {
  for (const node of document.querySelectorAll(selector)) if (!open.has(node)) open.set(node, made(node));
}
