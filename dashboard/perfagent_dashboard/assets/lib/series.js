// Series of runs. What is asked for in one moment, over the same steps of one run, comes in one answer.

import { api } from "./api.js";

const ONE_MOMENT_MS = 15;
const MOST = 8; // a few of a million steps each take the server a second
const asked = new Map(); // address without names -> [[name, resolve, reject], ...]

/** The buckets of a series: columns step, time, min, max, mean, count, nonfinite. query: name, points; rank, from and to where they are wanted. */
export function seriesOf(run, { name, ...query }) {
  const path = `/runs/${encodeURIComponent(run)}/series?${new URLSearchParams(query)}`;
  if (!name) return api(path); // of an expression
  return new Promise((resolve, reject) => {
    if (!asked.has(path)) {
      asked.set(path, []);
      setTimeout(() => fetchTogether(path), ONE_MOMENT_MS);
    }
    const waiting = asked.get(path);
    waiting.push([name, resolve, reject]);
    if (waiting.length === MOST) fetchTogether(path);
  });
}

async function fetchTogether(path) {
  const waiting = asked.get(path) ?? [];
  asked.delete(path);
  if (!waiting.length) return;
  const names = [...new Set(waiting.map(([name]) => name))];
  try {
    const body = await api(path + names.map((name) => `&name=${encodeURIComponent(name)}`).join(""));
    for (const [name, resolve] of waiting) resolve(names.length > 1 ? body.series[name] : body);
  } catch (error) {
    for (const [, , reject] of waiting) reject(error);
  }
}
