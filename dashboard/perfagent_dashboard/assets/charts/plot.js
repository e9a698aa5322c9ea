// What every plot of ours has in common.

export const DIMMED = "0.25";
const OPTIONS = { displayModeBar: false, doubleClick: false, scrollZoom: false, showAxisDragHandles: false, showTips: false };
const coarse = window.matchMedia("(pointer: coarse)");

/** Draws a figure over the steps that the board shows. Dragging shows fewer steps in all charts of the board; not by touch, unless
 * the chart is enlarged: a finger scrolls the page. */
export function drawPlot({ board, plot, frame, card }, data, layout) {
  const dragmode = !coarse.matches || card.classList.contains("enlarged") ? "zoom" : false;
  Object.assign(layout, { width: frame.clientWidth, height: frame.clientHeight, dragmode });
  board.axis.describe(layout.xaxis);
  const first = !plot.classList.contains("js-plotly-plot");
  window.Plotly.react(plot, data, layout, OPTIONS);
  if (!first) return;
  plot.on("plotly_relayout", (change) => {
    if ("xaxis.range[0]" in change) board.zoomTo(change["xaxis.range[0]"], change["xaxis.range[1]"]);
  });
  plot.on("plotly_doubleclick", () => board.setRange(null));
  plot.on("plotly_clickannotation", ({ annotation }) => {
    const notes = annotation.name === "note" && board.host.parentElement.querySelector(".chart-notes");
    if (notes) Object.assign(notes, { open: true }).scrollIntoView({ block: "center" });
    else document.querySelector('.run-tabs [data-value="alerts"]')?.click();
  });
}
