// Numbers, times and elements. Text from outside (names, messages, console lines) only ever becomes a text node.
(function () {
  "use strict";
  const pa = window.perfagent;
  const words = pa.config.words;

  // --- elements ------------------------------------------------------------------------------------------------------------

  /** A new element. Attributes by name, `class` included; on: {event: handler}; children are nodes or become text nodes. */
  pa.el = function (tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value == null || value === false) continue;
      if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    node.append(...children.flat().filter((child) => child != null && child !== false));
    return node;
  };

  /** Text with `names in backticks` as code. */
  pa.prose = (text) => text.split(/`([^`]+)`/).map((part, i) => (i % 2 ? pa.el("code", null, part) : part));

  /** Replaces what is in a node; what is absent is left out, as in pa.el. */
  pa.put = (node, ...children) => node.replaceChildren(...children.flat().filter((child) => child != null && child !== false));

  pa.fill = (text, values) => text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
  pa.say = (key, values) => pa.fill(words[key] ?? key, values || {});
  pa.link = (path, attributes, ...children) => pa.el("a", { href: path, "data-nav": path, ...attributes }, ...children);
  pa.runPath = (run) => "/run/" + encodeURIComponent(run);

  /** Sets the text only when it differs: an untouched node costs no layout. */
  pa.setText = function (node, text) {
    if (node.textContent !== text) node.textContent = text;
  };

  // --- numbers -------------------------------------------------------------------------------------------------------------

  const SPELLED = { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity };

  /** A number of the API: absent stays null, "NaN" and "Infinity" are values. */
  pa.num = function (value) {
    if (typeof value === "number") return value;
    return typeof value === "string" && value in SPELLED ? SPELLED[value] : null;
  };

  const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

  function plain(value) {
    if (value == null) return null;
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "Inf" : "−Inf";
    return undefined;
  }

  const minus = (text) => text.replace("-", "−");

  /** Three significant digits with an SI prefix: 51.8k, 2.15, 0.0123, 3.00e−5; more just below 1. */
  pa.si = function (value) {
    const special = plain(value);
    if (special !== undefined) return special ?? words.na;
    const size = Math.abs(value);
    if (size >= 999.5) {
      const [unit, prefix] = PREFIXES.find(([one]) => size >= one * 0.9995) || PREFIXES[PREFIXES.length - 1];
      return size >= 1e18 ? minus(value.toExponential(2)) : minus((value / unit).toPrecision(3)) + prefix;
    }
    if (size === 0) return "0";
    if (size < 1e-3) return minus(value.toExponential(2));
    if (Number.isInteger(value)) return minus(String(value));
    let digits = 3;
    while (size < 1 && digits < 7 && Math.abs(value.toPrecision(digits)) === 1) digits++; // an accuracy of 0.9999 is not yet 1
    return minus(value.toPrecision(digits));
  };

  /** 50,321 */
  pa.count = (value) => (value == null ? words.na : Math.round(value).toLocaleString("en-US"));

  // [divisor, unit, from which size on]: a tenth of a gibibyte is still told as such.
  const SHORT = { "tokens/s": "tok/s", "samples/s": "samples/s", tensors: "" };
  const SCALES = {
    s: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
    B: [[2 ** 30, "GiB", 2 ** 30 / 10], [2 ** 20, "MiB", 2 ** 20 / 10], [2 ** 10, "KiB"], [1, "B"]],
    "B/s": [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]],
  };

  /** How a metric's values are shown: divided by `by` and followed by `unit`. size: a typical value, in the base unit. */
  pa.scale = function (metric, size) {
    if (metric.name === "mfu") return { by: 0.01, unit: "%" };
    const steps = SCALES[metric.unit];
    if (!steps) return { by: 1, unit: SHORT[metric.unit] ?? metric.unit };
    const none = metric.unit === "B/s" ? steps.length - 1 : 0; // nothing flows: not "0 GB/s"
    const [by, unit] = size ? steps.find(([one, , from]) => Math.abs(size) >= (from ?? one)) || steps[steps.length - 1] : steps[none];
    return { by, unit };
  };

  /** [number, unit] of one value. */
  pa.show = function (metric, value) {
    if (value == null) return [words.na, ""];
    const scale = pa.scale(metric, value);
    return [pa.si(value / scale.by), scale.unit];
  };

  // Scripts name their losses as they like. The rule is perfagent.wire's (loss_names.py), and its words come with the page.
  const WHOLE = new Set(pa.config.losses.whole);
  const OTHER = new Set([...pa.config.losses.evaluated, ...pa.config.losses.about]);
  const WORD = /[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+/g;
  const kinds = new Map();

  function kindOf(name) {
    if (name === "loss") return "whole";
    if (name.startsWith("logged/")) return ""; // a copy, by another logger of the script
    if (!name.toLowerCase().includes("loss") || Object.hasOwn(pa.config.metrics, name)) return "";
    if (pa.config.families.includes(name.split("/")[0] + "/")) return "";
    const unglued = (word) => (word.endsWith("loss") && word !== "loss" ? [word.slice(0, -4), "loss"] : [word]);
    const parts = (name.match(WORD) ?? []).flatMap((word) => unglued(word.toLowerCase()));
    const rest = parts.filter((word) => word !== "loss" && word !== "losses");
    if (rest.length === parts.length || rest.some((word) => OTHER.has(word))) return "";
    return rest.every((word) => WHOLE.has(word)) ? "whole" : "part";
  }

  /** What a series is by its name: "whole", the loss that is trained on; a "part" of it; or "". */
  pa.lossKind = function (name) {
    if (!kinds.has(name)) kinds.set(name, kindOf(name));
    return kinds.get(name);
  };

  /** The name of a run's loss among the names of its series; `loss` where there is none. */
  pa.lossOf = function (names) {
    const found = names.filter((name) => pa.lossKind(name) === "whole");
    return found.includes("loss") ? "loss" : (found.sort()[0] ?? "loss");
  };

  pa.metric = function (name) {
    const own = name.startsWith("node_gpu") ? name.replace(/^node_gpu\d+\//, "gpu/") : name;
    const row = pa.config.metrics[own];
    if (!row) return { name, title: name, unit: "", meaning: "", over: "mean", known: false };
    const title = own === name ? row.title : `${row.title} (${name.split("/")[0]})`;
    return { name, title, unit: row.unit, meaning: row.meaning, better: row.better, over: row.over, known: true };
  };

  // --- times ---------------------------------------------------------------------------------------------------------------

  const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const full = new Intl.DateTimeFormat("en-GB", {
    day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short",
  });
  const short = new Intl.DateTimeFormat("en-GB", {
    day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", timeZoneName: "short",
  });

  /** Unix seconds of an RFC 3339 text or of a number; null when there is none. */
  pa.unix = function (time) {
    if (time == null) return null;
    if (typeof time === "number") return time;
    const parsed = Date.parse(time);
    return Number.isNaN(parsed) ? null : parsed / 1000;
  };
  pa.clock = (unix) => clock.format(new Date(unix * 1000));
  pa.fullTime = (unix) => full.format(new Date(unix * 1000));
  pa.shortTime = (unix) => short.format(new Date(unix * 1000));

  pa.duration = function (seconds) {
    const s = Math.max(0, seconds);
    if (s < 60) return `${Math.floor(s)} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  };

  /** "3 s ago", rounded to what a reader needs; the absolute time is for the title. */
  pa.ago = function (unix) {
    const s = Date.now() / 1000 - unix;
    if (s < 2) return words.just_now;
    const rough = s < 60 ? `${Math.floor(s)} s` : s < 3600 ? `${Math.floor(s / 60)} min` : s < 86400 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
    return pa.fill(words.ago, { duration: rough });
  };

  pa.timeNode = function (unix, text) {
    return pa.el("time", { datetime: new Date(unix * 1000).toISOString(), title: pa.fullTime(unix) }, text ?? pa.shortTime(unix));
  };

  // --- small parts -----------------------------------------------------------------------------------------------------------

  pa.stateBadge = function (state) {
    const known = state in pa.config.shapes ? state : "starting";
    return pa.el(
      "span",
      { class: `state ${known}` },
      pa.el("i", { "aria-hidden": "true" }, pa.config.shapes[known]),
      words[`state_${known}`],
    );
  };

  const SHAPES = { critical: "▲", warning: "▲", info: "●", healthy: "✓" };
  // Healthy is what was judged; before anything came there is nothing to be glad of.
  pa.tone = (finding) => (finding.rule === "healthy" ? (finding.evidence?.step ? "healthy" : "info") : finding.severity in SHAPES ? finding.severity : "info");
  pa.severityMark = (tone) => pa.el("span", { class: `severity ${tone}`, title: words[`severity_${tone}`] }, SHAPES[tone]);

  const SVG = "http://www.w3.org/2000/svg";

  /** A small line without axes; gaps stay gaps. The one that looks at it reads the shape, never a value. */
  pa.sparkline = function (values) {
    const [width, height] = [120, 28];
    const known = values.filter((value) => value != null);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("class", "spark");
    svg.setAttribute("aria-hidden", "true");
    svg.setAttribute("preserveAspectRatio", "none");
    if (known.length < 2) return svg;
    const low = Math.min(...known);
    const span = Math.max(...known) - low || 1;
    let path = "";
    let pen = "M";
    values.forEach((value, i) => {
      if (value == null) {
        pen = "M";
        return;
      }
      const x = (2 + (i / (values.length - 1)) * (width - 4)).toFixed(1);
      path += `${pen}${x} ${(height - 3 - ((value - low) / span) * (height - 6)).toFixed(1)}`;
      pen = "L";
    });
    const line = document.createElementNS(SVG, "path");
    line.setAttribute("d", path);
    svg.append(line);
    return svg;
  };

  pa.copyButton = function (text) {
    const button = pa.el("button", { type: "button", class: "button small" }, words.copy);
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text());
        button.textContent = words.copied;
        setTimeout(() => (button.textContent = words.copy), 1600);
      } catch {
        const range = document.createRange();
        range.selectNodeContents(button.parentElement.querySelector("code"));
        const selection = getSelection();
        selection.removeAllRanges();
        selection.addRange(range);
      }
    });
    return button;
  };

  // --- requests --------------------------------------------------------------------------------------------------------------

  pa.Problem = class extends Error {
    constructor(status, message) {
      super(message);
      this.status = status;
    }
  };

  /** JSON of an API path; throws pa.Problem with the server's sentence. */
  pa.api = async function (path, options) {
    let response;
    try {
      response = await fetch("/api/v1" + path, { credentials: "same-origin", ...options });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new pa.Problem(0, error.message);
    }
    let body = null;
    try {
      body = await response.json();
    } catch {
      // Not JSON: a proxy's page. The status says enough.
    }
    if (response.ok) return body;
    throw new pa.Problem(response.status, body?.error?.message ?? `${response.status} ${response.statusText}`);
  };

  // --- figures of a window of steps --------------------------------------------------------------------------------------------

  /** Of which steps the server's figures are, in words: newest 100 steps, whole run. */
  pa.windowOf = function (timing) {
    if (!timing?.window) return "";
    return timing.window.whole_run ? words.window_whole : pa.say("window_newest", { count: pa.count(timing.window.steps) });
  };

  /** [name, median] of the throughput that a run is read by: tokens a second, else samples a second. */
  pa.throughputOf = function (timing) {
    const name = timing?.rates?.tokens_per_s ? "tokens_per_s" : "samples_per_s";
    return [name, pa.num(timing?.rates?.[name]?.p50)];
  };

  // --- rules ---------------------------------------------------------------------------------------------------------------------

  let asked = null;

  /** Rule -> the series on whose charts its alert is marked, best first: what the server's rules say of themselves. Read once. */
  pa.marks = function () {
    asked ??= pa.api("/rules").then(({ rules }) => Object.fromEntries(rules.map(({ rule, charts }) => [rule, charts])));
    asked.catch(() => (asked = null)); // the next page asks again
    return asked;
  };

  /** What stands in the place of a page that cannot be shown. */
  pa.notice = function (title, text, ...more) {
    return pa.el("section", { class: "notice" }, pa.el("h1", null, title), pa.el("p", null, text), ...more);
  };
  pa.problemNotice = function (problem) {
    const locked = problem.status === 401 || problem.status === 403;
    const again = pa.el("button", { type: "button", class: "button", on: { click: () => location.reload() } }, words.retry);
    return pa.notice(
      locked ? words.locked_title : words.failed_title,
      locked ? words.locked : pa.say("failed", { message: problem.message }),
      again,
    );
  };
})();
