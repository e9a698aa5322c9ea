// A picture as large as the window, until a click or Escape.

import { el } from "./dom.js";

export function enlarge(button) {
  const { src, alt: name } = button.querySelector("img");
  const alt = name || button.textContent;
  const on = { click: () => dialog.close(), close: () => dialog.remove() };
  const dialog = el("dialog", { class: "enlarged-picture", "aria-label": alt, on }, el("img", { src, alt }), el("p", {}, alt));
  document.body.append(dialog);
  dialog.showModal();
}
