// Runs an action once for several requests, at the earliest time that any of them asked for.

export class Soonest {
  constructor(act) {
    this.act = act;
    this.timer = null;
  }

  within(ms) {
    const at = performance.now() + ms;
    if (this.timer && this.at <= at) return;
    clearTimeout(this.timer);
    this.at = at;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.act(ms);
    }, ms);
  }

  cancel() {
    clearTimeout(this.timer);
  }
}
