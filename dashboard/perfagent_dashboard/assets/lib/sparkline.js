// A line as small as a word.

const SVG = "http://www.w3.org/2000/svg";

/** A small line without axes; gaps stay gaps. The one that looks at it reads the shape, never a value. */
export function sparkline(values) {
  const [width, height] = [120, 28];
  const known = values.filter((value) => value != null);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("class", "spark");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("preserveAspectRatio", "none");
  if (known.length < 2) return svg;
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
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}
