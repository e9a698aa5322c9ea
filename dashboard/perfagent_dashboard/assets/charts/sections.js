// Sections of a board, which fold and remember it.

import { say, words } from "../lib/config.js";
import { el, setChildren, setText } from "../lib/dom.js";
import { valueAndUnit } from "../lib/metrics.js";
import { folded, remember } from "../lib/remembered.js";

const TITLES = (key) => (key.startsWith("logged:") ? `${key.slice(7)}/` : words[`section_${key}`]);

export class Section {
  constructor(board, key) {
    this.key = key;
    this.grid = el("div", { class: "grid" });
    this.table = el("dl", { class: "unchanging config" });
    this.same = el("details", { class: "same", hidden: true }, el("summary"), this.table);
    this.count = el("span", { class: "quiet" });
    this.isPlain = board.bare || key === "only";
    this.node = this.isPlain
      ? el("div", { class: "section" }, this.grid)
      : el("details", { class: "section", "data-section": key, open: !folded.has(key) }, el("summary", null, el("h2", null, TITLES(key)), this.count), this.grid, this.same);
    if (this.isPlain) return;
    this.node.addEventListener("toggle", () => {
      if (this.opened) return; // by the page, not by a person
      if (this.node.open) folded.delete(key);
      else folded.add(key);
      remember();
    });
  }

  /** parts: charts of the section, in their order. Those that are in place are not touched: moving a node makes the browser
   * forget what it has laid out. */
  put(parts) {
    this.parts = parts;
    const cards = parts.filter((part) => !part.unchanging).map((part) => part.card);
    cards.forEach((card, at) => this.grid.children[at] === card || this.grid.insertBefore(card, this.grid.children[at] ?? null));
    for (const extra of [...this.grid.children].slice(cards.length)) extra.remove();
    const constant = parts.filter((part) => part.unchanging);
    setChildren(this.table, constant.map((part) => el("div", { "data-name": part.name }, el("dt", { title: part.metric.meaning }, part.metric.title), el("dd", null, valueAndUnit(part.metric, part.data.min[0]).filter(Boolean).join(" ")))));
    this.same.hidden = !constant.length;
    setText(this.same.firstElementChild, say("unchanging", { count: constant.length }));
  }

  /** searching: everything that fits is shown, folded or not. */
  show(searching) {
    if (this.isPlain) return;
    const left = this.parts.filter((part) => !part.card.hidden || (part.unchanging && !searching));
    setText(this.count, String(left.length));
    this.node.hidden = !left.length;
    if (searching) this.unfold();
    else if (this.opened) {
      this.node.open = !folded.has(this.key);
      setTimeout(() => (this.opened = false));
    }
  }

  unfold() {
    if (this.isPlain || this.node.open) return;
    this.opened = true;
    this.node.open = true;
  }
}
