// The fleet page: one line a run. The list is fetched once; states, values and alerts then arrive over the WebSocket.
(function () {
  "use strict";
  const pa = window.perfagent;
  const { words, shapes } = pa.config;
  const PAGE = 100;
  const SEARCHED = 1000; // runs a request while a text is looked for, which the server does not know
  const TYPING_MS = 250;
  const TREND_POINTS = 60;
  const TOGETHER_MS = 50;
  const NAMES = ["loss", "tokens_per_s", "samples_per_s", "gpu/utilization_pct"];
  const MOST_LOSSES = 100; // names of them that are heard
  const ASK_AGAIN_S = 10;
  const MOVING = new Set(["starting", "running", "stuck"]);

  class Row {
    constructor(page, summary) {
      this.page = page;
      this.values = {};
      this.trend = [];
      this.verdict = null;
      this.lossName = "loss"; // until the run's own is known
      const cell = (name, kind) => (this[name] = pa.el("td", { class: `${kind} of-${name}`, "data-label": words[`column_${name}`] ?? "" }));
      this.node = pa.el(
        "tr",
        { "data-run": summary.run },
        cell("state", ""),
        cell("run", ""),
        cell("verdictCell", "of-verdict"),
        cell("step", "number"),
        cell("throughput", "number"),
        cell("loss", "number"),
        cell("trendCell", "of-trend"),
        cell("gpu", "number"),
        cell("seen", "number"),
      );
      this.node.row = this;
      this.node.addEventListener("click", (event) => {
        if (!event.target.closest("a") && !getSelection().toString()) pa.go(pa.runPath(this.summary.run));
      });
      this.show(summary);
      this.showValues();
    }

    show(summary) {
      const before = this.summary;
      this.summary = summary;
      if (before?.state !== summary.state) pa.put(this.state, pa.stateBadge(summary.state));
      if (!before || before.name !== summary.name || before.project !== summary.project || before.world_size !== summary.world_size) this.showName();
      pa.setText(this.step, pa.count(summary.step));
      this.showSeen();
    }

    /** alike: another run has this name, so that it takes the id to know them apart. */
    showName(alike = this.alike) {
      const { summary } = this;
      this.alike = alike;
      const facts = [summary.project, summary.world_size > 1 ? pa.say("ranks", { count: summary.world_size }) : null, summary.host, alike ? summary.run : null];
      pa.put(this.run,
        pa.link(pa.runPath(summary.run), { class: "name" }, summary.name || summary.run),
        pa.el("small", { title: summary.run }, facts.filter(Boolean).join(" · ")),
      );
    }

    showSeen() {
      const unix = pa.unix(this.summary.updated);
      if (unix == null) return;
      const text = pa.ago(unix);
      if (this.seen.textContent !== text) pa.put(this.seen, pa.timeNode(unix, text));
    }

    showValues() {
      const put = (cell, name, value = this.values[name]) => {
        const [number, unit] = value == null ? [words.na, ""] : pa.show(pa.metric(name), value);
        cell.classList.toggle("absent", value == null);
        cell.classList.toggle("bad", value != null && !Number.isFinite(value));
        if (cell.dataset.text === number + unit) return;
        cell.dataset.text = number + unit;
        pa.put(cell, number, ...(unit ? [pa.el("small", null, ` ${unit}`)] : []));
      };
      put(this.loss, this.lossName);
      put(this.gpu, "gpu/utilization_pct");
      put(this.throughput, ...pa.throughputOf(this.timing));
      this.throughput.title = this.timing ? pa.say("kpi_median", { over: pa.windowOf(this.timing) }) : "";
    }

    showVerdict() {
      if (!this.verdict) return;
      const tone = pa.tone(this.verdict);
      pa.put(this.verdictCell, pa.severityMark(tone), pa.el("span", { class: "line", title: this.verdict.message }, this.verdict.message));
    }

    showTrend() {
      pa.put(this.trendCell, pa.sparkline(this.trend));
    }

    /** What the list does not carry; fetched when the row comes into view. */
    async fill() {
      if (this.filled) return;
      this.filled = true;
      this.asked = performance.now();
      const heard = this.page.heard;
      const turn = (this.turn = {});
      const path = `/runs/${encodeURIComponent(this.summary.run)}`;
      this.page.askTiming(this);
      const latestAndTrend = async () => {
        const latest = await pa.api(`${path}/latest`);
        if (this.turn !== turn) throw new Error("asked again meanwhile");
        this.lossName = pa.lossOf(Object.keys(latest));
        this.heard = heard.has(this.lossName);
        this.page.follow(this.lossName);
        for (const name of [...NAMES, this.lossName]) if (latest[name]) this.values[name] = pa.num(latest[name].value);
        this.showValues();
        return pa.api(`${path}/series?name=${encodeURIComponent(this.lossName)}&points=${TREND_POINTS}`);
      };
      const [series, verdict] = await Promise.allSettled([latestAndTrend(), pa.api(`${path}/verdict`)]);
      if (verdict.reason?.status === 404) return this.page.drop(this);
      if (verdict.status === "fulfilled") {
        this.verdict = verdict.value;
        this.showVerdict();
      }
      if (series.status === "fulfilled") {
        this.trend = series.value.mean.map((value) => pa.num(value)).map((value) => (Number.isFinite(value) ? value : null));
        this.showTrend();
      }
      return undefined;
    }

    async refreshVerdict() {
      this.page.askTiming(this);
      try {
        this.verdict = await pa.api(`/runs/${encodeURIComponent(this.summary.run)}/verdict`);
        this.showVerdict();
      } catch (problem) {
        if (problem.status === 404) this.page.drop(this); // deleted
        // Else the badge says that the server is away; the line stays as it was.
      }
    }

    /** What no message tells: throughput and the sentence of a healthy run that goes on, and the loss of one that had none yet. */
    askAgain() {
      const moved = this.told !== this.summary.updated && MOVING.has(this.summary.state);
      if (!moved || !this.filled || performance.now() - this.asked < 1000 * ASK_AGAIN_S) return;
      this.told = this.summary.updated;
      this.asked = performance.now();
      if (this.values[this.lossName] == null) {
        this.filled = false;
        this.fill();
      } else if (this.verdict?.rule === "healthy") this.refreshVerdict();
      else this.page.askTiming(this);
    }

    /** values: the last ones, by name, of those that have a new one. */
    append(values) {
      for (const [name, value] of Object.entries(values)) if (NAMES.includes(name) || name === this.lossName) this.values[name] = pa.num(value);
      this.dirty = true;
      if (!(this.lossName in values)) return;
      const loss = this.values[this.lossName];
      // The line keeps its length: what is new replaces neighbours' pairs once there are twice as many points.
      this.trend.push(Number.isFinite(loss) ? loss : null);
      while (this.trend.length > 2 * TREND_POINTS) this.trend = this.trend.filter((_, i, all) => i % 2 === 0 || i > all.length - 8);
    }
  }

  class Fleet {
    constructor() {
      this.rows = new Map();
      this.losses = new Set(); // by the names that scripts gave them
      this.sent = []; // names that the server was asked for, by message, and has not confirmed yet
      this.heard = new Set(); // those that it has: what comes from then on is not missed
      this.next = undefined; // cursor of the runs older than the list that is held; null: all are held; undefined: none was asked for
      this.found = null; // what the server was asked for beyond that list, with the filter
      this.asking = new Set(); // lines whose throughput is asked for at the next turn
      this.#readAddress();
      this.body = document.getElementById("fleet-rows");
      this.messages = 0; // that told of runs
      this.note = document.getElementById("fleet-note");
      pa.put(this.note, pa.el("p", { class: "quiet" }, words.loading));
      this.table = document.getElementById("fleet-table");
      this.table.hidden = true;
      document.title = pa.config.title;
      pa.put(document.getElementById("crumb"));
      this.#tools();
      this.observer = new IntersectionObserver(
        (entries) => {
          for (const entry of entries) {
            const row = entry.target.row;
            row.visible = entry.isIntersecting;
            if (row.visible) row.fill();
          }
        },
        { rootMargin: "200px" },
      );
      this.feed = new pa.Feed({
        subscription: () => {
          const names = [...NAMES, ...this.losses];
          this.sent.push(names);
          return { fleet: true, names };
        },
        fetch: () => this.load(),
        onMessage: (message) => this.#message(message),
        onState: (state, since) => {
          if (state !== "live") {
            this.sent = [];
            this.heard = new Set();
          }
          pa.showFeed(state, since);
        },
      });
      this.clock = setInterval(() => {
        for (const row of this.rows.values()) {
          if (!row.visible) continue;
          row.showSeen();
          if (!document.hidden) row.askAgain();
        }
      }, 1000);
    }

    #readAddress() {
      const query = new URLSearchParams(location.search);
      this.state = query.get("state") ?? "";
      this.projectName = query.get("project") ?? "";
      this.text = query.get("q") ?? "";
    }

    /** The address was changed by a link or the back button while this page stays. */
    readdress() {
      this.#readAddress();
      this.search.value = this.text;
      this.#showProjects();
      this.#refilter();
    }

    /** Hears a loss from now on that has a name of its own. */
    follow(name) {
      if (NAMES.includes(name) || this.losses.has(name) || this.losses.size >= MOST_LOSSES) return;
      this.losses.add(name);
      this.feed.resubscribe();
    }

    /** Asks for the throughput of a line, together with the others that ask meanwhile. */
    askTiming(row) {
      this.asking.add(row);
      this.timings ||= setTimeout(async () => {
        this.timings = 0;
        const rows = [...this.asking];
        this.asking.clear();
        for (let at = 0; at < rows.length; at += PAGE) await this.#takeTimings(rows.slice(at, at + PAGE));
      }, TOGETHER_MS);
    }

    async #takeTimings(rows) {
      const query = new URLSearchParams(rows.map((row) => ["run", row.summary.run]));
      let timing;
      try {
        ({ timing } = await pa.api(`/timing?${query}`));
      } catch {
        return; // the lines stay as they were
      }
      for (const row of rows) {
        row.timing = timing[row.summary.run] ?? row.timing;
        row.showValues();
      }
    }

    #tools() {
      this.search = pa.el("input", {
        type: "search", placeholder: words.search_hint, "aria-label": words.search, value: this.text, id: "fleet-text",
        on: {
          input: () => {
            this.text = this.search.value.trim();
            this.#refilter(TYPING_MS);
          },
        },
      });
      pa.put(document.getElementById("fleet-search"), this.search);
      this.projects = pa.el("select", {
        "aria-label": words.project,
        on: {
          change: () => {
            this.projectName = this.projects.value;
            this.#refilter();
          },
        },
      });
      pa.put(document.getElementById("fleet-project"), this.projects);
    }

    /** The newest runs of all kinds, or those after the cursor. What of them does not fit the filter is held and hidden. */
    async load(cursor) {
      const before = this.messages;
      const turn = cursor ? this.turn : (this.turn = (this.turn ?? 0) + 1);
      let page;
      try {
        page = await pa.api(`/runs?limit=${PAGE}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`);
      } catch (problem) {
        if (!this.rows.size) pa.put(this.note, pa.problemNotice(problem));
        return;
      }
      if (this.closed || turn !== this.turn) return; // asked anew meanwhile
      if (!cursor) this.#dropDeleted(page, before);
      for (const summary of page.runs) {
        const row = this.#takeUnlessNewer(summary, before);
        if (row.filled && !cursor) {
          row.filled = false;
          if (row.visible) row.fill();
        }
      }
      this.next = page.next;
      this.#find();
      this.#arrange();
    }

    /** Nothing tells of a run that was deleted while nobody listened: it is missing among its neighbours. */
    #dropDeleted(page, before) {
      const listed = new Set(page.runs.map((summary) => summary.run));
      const oldest = page.next === null ? "" : page.runs[page.runs.length - 1].started;
      for (const row of [...this.rows.values()]) {
        if (!listed.has(row.summary.run) && !(row.heardAt > before) && row.summary.started > oldest) this.#remove(row);
      }
    }

    #remove(row) {
      clearTimeout(row.timer);
      this.rows.delete(row.summary.run);
      this.observer.unobserve(row.node);
      row.node.remove();
    }

    /** Takes the line of a deleted run away. */
    drop(row) {
      if (this.closed || this.rows.get(row.summary.run) !== row) return;
      this.#remove(row);
      this.#arrange();
    }

    #filtered() {
      return Boolean(this.state || this.projectName || this.text);
    }

    /** After the filter has changed: what is held at once, and what is not held after `ms`. */
    #refilter(ms = 0) {
      this.found = this.next && this.#filtered() ? { busy: true } : null; // what was asked for with the former filter is forgotten
      this.#filter();
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.#find(), ms);
    }

    /** Where not all runs are held, the server picks by project and state, and the text is looked for here, page by page. */
    async #find(cursor) {
      if (this.closed) return;
      if (!this.next || !this.#filtered()) {
        this.found = null; // what is held is all, or all that is asked for
        return;
      }
      const found = (this.found = { busy: true, state: this.state, next: cursor });
      const before = this.messages;
      let fresh = 0;
      try {
        do {
          const query = new URLSearchParams({ limit: String(this.text ? SEARCHED : PAGE) });
          for (const [key, value] of [["project", this.projectName], ["state", this.state], ["cursor", found.next]]) if (value) query.set(key, value);
          const page = await pa.api(`/runs?${query}`);
          if (this.closed || this.found !== found) return; // another filter meanwhile
          const fits = page.runs.filter((summary) => this.#fits(summary));
          for (const summary of fits) this.#takeUnlessNewer(summary, before);
          fresh += fits.length;
          found.next = page.next;
        } while (found.next && fresh < PAGE);
      } catch (problem) {
        if (this.found === found) found.problem = problem;
      }
      if (this.closed || this.found !== found) return;
      found.busy = false;
      this.#arrange();
    }

    /** Whether every run of a state that fits project and text is held, so that a count of them is the count. */
    #isWhole(state) {
      if (this.next === null) return true;
      const { found } = this;
      return Boolean(found) && !found.busy && found.next === null && (!found.state || found.state === state);
    }

    #takeUnlessNewer(summary, before) {
      const known = this.rows.get(summary.run);
      return known?.heardAt > before ? known : this.#take(summary); // a message that came meanwhile is newer
    }

    #take(summary) {
      let row = this.rows.get(summary.run);
      if (row) row.show(summary);
      else {
        row = new Row(this, summary);
        this.rows.set(summary.run, row);
        this.observer.observe(row.node);
      }
      return row;
    }

    /** What was asked for before the server listened for it may be old by now, and nobody will tell. */
    #listens() {
      this.heard = new Set(this.sent.shift());
      for (const row of this.rows.values()) {
        if (!row.filled || row.heard || !this.heard.has(row.lossName)) continue;
        row.filled = false;
        if (row.visible) row.fill();
      }
    }

    #message(message) {
      if (message.subscribed) this.#listens();
      if (message.lagged) this.load();
      if (message.fleet) this.#hear(message.fleet);
      if (message.alert) {
        const row = this.rows.get(message.alert.run);
        if (row) {
          clearTimeout(row.timer);
          row.timer = setTimeout(() => row.refreshVerdict(), 300);
        }
      }
    }

    /** What has changed of the runs that moved; null for one that was deleted. */
    #hear(changes) {
      this.messages++;
      let isOther = false; // another list than before, or in another state
      for (const [run, change] of Object.entries(changes)) {
        const known = this.rows.get(run);
        if (change === null) {
          if (known) this.#remove(known);
          isOther ||= Boolean(known);
          continue;
        }
        const { values, ...fields } = change;
        if (!known && fields.started === undefined) continue; // a part of what a line shows
        const before = known?.summary.state;
        const row = this.#take({ ...known?.summary, run, ...fields });
        row.heardAt = this.messages;
        if (before !== row.summary.state) {
          isOther = true;
          if (known) row.refreshVerdict();
        }
        if (values) row.append(values);
      }
      if (isOther) this.#arrange();
      this.frame ||= requestAnimationFrame(() => {
        this.frame = 0;
        for (const row of this.rows.values()) {
          if (!row.dirty || !row.visible) continue;
          row.dirty = false;
          row.showValues();
          row.showTrend();
        }
      });
    }

    /** Newest first; a node that is in its place is not moved. */
    #arrange() {
      const ordered = [...this.rows.values()].sort((a, b) => (a.summary.started < b.summary.started ? 1 : a.summary.started > b.summary.started ? -1 : 0));
      ordered.forEach((row, i) => {
        if (this.body.children[i] !== row.node) this.body.insertBefore(row.node, this.body.children[i] ?? null);
      });
      this.#tellApart();
      this.#showProjects();
      this.#filter();
    }

    #tellApart() {
      const same = {};
      const name = (row) => JSON.stringify([row.summary.project, row.summary.name || row.summary.run]);
      for (const row of this.rows.values()) same[name(row)] = (same[name(row)] ?? 0) + 1;
      for (const row of this.rows.values()) if (Boolean(row.alike) !== same[name(row)] > 1) row.showName(same[name(row)] > 1);
    }

    #showProjects() {
      const held = [...this.rows.values()].map((row) => row.summary.project);
      const names = [...new Set(this.projectName ? [...held, this.projectName] : held)].sort();
      const key = JSON.stringify([names, this.projectName]);
      if (this.projectKey === key) return;
      this.projectKey = key;
      pa.put(this.projects,
        pa.el("option", { value: "" }, words.all_projects),
        ...names.map((name) => pa.el("option", { value: name, selected: name === this.projectName }, name)),
      );
    }

    /** Whether a run is of the chosen project and has the text in what it is called by. */
    #fits(summary) {
      if (this.projectName && summary.project !== this.projectName) return false;
      const label = [summary.name, summary.run, summary.project, summary.host, summary.group, ...(summary.tags ?? [])].join(" ").toLowerCase();
      return label.includes(this.text.toLowerCase());
    }

    #filter() {
      const counts = {};
      let shown = 0;
      for (const row of this.rows.values()) {
        const { summary } = row;
        const fits = this.#fits(summary);
        if (fits) counts[summary.state] = (counts[summary.state] ?? 0) + 1;
        row.node.hidden = !(fits && (!this.state || summary.state === this.state));
        if (!row.node.hidden) shown++;
      }
      this.#chips(counts);
      this.#note(shown);
      this.#writeAddress();
    }

    #writeAddress() {
      if (!pa.arrived()) return; // the address is already that of another page, which has not come yet
      const url = new URL(location);
      for (const [key, value] of [["state", this.state], ["project", this.projectName], ["q", this.text]]) {
        if (value) url.searchParams.set(key, value);
        else url.searchParams.delete(key);
      }
      if (url.href !== location.href) history.replaceState(null, "", url);
    }

    #chips(counts) {
      const all = Object.values(counts).reduce((sum, count) => sum + count, 0);
      const chip = (state, label, count) =>
        pa.el(
          "button",
          {
            type: "button", class: `chip ${state}`, "aria-pressed": String(this.state === state), "data-state": state,
            on: {
              click: () => {
                this.state = this.state === state ? "" : state;
                this.#refilter();
                document.querySelector(`#fleet-states [data-state="${state}"]`)?.focus();
              },
            },
          },
          state ? pa.el("i", { "aria-hidden": "true" }, shapes[state]) : null,
          label,
          count ? pa.el("b", null, count) : null,
        );
      // Of a state that no held run is in, others may be: it can be chosen, and has no number.
      const count = (state, held) => (this.#isWhole(state) ? String(held) : held ? `${held}+` : "");
      const states = Object.keys(shapes).filter((state) => counts[state] || state === this.state || !this.#isWhole(state));
      const key = JSON.stringify([counts, this.state, states, this.#isWhole(""), this.#isWhole(this.state)]);
      if (this.chipKey === key) return;
      this.chipKey = key;
      document
        .getElementById("fleet-states")
        .replaceChildren(chip("", words.all, count("", all)), ...states.map((state) => chip(state, words[`state_${state}`], count(state, counts[state] ?? 0))));
    }

    #note(shown) {
      if (!this.rows.size && this.next === undefined) return; // the list is on its way
      this.table.hidden = this.rows.size === 0;
      document.querySelector(".fleet-head").hidden = this.rows.size === 0;
      if (!this.rows.size) {
        if (!this.note.querySelector(".welcome")) pa.put(this.note, welcome());
        return;
      }
      const { busy, problem } = this.found ?? {};
      const nodes = [];
      if (busy) nodes.push(pa.el("p", { class: "hint", role: "status" }, words.searching));
      else if (problem) nodes.push(pa.el("p", { class: "hint" }, pa.say("search_failed", { message: problem.message })));
      else if (!shown) nodes.push(this.#nothing());
      const more = this.found ? this.found.next : this.next;
      const get = () => (this.found ? this.#find(more) : this.load(more));
      if (more && !busy) nodes.push(pa.el("button", { type: "button", class: "button", on: { click: get } }, words.more));
      pa.put(this.note, ...nodes);
    }

    #nothing() {
      const clear = () => {
        this.state = this.text = this.projectName = this.search.value = this.projects.value = "";
        this.#refilter();
      };
      return pa.el("p", { class: "hint" }, words.no_match, " ", pa.el("button", { type: "button", class: "button", on: { click: clear } }, words.clear));
    }

    close() {
      this.closed = true;
      this.feed.close();
      this.observer.disconnect();
      clearInterval(this.clock);
      clearTimeout(this.typing);
      clearTimeout(this.timings);
      cancelAnimationFrame(this.frame);
    }
  }

  function codeBlock(text) {
    const code = pa.el("code", null, text);
    return pa.el("div", { class: "code" }, pa.el("pre", null, code), pa.copyButton(() => text));
  }

  /** What a new user sees: the two ways to attach, ready to copy. */
  function welcome() {
    const server = pa.config.server.replace(/\/$/, "");
    const other = server === "http://127.0.0.1:8420" ? "" : `export PERFAGENT_SERVER=${server}\n`;
    const way = (title, text, code) =>
      pa.el("section", { class: "card way" }, pa.el("h2", null, title), pa.el("p", null, text), codeBlock(code));
    return pa.el(
      "div",
      { class: "welcome" },
      pa.el("h1", null, words.empty_title),
      pa.el("p", null, words.empty),
      pa.el(
        "div",
        { class: "ways" },
        way(words.way_run, words.way_run_text, `${other}perfagent run train.py`),
        way(words.way_attach, words.way_attach_text, `import perfagent\n\nperfagent.attach(model, optimizer${other ? `, server="${server}"` : ""})`),
      ),
      pa.el("p", { class: "hint" }, words.way_demo),
      codeBlock(`${other}perfagent demo`),
    );
  }

  pa.pages = pa.pages || {};
  pa.pages.fleet = () => new Fleet();
})();
