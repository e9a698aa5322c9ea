// The run page: verdict, figures, charts and what lies below them, of one run.
(function () {
  "use strict";
  const pa = window.perfagent;
  const { words } = pa.config;
  const ENDED = new Set(["finished", "failed", "oom", "killed", "preempted"]);
  const CRASHED = new Set(["failed", "killed", "oom"]); // a rule says why, a moment after the state is known
  const CONSOLE_EVENTS = 60;
  const CONSOLE_LINES = 400;
  const IN_A_COLUMN = 38; // characters of a setting with its name; a longer one has a line of its own
  const A_LIST = 30; // settings that stand in one line, rather than in a row each
  const MUTE_S = 3600;
  const ASK_AGAIN_MS = 3000; // for what no message tells: figures of the newest steps, and a healthy verdict's sentence
  const FIGURES = ["loss", "grad/norm", "tokens_per_s", "samples_per_s", "step_time_s", "phase/data_s", "process/rss_bytes", "host/cpu_pct",
    "gpu/utilization_pct", "gpu/memory_used_bytes"];

  // --- evidence in words -------------------------------------------------------------------------------------------------------

  const SUFFIXES = [["_per_s", null, " / s"], ["_s", "s"], ["_pct", null, " %"], ["_bytes", "B"], ["_gib", null, " GiB"], ["_w", null, " W"], ["_c", null, " °C"]];

  const HISTORY = new Set(["last_losses", "grad_norms"]); // oldest first: what led to the trouble stands at the end
  const LISTED = 8;
  const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

  /** [label, value] of one entry of a finding's evidence. */
  function evidence(key, value) {
    if (pa.config.metrics[key]) {
      const [number, unit] = pa.show(pa.metric(key), pa.num(value));
      if (pa.num(value) != null) return [pa.metric(key).title, `${number} ${unit}`.trim()];
    }
    const [suffix, unit, text] = SUFFIXES.find(([end]) => key.endsWith(end)) ?? ["", null, ""];
    const label = key.slice(0, key.length - suffix.length).replaceAll("_", " ").replaceAll("/", " ");
    if (HISTORY.has(key) && value.length > LISTED) return [capital(label), `… ${spoken(value.slice(-LISTED), unit, text)}`];
    return [capital(label), spoken(value, unit, text)];
  }

  function spoken(value, unit, text) {
    const number = pa.num(value);
    if (number != null) {
      if (unit) return pa.show({ name: "", unit }, number).join(" ");
      return (Number.isInteger(number) && Math.abs(number) < 1e7 ? pa.count(number) : pa.si(number)) + text;
    }
    if (Array.isArray(value)) return value.slice(0, LISTED).map((item) => spoken(item, unit, text)).join(", ") + (value.length > LISTED ? " …" : "");
    if (value && typeof value === "object") return Object.entries(value).slice(0, 6).map(([k, v]) => `${k.replaceAll("_", " ")} ${spoken(v, unit, text)}`).join(", ");
    return value == null ? words.na : String(value);
  }

  // What the sentence above says already, or the part below, and what is for programs.
  const SAID = new Set(["series", "step", "causes", "also", "traceback"]);

  /** [label, value] of what a verdict's evidence adds to its sentence. */
  function facts(verdict) {
    const said = (value) => typeof value === "string" && (value === "" || verdict.message.includes(value.trim()));
    return Object.entries(verdict.evidence ?? {})
      .filter(([name, value]) => !SAID.has(name) && !said(value) && (typeof value !== "object" || (Array.isArray(value) && value.length)))
      .map(([name, value]) => evidence(name, value));
  }

  /** [name, text] of what a run was started with; what stands inside another has the names of both: `optimizer.lr`. */
  function settings(config, within = "") {
    return Object.entries(config).flatMap(([key, value]) => {
      const name = within + key;
      const inner = value && typeof value === "object" ? Object.entries(value) : [];
      const plain = inner.every(([, one]) => one === null || typeof one !== "object");
      if (!inner.length) return [[name, typeof value === "string" ? value : JSON.stringify(value)]];
      if (Array.isArray(value)) return [[name, plain ? value.map(String).join(key === "command" ? " " : ", ") : JSON.stringify(value)]];
      if (plain && inner.length > A_LIST) return [[name, inner.map((pair) => pair.join(" ")).join(", ")]]; // packages
      return settings(value, `${name}.`);
    });
  }

  /** {data: 0.05, forward: ...} in the order of the catalogue, with titles; null when there is none. */
  function ofPhases(values) {
    const known = pa.config.phases.filter((phase) => pa.num(values?.[phase]) > 0);
    return known.length ? known.map((phase) => ({ phase, title: pa.metric(`phase/${phase}_s`).title, share: pa.num(values[phase]) })) : null;
  }

  /** The seconds of a step's phases as shares of it. */
  function sharesOf(seconds) {
    const parts = ofPhases(seconds);
    const sum = parts?.reduce((total, { share }) => total + share, 0);
    return parts?.map((part) => ({ ...part, share: part.share / sum }));
  }

  /** Where a step goes, as one bar with its legend. over: of which steps, in words. */
  function barOfStep(shares, over) {
    const paint = (phase) => {
      const node = pa.el("i", { "aria-hidden": "true" });
      node.style.background = `var(--phase-${phase})`;
      return node;
    };
    const segments = shares.map(({ phase, title, share }) => {
      const node = paint(phase);
      node.title = `${title} ${(100 * share).toFixed(1)} %`;
      node.style.flexGrow = String(share);
      return node;
    });
    const legend = shares.map(({ phase, title, share }) =>
      pa.el("span", { class: "share" }, paint(phase), title, pa.el("b", null, `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`)),
    );
    return pa.el("div", { class: "bar-of-step" }, pa.el("h3", null, over ? pa.say("where_over", { over }) : words.where), pa.el("div", { class: "segments" }, segments), pa.el("div", { class: "shares" }, legend));
  }

  /** How many steps a second; a minute, or an hour, where one takes so long. */
  function stepRate(seconds) {
    const [name, span] = seconds < 5 ? ["kpi_steps_per_s", 1] : seconds < 300 ? ["kpi_steps_per_min", 60] : ["kpi_steps_per_h", 3600];
    return pa.say(name, { value: pa.si(span / seconds) });
  }

  // --- the figures beside the verdict ------------------------------------------------------------------------------------------

  class Figures {
    constructor(page, host) {
      this.page = page;
      this.cells = {};
      const names = ["throughput", "step_time", "loss", "grad", "device", "memory", "data", "alerts"];
      pa.put(host,
        ...names.map((name) => {
          const label = pa.el("span", { class: "label" }, "");
          const value = pa.el("span", { class: "value" }); // no <output>: it would be read aloud at every sample
          const more = pa.el("span", { class: "more" });
          const trend = pa.el("span", { class: "trend" });
          const node = pa.el("div", { class: "figure card", "data-figure": name }, label, value, more, trend);
          this.cells[name] = { node, label, value, more, trend, key: "" };
          return node;
        }),
      );
      this.show();
    }

    #put(name, label, number, unit, more, tone) {
      const cell = this.cells[name];
      const key = [label, number, unit, more, tone].join("|");
      if (cell.key === key) return;
      cell.key = key;
      pa.setText(cell.label, label);
      pa.put(cell.value, number, ...(unit ? [" ", pa.el("small", null, unit)] : []));
      pa.setText(cell.more, more ?? "");
      cell.node.className = `figure card ${number === words.na ? "absent" : ""} ${tone ?? ""}`;
    }

    /** What the chart of a name holds of the whole run, as a small line; drawn at most once a second. */
    #trend(cell, name) {
      if (this.page.board.range) return; // the number beside it is of the whole run, and so is the line
      const now = performance.now();
      const held = this.cells[cell];
      if (now - (held.drawn ?? -1e9) < 1000) return;
      const mean = this.page.board.charts.get(name)?.data.mean ?? [];
      if (mean.length < 2) return;
      held.drawn = now;
      const stride = Math.ceil(mean.length / 120);
      pa.put(held.trend, pa.sparkline(mean.filter((_, i) => i % stride === 0 || i === mean.length - 1)));
    }

    /** What a figure says of a series' finite extreme over the whole run. While a part of it is shown, what was known before. */
    #extreme(name, column, key) {
      this.extremes ??= {};
      const data = this.page.board.charts.get(name)?.data;
      if (data && !this.page.board.range) this.extremes[name] = this.#extremeOf(name, data, column);
      const best = this.extremes[name];
      if (!best) return "";
      return pa.say(best.exact ? key : `${key}_near`, { value: pa.si(best.value), step: best.exact ? pa.count(best.step) : pa.si(best.step) });
    }

    /** {value, step, exact}; null where there is none. With ranks it is of their mean, the quantity of the number beside it. */
    #extremeOf(name, data, column) {
      const { ranks } = this.page;
      const better = column === "min" ? (a, b) => a < b : (a, b) => a > b;
      let at = -1;
      const values = ranks > 1 ? data.mean : data[column];
      values.forEach((value, i) => {
        if (value != null && (at < 0 || better(value, values[at]))) at = i;
      });
      if (at < 0) return null;
      const best = { value: values[at], step: data.step[at], exact: data.count[at] <= ranks };
      if (best.exact || ranks > 1) return best;
      return this.#placed(name, column, best, data.step[at + 1] - 1);
    }

    /** A bucket is named by its first step: it is asked for once as single steps, to tell at which one the extreme is. */
    #placed(name, column, best, end) {
      this.places ??= {};
      const key = JSON.stringify([name, column, best.step, best.value]);
      const known = this.places[name];
      if (known?.key === key) return known.best;
      const place = (this.places[name] = { key, best });
      const query = new URLSearchParams({ name, from: String(best.step), points: "1000" });
      query.set("to", String(Number.isFinite(end) ? end : this.page.board.lastStep));
      pa.api(`${this.page.path}/series?${query}`).then((body) => {
        const at = body[column].findIndex((value, i) => body.count[i] === 1 && pa.num(value) === best.value);
        if (at < 0) return;
        place.best = { ...best, step: body.step[at], exact: true };
        this.page.showFigures();
      }).catch(() => {}); // "near" is true as well
      return place.best;
    }

    show() {
      const at = (name) => this.page.values.get(name) ?? null;
      const text = (name, value) => pa.show(pa.metric(name), value);
      const bad = (value) => (Number.isNaN(value) || Math.abs(value) === Infinity ? "critical" : "");

      const { ranks } = this.page;
      const { timing } = this.page;
      const over = pa.windowOf(timing);
      const [rate, throughput] = pa.throughputOf(timing);
      const time = pa.num(timing?.series.step_time_s?.p50);
      this.#put("throughput", words.kpi_throughput, ...text(rate, throughput), time > 0 ? pa.say("kpi_over", { value: stepRate(time), over }) : over);

      this.#put("step_time", words.kpi_step_time, ...text("step_time_s", time), time != null ? pa.say("kpi_median", { over }) : "");
      const lossName = pa.lossOf([...this.page.values.keys()].filter((name) => at(name) != null));
      const loss = at(lossName);
      this.#put("loss", words.kpi_loss, pa.si(loss), "", this.#extreme(lossName, "min", "kpi_lowest"), bad(loss));

      const grad = at("grad/norm");
      this.#put("grad", words.kpi_grad, pa.si(grad), "", this.#extreme("grad/norm", "max", "kpi_highest"), bad(grad));

      if (at("gpu/utilization_pct") != null || at("host/cpu_pct") == null) {
        const power = at("gpu/power_w");
        const more = at("gpu/utilization_pct") == null ? words.kpi_no_gpu : power != null ? pa.say("kpi_power", { value: pa.si(power) }) : "";
        this.#put("device", words.kpi_gpu, ...text("gpu/utilization_pct", at("gpu/utilization_pct")), more);
      } else {
        const own = at("process/cpu_pct");
        this.#put("device", words.kpi_cpu, ...text("host/cpu_pct", at("host/cpu_pct")), own != null ? pa.say(ranks > 1 ? "kpi_processes_cpu" : "kpi_process_cpu", { value: pa.si(own), count: ranks }) : words.kpi_no_gpu);
      }

      const used = at("gpu/memory_used_bytes") ?? at("cuda/allocated_bytes");
      if (used != null) {
        const total = at("gpu/memory_total_bytes");
        this.#put("memory", words.kpi_gpu_memory, ...text("gpu/memory_used_bytes", used), total ? pa.say("kpi_of", { total: pa.show(pa.metric("gpu/memory_total_bytes"), total).join(" ") }) : "");
      } else {
        const host = at("host/memory_used_bytes");
        const total = at("host/memory_total_bytes");
        const parts = [
          ranks > 1 && at("process/rss_bytes") != null ? pa.say("kpi_processes", { count: ranks }) : null,
          host != null && total ? pa.say("kpi_host_memory", { used: pa.si(host / 2 ** 30), total: text("host/memory_total_bytes", total).join(" ") }) : null,
        ];
        this.#put("memory", words.kpi_memory, ...text("process/rss_bytes", at("process/rss_bytes")), parts.filter(Boolean).join(", "));
      }

      const wait = pa.num(timing?.shares.data);
      if (wait != null) {
        this.#put("data", words.kpi_data, pa.si(100 * wait), "%", pa.say("kpi_share", { over }), this.page.isFoundOn("phase/data_s") ? "warning" : "");
      } else this.#put("data", words.kpi_data, words.na, "", time != null ? words.kpi_no_loader : "");

      const charted = {
        throughput: rate, step_time: "step_time_s", loss: lossName, grad: "grad/norm", data: "phase/data_s",
        device: at("gpu/utilization_pct") != null ? "gpu/utilization_pct" : "host/cpu_pct",
        memory: at("gpu/memory_used_bytes") != null ? "gpu/memory_used_bytes" : "process/rss_bytes",
      };
      for (const [cell, name] of Object.entries(charted)) this.#trend(cell, name);

      const open = this.page.alerts.filter((alert) => alert.state === "firing");
      const critical = open.filter((alert) => alert.severity === "critical").length;
      const more = !open.length ? words.kpi_none : critical ? pa.say("kpi_critical", { count: critical }) : pa.say("kpi_warning", { count: open.length });
      this.#put("alerts", words.kpi_alerts, String(open.length), "", more, critical ? "critical" : open.length ? "warning" : "");
    }
  }

  // --- the page --------------------------------------------------------------------------------------------------------------------

  class RunPage {
    constructor(root) {
      this.root = root;
      this.run = root.dataset.run;
      this.values = new Map();
      this.alerts = [];
      this.mayAct = false;
      this.heardRuns = 0; // messages so far that told of the run itself
      this.heardAlerts = 0;
      this.heardNames = new Set(); // since the latest values were asked for
      this.part = (name) => root.querySelector(`#run-${name}`);
      document.title = `${this.run} · ${pa.config.title}`;
      pa.put(this.part("verdict"), pa.el("p", { class: "quiet" }, words.loading));
      this.start();
    }

    get path() {
      return `/runs/${encodeURIComponent(this.run)}`;
    }

    /** How many processes report: those the run was started with, or, where only its script reports, those that did. */
    get ranks() {
      return Math.max(this.summary?.world_size || 1, this.ranksSeen ?? 1);
    }

    async start() {
      let summary;
      try {
        summary = await pa.api(this.path);
      } catch (problem) {
        if (this.closed) return;
        if (problem.status === 404) this.#unknown();
        else this.#instead(pa.problemNotice(problem));
        return;
      }
      if (this.closed) return;
      this.run = summary.run;
      this.board = new pa.Board({
        run: this.run,
        host: this.part("charts"),
        onChange: () => this.showFigures(),
        onRange: () => this.#rangeChanged(),
      });
      this.#readAddress();
      this.figures = new Figures(this, this.part("figures"));
      this.showSummary(summary);
      this.#tools();
      this.#below();
      this.feed = new pa.Feed({
        subscription: () => ({ runs: [this.run], names: [], bands: true }),
        fetch: () => this.refresh(),
        onMessage: (message) => this.#message(message),
        onState: (state, since) => pa.showFeed(state, since),
      });
      this.clock = setInterval(() => this.#tick(), 1000);
      this.keys = (event) => this.#key(event);
      document.addEventListener("keydown", this.keys);
      this.loadMarks();
      await this.loadSession();
    }

    /** On which charts alerts stand. Without the answer they stand on the loss, or on the step time. */
    async loadMarks() {
      try {
        this.board.setMarks(await pa.marks());
      } catch {
        return;
      }
      this.showFigures();
    }

    /** There is no such run, or no longer. */
    #unknown() {
      this.close();
      const all = pa.link("/", { class: "button" }, words.to_fleet);
      this.#instead(pa.notice(pa.say("no_run_title", { run: this.run }), words.no_run, all));
    }

    #instead(notice) {
      pa.put(this.root, notice);
      pa.showFeed("paused");
      pa.put(document.getElementById("feed"));
    }

    /** Nothing tells that a run was deleted: who looks closer into it finds out. */
    async #look() {
      try {
        await pa.api(this.path);
      } catch (problem) {
        if (problem.status === 404 && !this.closed) this.#unknown();
      }
    }

    /** Everything that is on screen, at its level of detail: at the start and after a gap. */
    async refresh() {
      const heard = this.heardRuns;
      const turn = (this.turn = (this.turn ?? 0) + 1);
      try {
        const summary = await pa.api(this.path);
        if (this.closed) return;
        if (turn !== this.turn) return; // asked anew meanwhile
        if (heard === this.heardRuns) this.showSummary(summary); // else a message that came meanwhile is newer
      } catch (problem) {
        if (this.closed) return;
        if (problem.status === 404) return this.#unknown();
        if (turn > 1) return; // the feed tells that the server is away
      }
      this.board.reload();
      if (ENDED.has(this.summary.state)) this.loadEnding();
      if (this.console?.open) this.loadConsole();
      await Promise.all([this.loadNames(), this.loadLatest(), this.loadVerdict(), this.loadAlerts()]);
      return undefined;
    }

    async loadNames() {
      try {
        const { names } = await pa.api(`${this.path}/names`);
        if (this.closed) return;
        this.board.addNames(names);
        this.#added();
        // The figures at the top draw these, also while their charts are below the fold.
        for (const name of [...FIGURES, pa.lossOf([...names])]) this.board.charts.get(name)?.fetch();
      } catch (problem) {
        pa.put(this.part("note"), pa.el("p", { class: "hint" }, pa.say("chart_failed", { message: problem.message })));
        return;
      }
      this.#charted();
    }

    #charted() {
      const note = this.part("note");
      const hidden = this.board.hiddenNames.length;
      if (!this.board.charts.size) pa.put(note, pa.el("p", { class: "hint" }, words.no_charts));
      else pa.put(note, ...(hidden ? [pa.el("p", { class: "hint" }, pa.say("too_many", { count: hidden }))] : []));
      if (this.ranks > 1 && this.board.charts.has("step_time_s")) this.board.addRanks();
      this.#groups();
    }

    async loadLatest() {
      const heard = (this.heardNames = new Set());
      try {
        const latest = await pa.api(`${this.path}/latest`);
        for (const [name, sample] of Object.entries(latest)) {
          if (heard.has(name)) continue;
          this.values.set(name, pa.num(sample.value));
        }
        this.#tellCharts();
        this.#countRanks(latest);
      } catch {
        return;
      }
      this.showFigures();
    }

    /** After the board was given names. */
    #added() {
      this.#tellCharts();
      for (const { group, title } of this.board.charts.values()) {
        if (group === "logged" && !title.firstElementChild) pa.put(title, pa.el("bdi", { dir: "ltr" }, title.textContent)); // its head is cut
      }
    }

    /** One newest value of a name on the whole page, whichever came first: the value or its chart. */
    #tellCharts() {
      for (const [name, chart] of this.board.charts) {
        if (!this.values.has(name)) continue;
        chart.latest = this.values.get(name);
        this.board.want(chart, "value");
      }
    }

    /** A run that only its script reports says nowhere how many processes it has. */
    async #countRanks(latest) {
      const several = Object.keys(latest).find((name) => latest[name].rank === "all");
      if (!several || this.summary.world_size > 1) return;
      try {
        const { ranks } = await pa.api(`${this.path}/ranks?${new URLSearchParams({ name: several, points: "1" })}`);
        this.ranksSeen = ranks.length;
      } catch {
        return; // asked again with the next values
      }
      if (this.closed) return;
      this.showSummary(this.summary);
      this.#charted();
      this.showFigures();
      if (this.console?.open) this.loadConsole();
    }

    async loadSession() {
      try {
        this.mayAct = (await pa.api("/session")).may.includes("operate"); // what the API asks of who acknowledges
      } catch {
        this.mayAct = false;
      }
      if (this.mayAct) {
        this.showVerdict();
        this.showAlerts();
      }
    }

    /** Step time, throughput and shares of the one window that tiles, bar and verdict speak of. */
    async loadTiming() {
      const turn = (this.timingsAsked = (this.timingsAsked ?? 0) + 1);
      let timing;
      try {
        timing = await pa.api(`${this.path}/timing`);
      } catch {
        return; // the feed tells that the server is away
      }
      if (turn < (this.timingShown ?? 0) || this.closed) return; // an answer that was overtaken
      this.timingShown = turn;
      this.timing = timing;
      this.#showShares();
      this.showFigures();
    }

    async loadVerdict() {
      this.loadTiming();
      const asked = (this.verdictsAsked = (this.verdictsAsked ?? 0) + 1);
      try {
        const [verdict, findings] = await Promise.all([pa.api(`${this.path}/verdict`), pa.api(`${this.path}/findings`).catch(() => ({}))]);
        if (asked < (this.verdictShown ?? 0)) return; // an answer that was overtaken: the run may have ended since
        this.verdictShown = asked;
        this.verdict = verdict;
        this.findings = findings.findings ?? (Array.isArray(findings) ? findings : []);
      } catch (problem) {
        if (problem.status === 0 || problem.status >= 500) this.#askAgain();
        return;
      }
      if (this.verdict.rule === "healthy" && CRASHED.has(this.summary?.state)) this.#askAgain();
      else this.verdictTries = 0;
      this.showVerdict();
    }

    /** Nothing may come any more that would have the verdict asked for, when a run has ended. */
    #askAgain() {
      this.verdictTries = (this.verdictTries ?? 0) + 1;
      this.#later("verdict", Math.min(2000 * this.verdictTries, 30000), () => this.loadVerdict());
    }

    async loadAlerts() {
      const heard = this.heardAlerts;
      try {
        const body = await pa.api(`${this.path}/alerts`);
        if (heard !== this.heardAlerts) return this.loadAlerts();
        this.alerts = body.alerts ?? [];
      } catch {
        return;
      }
      this.showAlerts();
      this.showVerdict();
    }

    // --- messages --------------------------------------------------------------------------------------------------------------

    #message(message) {
      if (message.lagged) this.refresh();
      if (message.run?.run === this.run) {
        const { state, attempts } = this.summary;
        this.heardRuns++;
        this.showSummary(message.run);
        if (message.run.attempts !== attempts) this.refresh(); // a resumed run: what was drawn may be cut
        else if (message.run.state !== state) {
          this.#later("verdict", 300, () => this.loadVerdict());
          this.#later("alerts", 300, () => this.loadAlerts());
          this.#later("ending", 300, () => this.loadEnding());
        }
        if (this.console?.open) this.#later("console", 1500, () => this.loadConsole());
      }
      if (message.alert?.run === this.run) {
        this.heardAlerts++;
        const others = this.alerts.filter((alert) => alert.id !== message.alert.id);
        this.alerts = [message.alert, ...others];
        this.showAlerts();
        this.#later("verdict", 200, () => this.loadVerdict());
      }
      if (!message.bands) return;
      const fresh = [];
      for (const band of message.bands) {
        const end = band.step.length - 1;
        if (band.run !== this.run || end < 0) continue;
        this.values.set(band.name, pa.num(band.mean[end]));
        this.heardNames.add(band.name);
        if (this.board.charts.has(band.name)) this.board.append(band);
        else fresh.push(band.name);
      }
      if (fresh.length && this.board.addNames(fresh)) {
        this.#added();
        this.#charted();
      }
      this.#later("again", ASK_AGAIN_MS, () => (!this.verdict || this.verdict.rule === "healthy" ? this.loadVerdict() : this.loadTiming()));
      this.showFigures();
    }

    /** Runs once, `ms` after the first call; calls in between are the same call. */
    #later(name, ms, action) {
      this.timers ??= {};
      this.timers[name] ??= setTimeout(() => {
        delete this.timers[name];
        if (!this.closed) action();
      }, ms);
    }

    showFigures() {
      this.#later("figures", 150, () => this.figures.show());
    }

    // --- head --------------------------------------------------------------------------------------------------------------------

    showSummary(summary) {
      const first = !this.summary;
      this.summary = summary;
      this.board.world = this.ranks;
      this.board.started = pa.unix(summary.started);
      this.board.saw(summary.step);
      const started = pa.unix(summary.started);
      const ended = pa.unix(summary.ended);
      document.title = `${summary.name || summary.run} · ${pa.config.title}`;
      const key = JSON.stringify([summary.name, summary.state, summary.project, this.ranks, summary.attempts, summary.tags, summary.host, summary.ended]);
      if (key !== this.headKey) {
        this.headKey = key;
        this.age = pa.el("span", null);
        this.stepNode = pa.el("b", null);
        const facts = [
          pa.el("span", null, `${words.step} `, this.stepNode),
          started ? pa.el("span", { title: pa.fullTime(started) }, pa.say("started", { time: pa.shortTime(started) })) : null,
          this.age,
          this.ranks > 1 ? pa.el("span", null, pa.say("ranks", { count: this.ranks })) : null,
          summary.attempts > 1 ? pa.el("span", null, pa.say("attempts", { count: summary.attempts })) : null,
          summary.host ? pa.el("span", { title: words.host }, summary.host) : null,
          ...(summary.tags ?? []).slice(0, 8).map((tag) => pa.el("span", { class: "tag" }, tag)),
        ];
        pa.put(this.part("head"),
          pa.stateBadge(summary.state),
          pa.el("h1", { title: summary.run }, summary.name || summary.run),
          pa.el("div", { class: "facts" }, facts),
        );
        const crumb = document.getElementById("crumb");
        pa.put(crumb, pa.link(`/?project=${encodeURIComponent(summary.project)}`, null, summary.project));
      }
      pa.setText(this.stepNode, pa.count(summary.step));
      const heard = summary.state === "lost" ? pa.unix(summary.updated) : null;
      if (heard) pa.setText(this.age, pa.say("last_heard", { ago: pa.ago(heard) }));
      else if (started) {
        const spent = pa.duration((ended ?? Date.now() / 1000) - started);
        pa.setText(this.age, pa.say(ended ? "took" : summary.state === "starting" ? "starting_for" : "running_for", { duration: spent }));
      }
      if (first || ENDED.has(summary.state)) this.showEnding();
    }

    #tick() {
      if (!ENDED.has(this.summary.state) && !document.hidden) this.showSummary(this.summary);
    }

    // --- verdict -----------------------------------------------------------------------------------------------------------------

    /** Whether a rule whose alerts stand on the chart of this series speaks now: in the verdict, beside it, or as an alert. */
    isFoundOn(name) {
      const open = this.alerts.filter((alert) => alert.state === "firing");
      return [this.verdict, ...(this.findings ?? []), ...open].some((one) => this.board.marks[one?.rule]?.[0] === name);
    }

    /** Read aloud when the verdict becomes another one, not when a number in its sentence moves. */
    #announce(verdict) {
      const key = `${verdict.rule} ${verdict.severity}`;
      if (this.announced === key) return;
      this.announced = key;
      this.part("announced").textContent = `${words[`severity_${pa.tone(verdict)}`]}: ${verdict.message}`;
    }

    /** Builds what is in a host anew. Who stood on one of its buttons stands on that button again, or on its successor. */
    #rebuild(host, build) {
      const button = host.contains(document.activeElement) ? document.activeElement.closest("[data-action]") : null;
      const place = (node) => node?.closest("[data-alert]")?.dataset.alert;
      const [action, alert] = [button?.dataset.action, place(button)];
      build();
      if (!button) return;
      const left = [...host.querySelectorAll("[data-action]")].filter((one) => place(one) === alert);
      const next = left.find((one) => one.dataset.action === action) ?? left[0] ?? (alert ? host.querySelector(`[data-alert="${CSS.escape(alert)}"]`) : null) ?? host;
      if (!next.matches("button")) next.tabIndex = -1;
      next.focus({ preventScroll: true });
    }

    showVerdict() {
      const host = this.part("verdict");
      const verdict = this.verdict;
      if (!verdict) return;
      const tone = pa.tone(verdict);
      const key = JSON.stringify([verdict, this.findings, this.mayAct, this.alerts.map((a) => [a.id, a.state, a.acknowledged, a.muted_until])]);
      if (key === this.verdictKey) return;
      this.verdictKey = key;
      this.#announce(verdict);
      this.showFigures(); // one of them has the colour of a finding
      host.className = `verdict card ${tone}`;
      const since = pa.unix(verdict.since);
      const when =
        verdict.since_step != null && since
          ? pa.say("since_both", { step: pa.count(verdict.since_step), time: pa.shortTime(since) })
          : verdict.since_step != null
            ? pa.say("since_step", { step: pa.count(verdict.since_step) })
            : since
              ? pa.say("since", { time: pa.shortTime(since) })
              : null;
      const ranks = verdict.ranks?.length && this.ranks > 1 ? pa.say("on_ranks", { ranks: verdict.ranks.slice(0, 8).join(", ") + (verdict.ranks.length > 8 ? " …" : "") }) : null;
      const parts = sharesOf(verdict.evidence?.phases_s);
      const counted = pa.num(verdict.evidence?.steps);
      const found = facts(verdict);
      const others = (this.findings ?? []).filter((finding) => finding.rule !== verdict.rule && finding.rule !== "healthy").slice(0, 3);
      const steps = (verdict.fix ?? "").split(/\n+/).filter(Boolean);
      const alert = this.alerts.find((one) => one.rule === verdict.rule && one.state === "firing");
      const past = this.alerts.filter((one) => one.state === "resolved" && one.resolved).slice(0, 2);
      this.#rebuild(host, () => pa.put(host,
        pa.el("header", null, pa.severityMark(tone), pa.el("h2", null, verdict.message)),
        when || ranks ? pa.el("p", { class: "when", title: since ? pa.fullTime(since) : null }, [when, ranks].filter(Boolean).join(" · ")) : null,
        found.length
          ? pa.el("dl", { class: "evidence", "aria-label": words.evidence }, found.slice(0, 8).map(([label, value]) => pa.el("div", null, pa.el("dt", null, label), pa.el("dd", null, value))))
          : null,
        steps.length
          ? pa.el("div", { class: "fix" }, pa.el("h3", null, words.fix), steps.length > 1 ? pa.el("ol", null, steps.map((step) => pa.el("li", null, pa.prose(step.replace(/^\d+[.)]\s*/, ""))))) : pa.el("p", null, pa.prose(steps[0])))
          : null,
        verdict.gain_pct ? pa.el("p", { class: "gain" }, pa.say("gain", { gain: verdict.gain_pct >= 10 ? Math.round(verdict.gain_pct) : pa.si(verdict.gain_pct) })) : null,
        others.length ? this.#lines(words.also, others, () => "") : null,
        tone === "healthy" && past.length
          ? this.#lines(words.earlier, past, (one) => ` · ${pa.say("resolved", { time: pa.shortTime(pa.unix(one.resolved)) })}`)
          : null,
        this.summary.host || tone === "critical" ? null : pa.el("p", { class: "quiet" }, pa.prose(words.no_agent)),
        parts ? barOfStep(parts, counted ? pa.say("window_newest", { count: pa.count(counted) }) : "") : null,
        alert ? this.#actions(alert) : null,
        tone === "healthy" ? this.sharesNode : null,
      ));
    }

    #lines(title, findings, more) {
      return pa.el(
        "div",
        { class: "also" },
        pa.el("h3", null, title),
        findings.map((finding) => pa.el("p", null, pa.severityMark(pa.tone(finding)), ` ${finding.message}${more(finding)}`)),
      );
    }

    /** A healthy run has nothing to explain: it says where its steps go. */
    #showShares() {
      const shares = ofPhases(this.timing.phase_shares);
      if (!shares) return;
      const bar = barOfStep(shares, pa.windowOf(this.timing));
      if (this.sharesNode?.isConnected) this.sharesNode.replaceWith(bar);
      else if (this.part("verdict").classList.contains("healthy")) this.part("verdict").append(bar);
      this.sharesNode = bar;
    }

    #actions(alert) {
      const muted = pa.unix(alert.muted_until);
      const acknowledged = pa.unix(alert.acknowledged);
      const parts = [];
      if (acknowledged) parts.push(pa.el("span", { class: "done", title: pa.fullTime(acknowledged) }, pa.say("acknowledged", { time: pa.shortTime(acknowledged) })));
      if (muted && muted > Date.now() / 1000) parts.push(pa.el("span", { class: "done", title: pa.fullTime(muted) }, pa.say("muted", { time: pa.shortTime(muted) })));
      if (this.mayAct && !acknowledged) parts.push(this.#action(alert, "ack", words.acknowledge));
      if (this.mayAct && !(muted && muted > Date.now() / 1000)) parts.push(this.#action(alert, "mute", words.mute, `?for_s=${MUTE_S}`));
      return parts.length ? pa.el("div", { class: "actions" }, parts) : null;
    }

    #action(alert, verb, label, query) {
      const button = pa.el("button", { type: "button", class: "button", "data-action": verb }, label);
      button.addEventListener("click", async () => {
        if (button.getAttribute("aria-disabled")) return;
        button.setAttribute("aria-disabled", "true"); // not disabled: that would take the keyboard's focus from it
        try {
          await pa.api(`/alerts/${encodeURIComponent(alert.id)}/${verb}${query ?? ""}`, { method: "POST" });
          await this.loadAlerts();
        } catch (problem) {
          button.removeAttribute("aria-disabled");
          button.title = problem.message;
          button.classList.add("failed");
        }
      });
      return button;
    }

    // --- tool bar ----------------------------------------------------------------------------------------------------------------

    #readAddress() {
      const query = new URLSearchParams(location.search);
      const x = query.get("x") ?? "";
      const between = /^(\d+)-(\d+)$/.exec(x);
      const last = /^last(\d+)$/.exec(x);
      if (between) this.board.range = [Number(between[1]), Math.max(Number(between[1]) + 1, Number(between[2]))];
      else if (last) this.board.range = { last: Math.max(2, Number(last[1])) };
      if (["relative", "clock"].includes(query.get("axis"))) this.board.mode = query.get("axis");
      this.board.log = query.get("log") === "1";
      this.board.clip = query.get("clip") === "1";
      this.board.smoothing = Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0));
    }

    #writeAddress() {
      if (!pa.arrived()) return; // the address is already that of another page, which has not come yet
      const { range, mode, log, clip, smoothing } = this.board;
      const url = new URL(location);
      const set = (name, value) => (value ? url.searchParams.set(name, value) : url.searchParams.delete(name));
      set("x", !range ? "" : Array.isArray(range) ? `${range[0]}-${range[1]}` : `last${range.last}`);
      set("axis", mode === "step" ? "" : mode);
      set("log", log ? "1" : "");
      set("clip", clip ? "1" : "");
      set("smooth", smoothing ? String(smoothing) : "");
      if (url.href !== location.href) history.replaceState(null, "", url);
    }

    #rangeChanged() {
      this.#writeAddress();
      this.#showRange();
      this.#later("look", 500, () => this.#look());
    }

    #tools() {
      const board = this.board;
      const press = (buttons, on) => buttons.forEach((button) => button.setAttribute("aria-pressed", String(on(button))));
      const segment = (label, entries, isOn, choose) => {
        const buttons = entries.map(([value, text]) =>
          pa.el("button", { type: "button", "data-value": value, "aria-pressed": String(isOn(value)) }, text),
        );
        const group = pa.el("div", { class: "segment", role: "group", "aria-label": label }, buttons);
        buttons.forEach((button) =>
          button.addEventListener("click", () => {
            choose(button.dataset.value);
            press(buttons, (one) => isOn(one.dataset.value));
          }),
        );
        return group;
      };

      const shown = pa.el("output", null, board.smoothing.toFixed(2));
      const slider = pa.el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: board.smoothing, id: "smoothing", "aria-label": words.smoothing });
      slider.addEventListener("input", () => {
        board.smoothing = Number(slider.value);
        pa.setText(shown, board.smoothing.toFixed(2));
        board.redraw();
        this.#later("address", 300, () => this.#writeAddress());
      });

      const axis = segment(words.x_axis, [["step", words.x_step], ["relative", words.x_relative], ["clock", words.x_clock]], (value) => board.mode === value, (value) => {
        board.mode = value;
        board.redraw();
        this.#writeAddress();
      });
      const log = segment(words.log_y, [["log", words.log_y]], () => board.log, () => {
        board.log = !board.log;
        board.redraw();
        this.#writeAddress();
      });
      const isRange = (value) => (value === "all" ? !board.range : board.range?.last === Number(value));
      const clip = segment(words.clip, [["clip", words.clip]], () => board.clip, () => {
        board.clip = !board.clip;
        board.redraw();
        this.#writeAddress();
      });
      clip.title = words.clip_title;
      this.ranges = segment(words.range, [["all", words.range_all], ...[1000, 100].map((n) => [String(n), pa.say("range_last", { steps: pa.count(n) })])], isRange, (value) =>
        board.setRange(value === "all" ? null : { last: Number(value) }),
      );
      this.isRange = isRange;
      this.zoomed = pa.el("span", { class: "zoomed" });
      this.reset = pa.el("button", { type: "button", class: "button small", on: { click: () => board.setRange(null) } }, words.reset_zoom);
      this.groupHost = pa.el("div", { class: "segment groups", role: "group", "aria-label": words.filter });
      const filter = pa.el("input", { type: "search", placeholder: words.filter, "aria-label": words.filter });
      filter.addEventListener("input", () => {
        board.filter.text = filter.value.trim().toLowerCase();
        if (board.filter.text) board.reveal(board.filter.text);
        this.#added();
        board.applyFilter();
      });
      const legend = pa.el(
        "div",
        { class: "legend" },
        pa.el("span", null, pa.el("i", { class: "of-mean" }), words.legend_mean),
        pa.el("span", null, pa.el("i", { class: "of-band" }), words.legend_band),
        pa.el("span", null, pa.el("i", { class: "of-alert" }), words.legend_alert),
        pa.el("span", null, pa.el("i", { class: "of-nonfinite" }, "✕"), words.legend_nonfinite),
        pa.el("span", { class: "hint" }, words.legend_hint),
        this.zoomed,
        this.reset,
      );
      pa.put(this.part("tools"),
        pa.el("div", { class: "tool-row" }, axis, pa.el("div", { class: "pair" }, log, clip), pa.el("label", { class: "slider" }, words.smoothing, slider, shown), this.ranges, pa.el("span", { class: "spring" }), this.groupHost, filter),
        legend,
      );
      this.#showRange();
    }

    #showRange() {
      const range = this.board.range;
      const fixed = Array.isArray(range);
      this.zoomed.textContent = fixed ? pa.say("zoomed", { from: pa.count(range[0]), to: pa.count(range[1]) }) : "";
      this.reset.hidden = !fixed;
      this.zoomed.hidden = !fixed;
      for (const button of this.ranges.children) button.setAttribute("aria-pressed", String(this.isRange(button.dataset.value)));
    }

    #groups() {
      const order = ["training", "speed", "device", "host", "logged"];
      const present = this.board.groups();
      const key = [...present].sort().join();
      if (key === this.groupKey) return;
      this.groupKey = key;
      const choose = (value) => {
        this.board.filter.group = value;
        this.board.applyFilter();
        for (const button of this.groupHost.children) button.setAttribute("aria-pressed", String(button.dataset.value === value));
      };
      pa.put(this.groupHost,
        ...["all", ...order.filter((group) => present.has(group))].map((group) =>
          pa.el("button", { type: "button", "data-value": group, "aria-pressed": String(this.board.filter.group === group), on: { click: () => choose(group) } }, words[`group_${group}`]),
        ),
      );
    }

    /** + and − zoom, arrows move, 0 shows everything; never while somebody types. */
    #key(event) {
      if (event.target.closest("input, select, textarea") || event.metaKey || event.ctrlKey || event.altKey) return;
      const { board } = this;
      const [a, b] = board.window() ?? [board.firstStep, board.lastStep];
      const width = b - a;
      const move = {
        "+": [a + width / 4, b - width / 4], "=": [a + width / 4, b - width / 4], "-": [a - width / 2, b + width / 2],
        ArrowLeft: [a - width / 4, b - width / 4], ArrowRight: [a + width / 4, b + width / 4],
      }[event.key];
      if (event.key === "0" && board.range) board.setRange(null);
      else if (move && (board.range || event.key === "+" || event.key === "=")) {
        const [from, to] = [Math.max(board.firstStep, Math.round(move[0])), Math.min(board.lastStep, Math.round(move[1]))];
        if (to - from < 1) return;
        board.setRange(from <= board.firstStep && to >= board.lastStep ? null : [from, to]);
      } else return;
      event.preventDefault();
    }

    // --- below the charts ----------------------------------------------------------------------------------------------------------

    #below() {
      this.endingHost = pa.el("div");
      this.alertHost = pa.el("div", { class: "alerts" });
      this.consoleText = pa.el("pre", { class: "console", tabindex: "0" });
      this.console = pa.el("details", { class: "card" }, pa.el("summary", null, words.console), this.consoleText);
      this.console.addEventListener("toggle", () => this.console.open && this.loadConsole());
      this.configHost = pa.el("dl", { class: "config" });
      const configuration = pa.el("details", { class: "card" }, pa.el("summary", null, words.config), this.configHost);
      for (const [key, value] of [...settings(this.summary.config ?? {}), ...settings(this.summary.meta ?? {})]) {
        const long = key.length + value.length > IN_A_COLUMN;
        this.configHost.append(pa.el("div", long ? { class: "long" } : null, pa.el("dt", null, key), pa.el("dd", null, value)));
      }
      configuration.hidden = !this.configHost.childElementCount;
      pa.put(this.part("below"),
        this.endingHost,
        pa.el("section", { class: "card" }, pa.el("h2", null, words.alerts_title), this.alertHost),
        this.console,
        configuration,
      );
      this.showAlerts();
      this.showEnding();
      if (ENDED.has(this.summary.state)) this.loadEnding();
    }

    showAlerts() {
      this.board.setAlerts(this.alerts);
      this.showFigures();
      if (!this.alertHost) return;
      const order = { firing: 0, pending: 1, resolved: 2 };
      const sorted = [...this.alerts].sort((a, b) => order[a.state] - order[b.state] || (a.since < b.since ? 1 : -1));
      if (!sorted.length) {
        pa.put(this.alertHost, pa.el("p", { class: "quiet" }, words.alerts_none));
        return;
      }
      this.#rebuild(this.alertHost, () => pa.put(this.alertHost,
        ...sorted.slice(0, 50).map((alert) => {
          const since = pa.unix(alert.since);
          const resolved = pa.unix(alert.resolved);
          const state = alert.state === "resolved" ? pa.say("alert_resolved", { time: resolved ? pa.shortTime(resolved) : "" }) : words[`alert_${alert.state}`];
          return pa.el(
            "article",
            { class: `alert ${alert.state}`, "data-alert": alert.id },
            pa.severityMark(pa.tone(alert)),
            pa.el(
              "div",
              { class: "what" },
              pa.el("p", null, alert.message),
              pa.el(
                "p",
                { class: "quiet" },
                [alert.rule, state, alert.since_step != null ? `${words.step} ${pa.count(alert.since_step)}` : null].filter(Boolean).join(" · "),
                since ? " · " : "",
                since ? pa.timeNode(since) : null,
              ),
              alert.fix && alert.state !== "resolved" ? pa.el("p", { class: "quiet" }, pa.prose(alert.fix)) : null,
            ),
            alert.state === "firing" ? this.#actions(alert) : null,
          );
        }),
      ));
    }

    async loadConsole() {
      try {
        const { events } = await pa.api(`${this.path}/events?kind=log&limit=${CONSOLE_EVENTS}`);
        const lines = events.flatMap((event) => {
          const prefix = this.ranks > 1 ? `[${event.rank}] ` : "";
          return (event.data.lines ?? []).map((line) => prefix + line);
        });
        const text = lines.slice(-CONSOLE_LINES).join("\n") || words.console_none;
        if (this.consoleText.textContent === text) return;
        const atEnd = this.consoleText.scrollHeight - this.consoleText.scrollTop - this.consoleText.clientHeight < 24 || !this.consoleText.textContent;
        this.consoleText.textContent = text;
        if (atEnd) this.consoleText.scrollTop = this.consoleText.scrollHeight;
      } catch (problem) {
        this.consoleText.textContent ||= problem.message;
      }
    }

    async loadEnding() {
      try {
        const { events } = await pa.api(`${this.path}/events?kind=state&limit=50`);
        this.endings = events.filter((event) => event.data.exception || event.data.traceback || (event.data.reason && ENDED.has(event.data.state)));
      } catch {
        return;
      }
      this.showEnding();
    }

    showEnding() {
      if (!this.endingHost) return;
      const { state, reason, ended } = this.summary;
      const told = (this.endings ?? []).find((event) => event.data.traceback) ?? (this.endings ?? [])[0];
      const key = JSON.stringify([state, reason, ended, told]);
      if (key === this.endingKey) return;
      this.endingKey = key;
      if (!ENDED.has(state) || (state === "finished" && !reason)) {
        pa.put(this.endingHost);
        return;
      }
      const when = pa.unix(ended);
      const exception = told?.data.exception;
      const name = typeof exception === "string" ? exception : exception ? `${exception.type ?? ""}: ${exception.message ?? ""}` : "";
      const headline = [told?.data.reason, reason].find((text) => typeof text === "string" && text.startsWith(name)) ?? name; // the reason has its message, too
      const traceback = Array.isArray(told?.data.traceback) ? told.data.traceback.join("") : told?.data.traceback;
      pa.put(this.endingHost,
        pa.el(
          "section",
          { class: "card ending" },
          pa.el("h2", null, words.ending),
          pa.el("p", null, pa.stateBadge(state), " ", headline),
          pa.el(
            "p",
            { class: "quiet" },
            [told && this.ranks > 1 ? pa.say("on_ranks", { ranks: told.rank }) : null, `${words.step} ${pa.count(this.summary.step)}`].filter(Boolean).join(" · "),
            when ? " · " : "",
            when ? pa.timeNode(when) : null,
          ),
          traceback ? pa.el("details", { open: true }, pa.el("summary", null, words.traceback), pa.el("pre", { class: "console", tabindex: "0" }, traceback)) : null,
        ),
      );
      const shown = this.endingHost.querySelector("pre");
      if (shown) shown.scrollTop = shown.scrollHeight; // what was raised stands last
    }

    close() {
      this.closed = true;
      this.feed?.close();
      this.board?.close();
      clearInterval(this.clock);
      for (const timer of Object.values(this.timers ?? {})) clearTimeout(timer);
      if (this.keys) document.removeEventListener("keydown", this.keys);
    }
  }

  pa.pages = pa.pages || {};
  pa.pages.run = (root) => new RunPage(root);
})();
