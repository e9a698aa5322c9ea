// The flame graph of a profile, and its trace handed to Perfetto.
//
// data-url: of the trace; data-name: of what.

import { api } from "../lib/api.js";
import { need } from "../lib/bundles.js";
import { onTheme, say, words } from "../lib/config.js";
import { el, flash, setChildren, setText } from "../lib/dom.js";
import { valueAndUnit } from "../lib/metrics.js";
import { thousands } from "../lib/numbers.js";
import { colorOf, fontOfCharts } from "./figures.js";

const PERFETTO = "https://ui.perfetto.dev";
const ASK_MS = 100;
const PERFETTO_WAIT_MS = 60000;
const ROW_PX = 20;
const MOST_ROWS = 32;
const SEEN = 0.006; // of the whole: a narrower block gets no row
const PHASE_KINDS = [[/^autograd::/, "backward"], [/^Optimizer\./, "optimizer"], [/nccl|c10d|gloo/i, "comm"], [/dataloader/i, "data"], [/memcpy/i, "h2d"]];

const inUnits = (seconds) => valueAndUnit({ unit: "s" }, seconds).join(" ");

export class FlameGraph {
  constructor(root) {
    this.path = root.dataset.url.replace(/^\/api\/v1/, "");
    this.threads = el("select", { "aria-label": words.flame_thread, hidden: true, on: { change: () => this.#load() } });
    this.perfetto = el("button", { type: "button", class: "button small", title: words.perfetto_title, on: { click: () => openInPerfetto(root.dataset, this.perfetto) } }, words.perfetto);
    this.plot = el("div", { class: "flame-plot", role: "img", "aria-label": words.flame });
    this.told = el("p", { class: "quiet" }, words.loading);
    setChildren(root, el("div", { class: "flame-tools" }, el("h3", null, words.flame), this.threads, this.perfetto), this.plot, this.told);
    this.seen = new IntersectionObserver(([entry]) => entry.isIntersecting && (this.seen.disconnect(), this.#load()));
    this.seen.observe(root);
    this.offTheme = onTheme(() => this.#draw());
  }

  async #load() {
    try {
      this.shown = await api(`${this.path}/flame?thread=${this.threads.value || 0}`);
      await need("charts");
    } catch (problem) {
      this.shown = null;
      setText(this.told, problem.message);
      return;
    }
    const { threads, thread } = this.shown;
    setChildren(this.threads, threads.map(({ kind, name, busy_s }, at) => el("option", { value: at, selected: at === thread }, `${say(`flame_${kind}`, { name })} · ${inUnits(busy_s)}`)));
    this.threads.hidden = threads.length < 2;
    this.#draw();
  }

  #draw() {
    if (!this.shown || this.closed) return;
    const { names, parents, seconds, calls, left_out } = this.shown.flame;
    const own = [...seconds]; // without what runs inside, of which plotly makes the whole again
    const depths = [];
    const phases = [];
    let whole = 0;
    parents.forEach((parent, at) => {
      depths.push(parent < 0 ? 1 : depths[parent] + 1);
      phases.push(phaseOf(names[at]) ?? (parent < 0 || !phases[parent] ? "forward" : phases[parent]));
      if (parent < 0) whole += seconds[at];
      else own[parent] = Math.max(0, own[parent] - seconds[at]);
    });
    const colours = phases.map((phase) => colorOf(phase ? `phase-${phase}` : "raised"));
    const deepest = Math.max(...depths.filter((_, at) => seconds[at] >= SEEN * whole));
    const icicle = {
      type: "icicle", ids: names.map((_, at) => String(at)), labels: names.map((name) => name.replace("autograd::engine::evaluate_function", "autograd").replaceAll("<", "‹").replaceAll(">", "›")), parents: parents.map((parent) => (parent < 0 ? "" : String(parent))), values: own,
      customdata: names.map((_, at) => [inUnits(seconds[at]), ((100 * seconds[at]) / whole).toPrecision(2), thousands(calls[at])]),
      hovertemplate: `<b>%{label}</b><br>${say("flame_hover", { time: "%{customdata[0]}", share: "%{customdata[1]}", calls: "%{customdata[2]}" })}<extra></extra>`,
      marker: { colors: colours, line: { width: 1, color: colorOf("card") } },
      tiling: { orientation: "v", pad: 0 }, pathbar: { visible: true, thickness: 20 }, textposition: "middle left", textfont: { size: 11 }, maxdepth: MOST_ROWS, sort: false,
    };
    const layout = { autosize: true, height: 24 + ROW_PX * Math.min(MOST_ROWS, deepest), margin: { l: 0, r: 0, t: 2, b: 0 }, paper_bgcolor: "rgba(0,0,0,0)", font: fontOfCharts(), template: {}, uniformtext: { minsize: 10, mode: "hide" } };
    window.Plotly.react(this.plot, [icicle], layout, { displayModeBar: false, responsive: true });
    this.plot.dataset.nodes = String(names.length);
    setText(this.told, [words.flame_hint, left_out ? say("flame_left_out", { count: thousands(left_out) }) : ""].filter(Boolean).join(" "));
  }

  close() {
    this.closed = true;
    this.seen.disconnect();
    this.offTheme();
    window.Plotly?.purge(this.plot);
  }
}

/** Blocks have the colours of the phases of a step: undefined for that of what it runs in, empty for the step itself. */
const phaseOf = (name) => (name === "ProfilerStep" ? "" : PHASE_KINDS.find(([kind]) => kind.test(name))?.[1]);

/** Perfetto's page asks for nothing: it is told a trace by a message, once it answers that it listens. */
async function openInPerfetto({ url, name }, button) {
  const page = window.open(PERFETTO); // in the click itself: later it would be a pop-up that browsers block
  if (!page) return flash(button, words.perfetto_blocked);
  const listens = new Promise((resolve, reject) => {
    const end = (settle, why) => {
      clearInterval(asking);
      window.removeEventListener("message", heard);
      settle(why);
    };
    const heard = ({ source, origin, data }) => source === page && origin === PERFETTO && data === "PONG" && end(resolve);
    const until = Date.now() + PERFETTO_WAIT_MS;
    const asking = setInterval(() => (page.closed || Date.now() > until ? end(reject, new Error(words.perfetto_silent)) : page.postMessage("PING", PERFETTO)), ASK_MS);
    window.addEventListener("message", heard);
  });
  try {
    const [trace] = await Promise.all([fetch(url, { credentials: "same-origin" }), listens]);
    if (!trace.ok) throw new Error(`${trace.status} ${trace.statusText}`);
    const buffer = await trace.arrayBuffer();
    const title = `${document.title.split(" · ")[0]}, ${name}`;
    page.postMessage({ perfetto: { buffer, title, fileName: `${title}.json.gz` } }, PERFETTO, [buffer]);
  } catch (error) {
    flash(button, error.message);
  }
  return undefined;
}
