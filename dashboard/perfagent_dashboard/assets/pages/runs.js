// The table of runs: what its cells show, and how it stays live and in the address. The table itself is AG Grid's.

import { config, say, words } from "../lib/config.js";
import { setChildren } from "../lib/dom.js";
import { Feed, showFeed } from "../lib/feed.js";
import { metricOf, valueAndUnit } from "../lib/metrics.js";
import { numberOf, si, thousands } from "../lib/numbers.js";
import { Soonest } from "../lib/soonest.js";
import { sparkline } from "../lib/sparkline.js";
import { ago, fullTime, unixOf } from "../lib/times.js";
import { countAlerts } from "./bar.js";
import { cameBack, go } from "./site.js";

const pathOf = (run) => `/run/${encodeURIComponent(run)}`;
const e = (...given) => window.React.createElement(...given);
const NAMES = ["loss", "tokens_per_s", "samples_per_s", "gpu/utilization_pct"];
const REFRESH_MS = 5000;
const KEPT_ROW = "perfagent-runs-row"; // the first one that is seen, for who comes back from a run
const GIVE_WAY = new Set(["trend", "gpu/utilization_pct", "timing.throughput"]);
const GIVES_WAY_FIRST = new Set(["step", "updated"]);
const SHOWS = {
  "timing.throughput": (data) => data.timing?.throughput != null,
  trend: (data) => data.trend?.length > 0,
  "gpu/utilization_pct": (data) => data.latest?.["gpu/utilization_pct"] != null,
}; // column -> whether a run has something for it
const middle = window.matchMedia("(min-width: 901px)");
const wide = window.matchMedia("(min-width: 1101px)");
const narrow = window.matchMedia("(max-width: 700px)"); // then a run is one cell: name, verdict, facts
const grid = () => {
  try {
    return window.dash_ag_grid.getApi("runs-grid");
  } catch {
    return null; // not there yet, or no longer
  }
};

// --- values --------------------------------------------------------------------------------------------------------------

const shown = (name, value) => (value == null ? "" : valueAndUnit(metricOf(name), numberOf(value)).filter(Boolean).join(" "));

window.dashAgGridFunctions = Object.assign(window.dashAgGridFunctions ?? {}, {
  cellStep: ({ data }) => (data ? thousands(data.step) : ""),
  cellThroughput: ({ data }) => (data?.timing?.throughput_name ? shown(data.timing.throughput_name, data.timing.throughput) : ""),
  cellLoss: ({ data }) => {
    const value = numberOf(data?.latest?.[data.loss]);
    return value == null ? "" : si(value);
  },
  cellMetric: ({ data, colDef }) => {
    const name = colDef.colId.replace(/^column:/, "");
    return data?.latest ? shown(name, data.latest[name]) : "";
  },
  cellSetting: ({ data, colDef }) => String(data?.config?.[colDef.colId.replace(/^column:config:/, "")] ?? ""),
});

// --- cells ---------------------------------------------------------------------------------------------------------------

const SHAPES = { critical: "▲", warning: "▲", info: "●", healthy: "✓", unknown: "○" };
const facts = (data) => [data.project, data.world_size > 1 ? say("ranks", { count: data.world_size }) : null, data.host, ...(data.tags ?? []).slice(0, 3)].filter(Boolean).join(" · ");

function verdictOf(data) {
  const verdict = data.verdict ?? {};
  const tone = SHAPES[verdict.outcome] ? verdict.outcome : "unknown"; // of the verdict that stands beside it, as on the run's page
  const firing = data.alerts?.firing ?? {};
  const more = Object.values(firing).reduce((sum, count) => sum + count, 0) - 1;
  const isTaken = !data.needs_attention && (firing.critical || firing.warning);
  return e("span", { className: "cell-verdict", title: verdict.message },
    e("span", { className: `severity ${tone}`, title: words[`severity_${tone}`] }, SHAPES[tone]), " ", verdict.title || verdict.message || "",
    more > 0 ? e("small", null, ` +${more}`) : null, isTaken ? e("small", null, ` · ${words.view_acknowledged}`) : null);
}

window.dashAgGridComponentFunctions = Object.assign(window.dashAgGridComponentFunctions ?? {}, {
  RunCell: ({ data }) =>
    data
      ? e("div", { className: "cell-run" },
          e("span", { className: "line" }, e("a", { href: pathOf(data.run), "data-nav": pathOf(data.run), className: "name" }, data.name || data.run), narrow.matches ? e("small", null, ` ${data.project}`) : null),
          narrow.matches ? verdictOf(data) : e("small", null, facts(data)))
      : e("span", { className: "quiet" }, words.loading),
  VerdictCell: ({ data }) => (data ? verdictOf(data) : null),
  StateCell: ({ data }) =>
    data ? e("span", { className: `state ${data.state}` }, e("i", { "aria-hidden": "true" }, config.shapes[data.state]), words[`state_${data.state}`]) : null,
  TrendCell: ({ data }) => (data?.trend ? e("span", { dangerouslySetInnerHTML: { __html: sparkline(data.trend).outerHTML } }) : null),
  SeenCell: ({ data }) => (data ? e("time", { dateTime: data.updated, title: fullTime(unixOf(data.updated)) }, ago(unixOf(data.updated))) : null),
});

// --- live, and in the address ----------------------------------------------------------------------------------------------

function writeAddress(view, sortModel) {
  const url = new URL(location);
  const [sorted] = sortModel ?? [];
  const by = sorted ? { verdict: "severity" }[sorted.colId] ?? sorted.colId.replace(/^column:/, "") : view.sort;
  const [sort, order] = by === "severity" ? [] : [by, sorted?.sort ?? view.order];
  const values = { ...view, attention: view.attention && "1", sort, order };
  for (const name of ["q", "severity", "state", "project", "attention", "columns", "sort", "order"]) {
    url.searchParams.delete(name);
    for (const one of [values[name]].flat()) if (one) url.searchParams.append(name, one);
  }
  if (url.href !== location.href) history.replaceState(null, "", url);
}

const regroup = () => window.dash_clientside.set_props("runs-regroup", { data: Date.now() });

window.dash_clientside = window.dash_clientside ?? {};
window.dash_clientside.sweep = {
  /** Leads to the page in these groups, with all else that stands in its address. */
  regroup(by, goal) {
    const url = new URL(location);
    const [asked] = window.dash_clientside.callback_context.triggered;
    const [name, value] = asked?.prop_id === "by.value" ? ["by", by] : ["goal", goal];
    if (value) url.searchParams.set(name, value);
    else url.searchParams.delete(name);
    if (asked) go(url.pathname + url.search);
    return window.dash_clientside.no_update;
  },
};
window.dash_clientside.runs = {
  viewed(view, _tick, request) {
    const [asked] = window.dash_clientside.callback_context.triggered;
    if (view && location.pathname === "/runs") writeAddress(view, request?.sortModel);
    if (view?.by) regroup();
    else if (asked?.prop_id === "runs-view.data") grid()?.purgeInfiniteCache();
    else if (asked?.prop_id === "runs-tick.data") grid()?.refreshInfiniteCache();
    return window.dash_clientside.no_update;
  },
};

export class RunsPage {
  constructor(root) {
    this.root = root;
    this.isGrouped = Boolean(root.dataset.by);
    this.next = new Soonest(() => {
      if (this.closed || document.hidden) return;
      if (this.isGrouped) regroup();
      else grid()?.refreshInfiniteCache();
    }, 1000);
    setChildren(document.getElementById("crumb"));
    this.row = cameBack() ? Number(sessionStorage.getItem(KEPT_ROW)) : 0;
    if (!this.isGrouped) this.#shape();
    let first = true;
    this.feed = new Feed({
      subscription: () => ({ fleet: true, names: NAMES }),
      fetch: () => {
        if (!first) this.next.within(0); // what is shown came with the page
        first = false;
      },
      onMessage: (message) => this.#message(message),
      onState: showFeed,
    });
  }

  /** Which columns fit; asked again until the table is there. */
  #shape() {
    const table = grid();
    const columns = table?.getColumns?.()?.map((column) => column.getColId()) ?? [];
    if (this.closed) return;
    if (!columns.length) {
      setTimeout(() => this.#shape(), 100);
      return;
    }
    const hides = (id) => (narrow.matches ? id !== "name" : !wide.matches && (GIVE_WAY.has(id) || (!middle.matches && GIVES_WAY_FIRST.has(id))));
    table.setColumnsVisible(columns.filter(hides), false);
    const emptied = Object.keys(SHOWS).filter((id) => !hides(id));
    table.addEventListener("bodyScrollEnd", () => !table.isDestroyed() && sessionStorage.setItem(KEPT_ROW, String(table.getFirstDisplayedRowIndex())));
    table.addEventListener("modelUpdated", () => this.#hideEmpty(table, emptied));
    this.#hideEmpty(table, emptied);
  }

  /** A column in which no run has anything gives its room to the verdict. */
  #hideEmpty(table, columns) {
    const rows = [];
    if (this.closed || table.isDestroyed()) return;
    table.forEachNode((node) => node.data && rows.push(node.data));
    if (!rows.length) return;
    if (this.row) table.ensureIndexVisible(Math.min(this.row, table.getDisplayedRowCount() - 1), "top");
    this.row = 0;
    const has = columns.filter((id) => rows.some(SHOWS[id]));
    const changed = columns.filter((id) => table.getColumn(id)?.isVisible() !== has.includes(id));
    if (!changed.length) return;
    table.setColumnsVisible(has, true);
    table.setColumnsVisible(columns.filter((id) => !has.includes(id)), false);
  }

  #message(message) {
    if (this.isGrouped) {
      if (message.alert) countAlerts();
      this.rest ??= setTimeout(() => this.#rest(), REFRESH_MS);
      return;
    }
    if (message.lagged || message.alert) this.next.within(1000);
    if (message.alert) countAlerts();
    for (const [run, change] of Object.entries(message.fleet ?? {})) {
      const node = grid()?.getRowNode(run);
      if (!node?.data) {
        if (change) this.next.within(1000);
        continue;
      }
      if (!change) {
        this.next.within(300);
        continue;
      }
      const { values, ...columns } = change;
      node.setData({ ...node.data, ...columns, latest: { ...node.data.latest, ...values } });
      if (columns.state) this.next.within(1000);
    }
    if (message.fleet) this.rest ??= setTimeout(() => this.#rest(), REFRESH_MS); // what no message tells: verdicts, throughput, counts
  }

  #rest() {
    this.rest = null;
    this.next.within(0);
  }

  close() {
    this.closed = true;
    this.next.cancel();
    clearTimeout(this.rest);
    this.feed.close();
  }
}
