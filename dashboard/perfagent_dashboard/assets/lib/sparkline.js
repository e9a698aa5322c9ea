// A line as small as a word.

import { svg } from "./dom.js";

/** A small line without axes; gaps stay gaps. The one that looks at it reads the shape, never a value. */
export function sparkline(values) {
  const [width, height] = [120, 28];
  const known = values.filter((value) => value != null);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", "aria-hidden": "true", preserveAspectRatio: "none" });
  if (known.length < 2) return picture;
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
  picture.append(svg("path", { d: path }));
  return picture;
}
