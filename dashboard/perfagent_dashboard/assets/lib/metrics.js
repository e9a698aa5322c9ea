// What a series is by its name: its title, its unit, and how its values are shown.

import { config, words } from "./config.js";
import { si } from "./numbers.js";

// [divisor, unit, from which size on]: a tenth of a gibibyte is still told as such.
const SHORT = { "tokens/s": "tok/s", "samples/s": "samples/s", tensors: "" };
const SCALES = {
  s: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
  B: [[2 ** 30, "GiB", 2 ** 30 / 10], [2 ** 20, "MiB", 2 ** 20 / 10], [2 ** 10, "KiB"], [1, "B"]],
  "B/s": [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]],
};

/** How a metric's values are shown: divided by `by` and followed by `unit`. size: a typical value, in the base unit. */
export function scaleOf(metric, size) {
  if (metric.name === "mfu") return { by: 0.01, unit: "%" };
  const steps = SCALES[metric.unit];
  if (!steps) return { by: 1, unit: SHORT[metric.unit] ?? metric.unit };
  const none = metric.unit === "B/s" ? steps.length - 1 : 0; // nothing flows: not "0 GB/s"
  const [by, unit] = size ? steps.find(([one, , from]) => Math.abs(size) >= (from ?? one)) || steps[steps.length - 1] : steps[none];
  return { by, unit };
}

/** [number, unit] of one value. */
export function valueAndUnit(metric, value) {
  if (value == null) return [words.na, ""];
  const scale = scaleOf(metric, value);
  return [si(value / scale.by), scale.unit];
}

export function metricOf(name) {
  const own = name.replace(/^node_gpu\d+\//, "gpu/");
  const row = config.metrics[own];
  if (!row) return { name, title: name, unit: "", meaning: "", known: false };
  return { name, unit: "", known: true, ...row, title: own === name ? row.title : `${row.title} (${name.split("/")[0]})` };
}
