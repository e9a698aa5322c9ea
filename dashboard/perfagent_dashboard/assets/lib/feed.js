// The live connection: one WebSocket a page, with back-off, a pause while the tab is hidden, and an honest badge.

import { online, suspect } from "./clicks.js";
import { say } from "./config.js";
import { el, setChildren } from "./dom.js";
import { clockTime, fullTime } from "./times.js";

const FIRST_DELAY_MS = 500;
const LAST_DELAY_MS = 15000;
const HIDDEN_GRACE_MS = 5000;
const SILENCE_MS = 20000;
const ANSWER_MS = 5000;
const LISTEN_MS = 2000;

/**
 * subscription(): what to ask for, made anew at every connect. fetch(): first listen, then fetch: called when the server has
 * said that it listens, after every connect, since nothing tells what happened before; at the start also when the server does
 * not say so for two seconds. onMessage(message). onState(state, since): "connecting", "live", "stale" (since Unix seconds) or
 * "paused".
 */
export class Feed {
  constructor({ subscription, fetch, onMessage, onState }) {
    Object.assign(this, { subscription, fetch, onMessage, onState });
    this.delay = FIRST_DELAY_MS;
    this.closed = false;
    this.listening = false; // the server has answered this socket's first subscription
    this.patience = setTimeout(() => this.fetch(), LISTEN_MS);
    this.lastSeen = null;
    this.visibility = () => this.#visibility();
    document.addEventListener("visibilitychange", this.visibility);
    this.watchdog = setInterval(() => this.#watch(), SILENCE_MS / 4);
    this.#connect();
  }

  close() {
    this.closed = true;
    document.removeEventListener("visibilitychange", this.visibility);
    clearTimeout(this.timer);
    clearTimeout(this.grace);
    clearTimeout(this.patience);
    clearInterval(this.watchdog);
    this.socket?.close();
  }

  /** A stopped server or a pulled cable closes no socket. Silence is normal when nothing trains, so it is asked. */
  async #watch() {
    if (this.asking || this.paused || this.socket?.readyState !== WebSocket.OPEN) return;
    if (Date.now() / 1000 - this.lastSeen < SILENCE_MS / 1000) return;
    this.asking = true;
    const socket = this.socket;
    try {
      await fetch("/healthz", { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
      this.lastSeen = Date.now() / 1000;
    } catch {
      if (socket === this.socket && !this.closed) this.#lost(socket);
    } finally {
      this.asking = false;
    }
  }

  #lost(socket) {
    if (this.closed || this.paused || socket !== this.socket) return;
    this.socket = null;
    socket.close();
    this.onState("stale", this.lastSeen);
    // Jitter: a restarted server must not meet every page in the same instant.
    this.timer = setTimeout(() => this.#connect(), this.delay * (0.5 + Math.random()));
    this.delay = Math.min(this.delay * 2, LAST_DELAY_MS);
  }

  #connect() {
    if (this.closed || this.paused) return;
    if (!this.lastSeen) this.onState("connecting");
    this.listening = false;
    const socket = (this.socket = new WebSocket(location.origin.replace(/^http/, "ws") + "/ws/live"));
    socket.addEventListener("open", () => {
      this.delay = FIRST_DELAY_MS;
      socket.send(JSON.stringify({ subscribe: this.subscription() }));
      this.lastSeen = Date.now() / 1000;
    });
    socket.addEventListener("message", (event) => {
      this.lastSeen = Date.now() / 1000;
      const message = JSON.parse(event.data);
      this.onMessage(message);
      if (message.subscribed && !this.listening) {
        this.listening = true;
        clearTimeout(this.patience);
        this.onState("live");
        this.fetch();
      }
    });
    socket.addEventListener("close", () => this.#lost(socket));
  }

  #visibility() {
    clearTimeout(this.grace);
    if (document.hidden) {
      this.grace = setTimeout(() => {
        this.paused = true;
        clearTimeout(this.timer);
        this.onState("paused");
        this.socket?.close();
      }, HIDDEN_GRACE_MS);
    } else if (this.paused || !this.socket) {
      if (this.paused) this.delay = FIRST_DELAY_MS;
      this.paused = false;
      clearTimeout(this.timer);
      this.#connect();
    }
  }
}

/** The badge in the bar. */
export function showFeed(state, since) {
  const badge = document.getElementById("feed");
  if (!badge) return;
  const time = since ? clockTime(since) : "";
  if (state === "stale") suspect(since || undefined);
  else if (state === "live") online();
  badge.className = `feed ${state}`;
  badge.title = state === "stale" && since ? say("stale_title", { time: fullTime(since) }) : state === "live" ? say("live_title") : "";
  const text = state === "stale" && !since ? say("connecting") : say(state, { time });
  if (badge.dataset.text === text) return;
  badge.dataset.text = text;
  setChildren(badge, el("i", { "aria-hidden": "true" }), text);
}
