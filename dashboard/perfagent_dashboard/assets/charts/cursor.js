// One cursor over all charts of a board: where the pointer is in one, all show their values.

import { words } from "../lib/config.js";
import { el, setText } from "../lib/dom.js";
import { thousands } from "../lib/numbers.js";
import { clockTime } from "../lib/times.js";
import { writeNote } from "./notes.js";
import { lastAtOrBefore } from "./samples.js";

export class Cursor {
  constructor(board) {
    this.board = board;
    this.pointed = null; // the step under the pointer
  }

  /** Lets the pointer over a chart move the cursor. */
  follow(part) {
    part.frame.addEventListener("pointermove", (event) => this.hover(part, event));
    part.frame.addEventListener("pointerleave", () => this.leave());
    part.frame.addEventListener("mousedown", (event) => {
      if (!event.shiftKey || !this.board.mayChange || this.pointed == null) return;
      event.stopPropagation(); // plotly would move the axis
      writeNote(this.board, this.pointed);
    }, { capture: true });
  }

  hover(part, event) {
    if (event.buttons) return;
    const axis = part.plot._fullLayout?.xaxis;
    if (!axis) return;
    const box = part.plot.getBoundingClientRect();
    const px = event.clientX - box.left - axis._offset;
    if (px < 0 || px > axis._length) return this.leave();
    this.pointed = this.board.axis.stepOfPixel(px, part.plot._fullLayout);
    this.pointing ??= requestAnimationFrame(() => {
      this.pointing = undefined;
      this.#point(part, this.pointed);
    });
    return undefined;
  }

  leave() {
    this.pointed = null;
    this.tag?.remove();
    for (const part of this.board.parts()) {
      if (!part.cursor || part.cursor.hidden) continue;
      part.cursor.hidden = true;
      if (part.showValue) part.showValue();
    }
  }

  #point(part, step) {
    if (step == null) return;
    for (const one of this.board.parts()) this.#place(one, step);
    this.#label(part, step, part.told?.(step) ?? "");
  }

  #place(part, step) {
    if (!part.visible || !part.cursor) return;
    const axis = part.plot._fullLayout?.xaxis;
    const at = axis ? this.board.axis.pixelOf(step, part.plot._fullLayout) : -1;
    part.cursor.hidden = !(at >= 0 && at <= axis?._length);
    if (part.cursor.hidden) return;
    part.cursor.style.transform = `translateX(${Math.round(axis._offset + at)}px)`;
    if (part.showValue) part.showValue();
  }

  /** Which step the cursor is on, in the chart that is pointed at. */
  #label(part, step, value) {
    this.tag ??= el("span", { class: "tag-at" });
    const { step: steps, time } = this.board.axis.timed();
    const at = lastAtOrBefore(steps, step);
    setText(this.tag, [`${words.step} ${thousands(step)}`, at >= 0 && time[at] ? clockTime(time[at]) : "", value].filter(Boolean).join(" · "));
    if (this.tag.parentElement !== part.frame) part.frame.append(this.tag);
    const x = part.plot._fullLayout.xaxis._offset + this.board.axis.pixelOf(step, part.plot._fullLayout);
    const right = x > part.frame.clientWidth / 2;
    this.tag.style.left = right ? "" : `${Math.round(x + 6)}px`;
    this.tag.style.right = right ? `${Math.round(part.frame.clientWidth - x + 6)}px` : "";
  }
}
