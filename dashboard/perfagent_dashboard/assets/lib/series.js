// Series of runs. What is asked for in one moment, over the same steps, comes in one answer.

import { api } from "./api.js";

const ONE_MOMENT_MS = 15;
const [MOST_NAMES, MOST_SERIES] = [8, 60]; // a few of a million steps each take the server a second
const asked = new Map(); // query without runs and names -> [{run, name, resolve, reject}, ...]

/** The buckets of a series: columns step, time, min, max, mean, count, nonfinite. query: name, points; rank, from and to where they are wanted. */
export function seriesOf(run, { name, ...query }) {
  const over = String(new URLSearchParams(query));
  if (!name) return api(`/runs/${encodeURIComponent(run)}/series?${over}`); // of an expression
  return new Promise((resolve, reject) => {
    const one = { run, name, resolve, reject };
    const [runs, names] = distinct([...(asked.get(over) ?? []), one]);
    if (names.length > MOST_NAMES || runs.length * names.length > MOST_SERIES) fetchTogether(over);
    if (!asked.has(over)) {
      asked.set(over, []);
      setTimeout(() => fetchTogether(over), ONE_MOMENT_MS);
    }
    asked.get(over).push(one);
  });
}

const distinct = (waiting) => ["run", "name"].map((key) => [...new Set(waiting.map((one) => one[key]))]);

async function fetchTogether(over) {
  const waiting = asked.get(over) ?? [];
  asked.delete(over);
  if (!waiting.length) return;
  const [runs, names] = distinct(waiting);
  const named = names.map((name) => `&name=${encodeURIComponent(name)}`).join("");
  const path = runs.length > 1 ? `/series?${over}${runs.map((run) => `&run=${encodeURIComponent(run)}`).join("")}` : `/runs/${encodeURIComponent(runs[0])}/series?${over}`;
  try {
    const body = await api(path + named);
    const found = (run, name) => (runs.length > 1 ? body.runs[run]?.[name] : names.length > 1 ? body.series[name] : body);
    for (const { run, name, resolve } of waiting) resolve(found(run, name));
  } catch (error) {
    for (const { reject } of waiting) reject(error);
  }
}
