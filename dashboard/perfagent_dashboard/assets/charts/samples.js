// The samples of a chart as columns: step, time, min, max, mean, count, bad (how many are not finite).


export const empty = () => ({ step: [], time: [], min: [], max: [], mean: [], count: [], bad: [] });

/** Position of the last element that is <= value, -1 when all are greater. */
export function lastAtOrBefore(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Samples [from, to) as one: mean, min, max, and how many are not finite. */
export function together(data, from, to) {
  const one = { min: null, max: null, mean: null, bad: 0 };
  let [sum, known] = [0, 0];
  for (let i = from; i < to; i++) {
    one.bad += data.bad[i];
    if (data.mean[i] == null) continue;
    const weight = Math.max(1, data.count[i] - data.bad[i]);
    sum += data.mean[i] * weight;
    known += weight;
    one.min = Math.min(one.min ?? Infinity, data.min[i] ?? Infinity);
    one.max = Math.max(one.max ?? -Infinity, data.max[i] ?? -Infinity);
  }
  if (known) one.mean = to - from === 1 ? data.mean[from] : sum / known;
  return one;
}

/** The same with one row a step: the host is looked at by the clock, many times in a long step. */
export function byStep(data) {
  const { step } = data;
  if (!step.some((one, i) => i > 0 && one === step[i - 1])) return data;
  const rows = empty();
  for (let from = 0, to; from < step.length; from = to) {
    for (to = from + 1; step[to] === step[from]; ) to++;
    rows.step.push(step[from]);
    for (const [name, value] of Object.entries(together(data, from, to))) rows[name].push(value);
  }
  return rows;
}

/** The edge of the band: along low and back along high, again for every stretch without a gap. A line from one stretch to
 * the next would enclose values that never were; a stretch without width has no band. */
export function bandOf(x, low, high) {
  const [xs, ys] = [[], []];
  for (let from = 0, to; from < x.length; from = to + 1) {
    let wide = false;
    for (to = from; to < x.length && low[to] != null && high[to] != null; to++) wide ||= low[to] < high[to];
    if (!wide) continue;
    xs.push(...x.slice(from, to), ...x.slice(from, to).toReversed(), null);
    ys.push(...low.slice(from, to), ...high.slice(from, to).toReversed(), null);
  }
  return [xs, ys];
}
