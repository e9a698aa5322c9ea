// Ticks of a vertical axis.

import { si } from "../lib/numbers.js";

export function linearTicks([low, high]) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  const far = size < 1e-3 || size >= 1e15;
  // 1,000,000.2: such labels are longer than the margin, and cut off they would be other numbers. Making room for them costs
  // time at every drawing, so only here.
  const long = high - low < size / 1000;
  const exponentformat = far ? "e" : long && size < 1e7 ? "none" : "SI";
  return { type: "linear", tickmode: "auto", tickvals: undefined, ticktext: undefined, exponentformat, separatethousands: long, automargin: long || far };
}

/** low and high are powers of ten. Labels are written out: `2, 5, 10k` of plotly's own would be 2, 5 and 20,000. */
export function logTicks([low, high]) {
  const decades = Math.max(1, Math.ceil((high - low) / 5));
  const steps = high - low > 2.5 ? [1] : high - low > 0.9 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  const values = [];
  for (let power = Math.floor(low); power <= high; power += steps.length > 1 ? 1 : decades) {
    for (const step of steps) if (power + Math.log10(step) >= low && power + Math.log10(step) <= high) values.push(step * 10 ** power);
  }
  if (values.length < 2) for (const share of [0.1, 0.5, 0.9]) values.push(Number((10 ** (low + share * (high - low))).toPrecision(3)));
  return { type: "log", tickmode: "array", tickvals: values, ticktext: values.map(si), automargin: false };
}
