// Settings and results of runs as parallel coordinates (Inselberg 1985): a line a run. A stretch of an axis, drawn with the
// pointer, picks runs; the charts and tables of the page fade the others. SVG: plotly's own needs WebGL, which remote desktops
// and virtual machines lack.
//
// data-found: what GET /groups/runs answers, with `order`, the groups or runs in the order of their colors.

import { say, words } from "../lib/config.js";
import { el, setChildren, svg } from "../lib/dom.js";
import { metricOf } from "../lib/metrics.js";
import { si } from "../lib/numbers.js";
import { boards } from "./open_boards.js";

const FACTOR = 29.9; // positive values that span more, as 1e-4 to 3e-3, are drawn by their logarithm
const MOST_AXES = 9;
const MOST_TICKS = 10;
const MOST_COMPARED = 20;
const AXIS_PX = 112;
const [TOP, HEIGHT, BOTTOM] = [10, 230, 24];
const CLICK_PX = 4;
const SCATTER_PX = 420;
const NOWHERE = -0.09; // a run without the value, below the axis

const runPath = (run) => `/run/${encodeURIComponent(run)}`;
const shortened = (text) => (text.length > 14 ? `${text.slice(0, 13)}…` : text);
const told = (value) => (String(value).length < 7 ? String(value) : si(value));
const yOf = (place) => TOP + (1 - place) * HEIGHT;
const paint = (node, how, { colour }) => ((node.style[how] = colour < 0 ? "var(--muted)" : `var(--series-${colour})`), node);

/** Those labels of an axis that do not stand on each other; at(value): where, in pixels. */
function apart({ ticks, place }, at, least) {
  let used = -Infinity;
  return ticks.toSorted((a, b) => at(place(a[0])) - at(place(b[0]))).filter(([value]) => {
    const fits = at(place(value)) - used >= least;
    if (fits) used = at(place(value));
    return fits;
  });
}

/** name: as it is shown. place(value) from 0 to 1, and ticks as [value, text]: of numbers, of their logarithms, or of words in their order. */
function axisOf({ name, values }) {
  const known = [...new Set(values.filter((value) => value != null))];
  const none = known.length < new Set(values).size ? [[null, words.no_value]] : [];
  if (known.some((value) => typeof value !== "number")) {
    const order = known.map(String).toSorted();
    const place = (value) => (value == null ? NOWHERE : order.indexOf(String(value)) / Math.max(1, order.length - 1));
    return { name, values, place, ticks: [...order.map((value) => [value, shortened(value)]), ...none] };
  }
  const sorted = known.toSorted((a, b) => a - b);
  const [low, high] = [sorted[0], sorted.at(-1)];
  const isLog = low > 0 && high / low > FACTOR;
  const at = (value) => (isLog ? Math.log10(value) : value);
  const place = (value) => (value == null ? NOWHERE : (at(value) - at(low)) / (at(high) - at(low) || 1));
  const even = Array.from({ length: 6 }, (_, i) => (isLog ? 10 ** (at(low) + (i / 5) * (at(high) - at(low))) : low + (i / 5) * (high - low)));
  const ticks = sorted.length <= MOST_TICKS ? sorted : even;
  return { name: isLog ? say("log_axis", { name }) : name, values, place, ticks: [...ticks.map((value) => [value, told(value)]), ...none] };
}

export class Parallel {
  constructor(root) {
    this.root = root;
    this.found = JSON.parse(root.dataset.found);
    const { settings, results, goal, runs, by, order } = this.found;
    const reached = results[0].values;
    const rows = [...runs.keys()].filter((i) => reached[i] != null);
    const keyOf = ({ run, group }) => (by ? (group ?? "") : run);
    this.rows = rows.map((i) => ({ ...runs[i], key: keyOf(runs[i]), colour: order.indexOf(keyOf(runs[i])), reached: reached[i] }));
    this.goal = { name: goal.slice(4), higher: goal.startsWith("max:") };
    const differs = ({ values }) => new Set(rows.map((i) => values[i])).size > 1;
    const columns = [...settings.filter(differs).slice(0, MOST_AXES - results.length), ...results.toReversed().map((one) => ({ ...one, name: metricOf(one.name).title }))];
    this.axes = columns.map(({ name, values }) => axisOf({ name, values: rows.map((i) => values[i]) })).filter(({ values }, i) => new Set(values).size > 1 || i === columns.length - 1);
    this.ranges = new Map(); // axis -> [from, to], of 0 to 1
    this.head = el("div", { class: "parallel-head" }, this.axes.map((axis) => el("button", { type: "button", on: { click: () => this.#scatter(axis) } }, axis.name)));
    this.picture = el("div");
    this.points = el("div");
    this.told = el("p", { class: "quiet", role: "status" });
    setChildren(root, el("div", { class: "parallel-scroll", tabindex: 0 }, this.head, this.picture), this.told, this.points);
    this.resizer = new ResizeObserver(() => this.draw());
    this.resizer.observe(root);
    this.tell();
  }

  draw() {
    const width = Math.max(this.root.clientWidth - 26, AXIS_PX * this.axes.length);
    const xs = this.axes.map((_, i) => ((i + 0.5) * width) / this.axes.length);
    if (width === this.width) return;
    this.width = width;
    this.head.style.width = `${width}px`;
    const best = this.best(this.rows);
    this.lines = this.rows.map((row, at) => {
      const points = this.axes.map(({ values, place }, i) => `${xs[i].toFixed(1)},${yOf(place(values[at])).toFixed(1)}`).join(" ");
      return paint(svg("polyline", { points, class: row === best ? "line best" : "line" }, svg("title", null, row.name)), "stroke", row);
    });
    const end = best && svg("text", { class: "star", x: xs.at(-1) - 16, y: yOf(this.axes.at(-1).place(best.reached)) + 5 }, "★");
    const axes = this.axes.map((axis, i) => this.#axis(axis, xs[i]));
    setChildren(this.picture, svg("svg", { width, height: TOP + HEIGHT + BOTTOM, role: "img", "aria-label": this.axes.map((one) => one.name).join(" → ") }, svg("g", null, this.lines.toReversed()), axes, end));
    this.tell();
  }

  /** The line of an axis with its labels, and where the pointer draws a stretch. */
  #axis(axis, x) {
    const labels = apart(axis, yOf, 13).map(([value, text]) => svg("text", { x: x + 7, y: yOf(axis.place(value)) + 4 }, text));
    const stretch = svg("rect", { class: "stretch", x: x - 6, width: 12 });
    const area = svg("rect", { class: "area", x: x - 20, y: 0, width: 40, height: TOP + HEIGHT + BOTTOM });
    const show = () => {
      const [from, to] = this.ranges.get(axis) ?? [0, 0];
      stretch.setAttribute("y", yOf(to));
      stretch.setAttribute("height", (to - from) * HEIGHT);
    };
    const placeOf = (event) => 1 - (event.clientY - area.getBoundingClientRect().top - TOP) / HEIGHT;
    let begin = null;
    const move = (event) => {
      if (begin === null) return;
      const [from, to] = [begin, placeOf(event)].toSorted((a, b) => a - b);
      if ((to - from) * HEIGHT < CLICK_PX) this.ranges.delete(axis);
      else this.ranges.set(axis, [from, to]);
      show();
      this.tell();
    };
    area.addEventListener("pointerdown", (event) => {
      begin = placeOf(event);
      area.setPointerCapture(event.pointerId);
      event.preventDefault();
      move(event);
    });
    area.addEventListener("pointermove", move);
    area.addEventListener("pointerup", () => (begin = null));
    show();
    return svg("g", { class: "axis" }, svg("line", { x1: x, x2: x, y1: TOP, y2: TOP + HEIGHT }), labels, stretch, area);
  }

  /** The runs as points of one setting and the goal; away again when its name is pressed once more. */
  #scatter(axis) {
    this.chosen = axis === this.chosen ? null : axis;
    [...this.head.children].forEach((name, i) => name.setAttribute("aria-pressed", String(this.axes[i] === this.chosen)));
    const goal = this.axes.at(-1);
    const xOf = (place) => 70 + place * SCATTER_PX;
    this.dots = this.rows.map((row, at) => paint(svg("circle", { class: "line", cx: xOf(axis.place(axis.values[at])), cy: yOf(goal.place(goal.values[at])), r: 4 }, svg("title", null, row.name)), "fill", row));
    const across = apart(axis, xOf, 60).map(([value, text]) => svg("text", { x: xOf(axis.place(value)), y: TOP + HEIGHT + 18, "text-anchor": "middle" }, text));
    const up = apart(goal, yOf, 13).map(([value, text]) => svg("text", { x: 48, y: yOf(goal.place(value)) + 4, "text-anchor": "end" }, text));
    const label = `${axis.name} → ${goal.name}`;
    const lines = svg("g", { class: "axis" }, svg("line", { x1: 55, x2: 55, y1: TOP, y2: TOP + HEIGHT + 5 }), svg("line", { x1: 55, x2: xOf(1), y1: TOP + HEIGHT + 5, y2: TOP + HEIGHT + 5 }));
    setChildren(this.points, this.chosen && [el("p", { class: "quiet" }, label), svg("svg", { width: SCATTER_PX + 110, height: TOP + HEIGHT + BOTTOM, role: "img", "aria-label": label }, lines, across, up, svg("g", null, this.dots))]);
    this.tell();
  }

  best(rows) {
    return rows.reduce((best, row) => (!best || (this.goal.higher ? row.reached > best.reached : row.reached < best.reached) ? row : best), null);
  }

  isPicked(at) {
    return [...this.ranges].every(([{ values, place }, [from, to]]) => place(values[at]) >= from && place(values[at]) <= to);
  }

  /** Says how many runs are picked and which is the best of them, and fades the others in the page. */
  tell() {
    const picked = this.rows.filter((_, at) => this.isPicked(at));
    const isAll = !this.ranges.size;
    const keys = isAll ? null : picked.map(({ key }) => key);
    for (const marks of [this.lines, this.dots]) {
      marks?.forEach((mark, at) => {
        mark.classList.toggle("faded", !this.isPicked(at));
        if (!isAll && this.isPicked(at)) mark.parentNode?.append(mark); // over the others
      });
    }
    for (const { board } of boards.values()) board.pick(keys);
    for (const row of document.querySelectorAll("tr[data-key]")) row.classList.toggle("faded", Boolean(keys) && !keys.includes(row.dataset.key));
    const best = this.best(picked);
    const link = `/compare?runs=${picked.map(({ run }) => encodeURIComponent(run)).join(",")}`;
    const missing = this.found.runs.length - this.rows.length;
    setChildren(this.told,
      say(isAll ? "parallel_all" : "parallel_picked", { count: picked.length, all: this.rows.length }),
      best && [el("b", { class: "best" }, `★ ${words.best}`), el("a", { href: runPath(best.run), "data-nav": runPath(best.run) }, best.name), el("span", null, `${metricOf(this.goal.name).title} ${si(best.reached)}`)],
      !isAll && picked.length > 1 && picked.length <= MOST_COMPARED ? el("a", { class: "button small", href: link, "data-nav": link }, words.compare_these) : null,
      this.found.total > this.found.runs.length ? el("span", null, say("parallel_newest", { count: this.found.runs.length, all: this.found.total })) : null,
      missing ? el("span", null, say("parallel_missing", { count: missing, name: metricOf(this.goal.name).title })) : null);
  }

  close() {
    this.resizer.disconnect();
  }
}
