// Draws what has changed: only charts on screen, each at most once in an animation frame, and a frame ends when its time is used up.

import { need } from "../lib/bundles.js";

const FRAME_MS = 24;
const MIN_LIVE_MS = 120;
const LIBRARY_AGAIN_MS = 3000; // after the library did not come

export class Painter {
  constructor() {
    this.wanted = new Map(); // chart -> what it asks for
    this.nextLive = 0;
  }

  /** Asks for `what` ("draw", "extend" or "value") at the next frame; the greatest wish wins. */
  want(part, what) {
    const order = { value: 0, extend: 1, draw: 2 };
    const now = this.wanted.get(part);
    if (now === undefined || order[now] < order[what]) this.wanted.set(part, what);
    this.#schedule();
  }

  #schedule() {
    if (this.frame || this.closed) return;
    if (!window.Plotly) {
      this.loading ??= need("charts").catch(() => new Promise((later) => setTimeout(later, LIBRARY_AGAIN_MS))).then(() => {
        this.loading = null;
        this.#schedule();
      });
      return;
    }
    const wait = [...this.wanted.values()].includes("draw") ? 0 : this.nextLive - performance.now();
    if (wait > 16) {
      if (!this.waiting) {
        this.waiting = setTimeout(() => {
          this.waiting = 0;
          this.#schedule();
        }, wait);
      }
      return;
    }
    this.frame = requestAnimationFrame(() => this.#tick());
  }

  #tick() {
    this.frame = 0;
    const begin = performance.now();
    let spent = 0;
    for (const [part, what] of this.wanted) {
      if (spent > FRAME_MS) break;
      this.wanted.delete(part);
      if (!part.visible || part.card.hidden) {
        if (what !== "value") part.needsDraw = true;
        continue;
      }
      if (what === "extend" && !part.inSight) continue; // it asks again when it comes into sight
      if (part.stale) {
        if (what === "draw" && part.drawnTo) part.draw();
        else if (what === "value") part.showValue();
        continue;
      }
      if (what === "draw") part.draw();
      else if (what === "extend") part.extend();
      else part.showValue();
      spent = performance.now() - begin;
    }
    this.cost = (this.cost ?? 0) + spent;
    if (this.wanted.size) {
      this.frame = requestAnimationFrame(() => this.#tick());
      return;
    }
    // Live data may take half of the page's time at most: what a slow machine cannot draw comes less often, not late.
    this.nextLive = performance.now() + Math.min(1500, Math.max(MIN_LIVE_MS, this.cost));
    this.cost = 0;
  }

  close() {
    this.closed = true;
    cancelAnimationFrame(this.frame);
    clearTimeout(this.waiting);
  }
}
