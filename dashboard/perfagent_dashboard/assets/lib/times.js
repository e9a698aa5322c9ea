// Times in the reader's zone, and how long something takes.

import { say, words } from "./config.js";

const language = document.documentElement.lang.startsWith("zh") ? "zh-CN" : "en-GB";
const clock = new Intl.DateTimeFormat(language, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const full = new Intl.DateTimeFormat(language, {
  day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short",
});
const short = new Intl.DateTimeFormat(language, {
  day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", timeZoneName: "short",
});

/** Unix seconds of an RFC 3339 text or of a number; null when there is none. */
export function unixOf(time) {
  if (time == null) return null;
  if (typeof time === "number") return time;
  const parsed = Date.parse(time);
  return Number.isNaN(parsed) ? null : parsed / 1000;
}
export const clockTime = (unix) => clock.format(new Date(unix * 1000));
export const fullTime = (unix) => full.format(new Date(unix * 1000));
export const shortTime = (unix) => short.format(new Date(unix * 1000));

const unit = (count, name) => `${count} ${words[`unit_${name}`]}`;

export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s > 0 && s < 1) return unit(Math.max(0.1, Math.floor(10 * s) / 10), "s");
  if (s < 60) return unit(Math.floor(s), "s");
  if (s < 3600) return `${unit(Math.floor(s / 60), "min")} ${unit(Math.floor(s % 60), "s")}`;
  if (s < 86400) return `${unit(Math.floor(s / 3600), "h")} ${unit(Math.floor((s % 3600) / 60), "min")}`;
  return `${unit(Math.floor(s / 86400), "d")} ${unit(Math.floor((s % 86400) / 3600), "h")}`;
}

/** "3 s ago", rounded to what a reader needs; the absolute time is for the title. */
export function ago(unix) {
  const s = Date.now() / 1000 - unix;
  if (s < 2) return words.just_now;
  const [size, name] = s < 60 ? [1, "s"] : s < 3600 ? [60, "min"] : s < 86400 ? [3600, "h"] : [86400, "d"];
  return say("ago", { duration: unit(Math.floor(s / size), name) });
}
