// Numbers as people read them.

import { words } from "./config.js";

const SPELLED = { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity };

/** A number of the API: absent stays null, "NaN" and "Infinity" are values. */
export const numberOf = (value) => (typeof value === "number" ? value : (SPELLED[value] ?? null));

const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

const minus = (text) => text.replace("-", "−");

/** Three significant digits with an SI prefix: 51.8k, 2.15, 0.0123, 3.00e−5; more just below 1. */
export function si(value) {
  if (value == null) return words.na;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "Inf" : "−Inf";
  const size = Math.abs(value);
  if (size >= 999.5) {
    const [unit, prefix] = PREFIXES.find(([one]) => size >= one * 0.9995) || PREFIXES[PREFIXES.length - 1];
    return size >= 1e18 ? minus(value.toExponential(2)) : minus((value / unit).toPrecision(3)) + prefix;
  }
  if (size === 0) return "0";
  if (size < 1e-3) return minus(value.toExponential(2));
  if (Number.isInteger(value)) return minus(String(value));
  let digits = 3;
  if (size < 1) while (digits < 7 && Math.abs(value.toPrecision(digits)) === 1) digits++; // an accuracy of 0.9999 is not yet 1
  return minus(value.toPrecision(digits));
}

/** 50,321 */
export const thousands = (value) => (value == null ? words.na : Math.round(value).toLocaleString("en-US"));

/** The same number, null where it is not finite. */
export const finiteOf = (value) => (Number.isFinite(value) ? value : null);
