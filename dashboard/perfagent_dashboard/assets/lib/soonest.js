// Runs an action once for several requests, at the earliest time that any of them asked for, and so often at most.

export class Soonest {
  constructor(act, everyMs = 0) {
    this.act = act;
    this.everyMs = everyMs;
    this.acted = -Infinity;
    this.timer = null;
  }

  within(ms) {
    const now = performance.now();
    const at = Math.max(now + ms, this.acted + this.everyMs);
    if (this.timer && this.at <= at) return;
    clearTimeout(this.timer);
    this.at = at;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.acted = performance.now();
      this.act(ms);
    }, at - now);
  }

  cancel() {
    clearTimeout(this.timer);
  }
}
