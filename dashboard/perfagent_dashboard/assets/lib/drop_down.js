// A menu that opens under its head; one at a time.

import { el } from "./dom.js";

const OPEN_MENUS = ".chart-menu[open]";

/** fill(close): makes what is in the list, each time it is opened. */
export function dropDown(head, list, fill) {
  const menu = el("details", { class: "chart-menu" }, head, list);
  const close = () => (menu.open = false);
  menu.addEventListener("toggle", () => {
    if (!menu.open) return;
    for (const other of document.querySelectorAll(OPEN_MENUS)) if (other !== menu) other.open = false;
    fill(close);
  });
  menu.addEventListener("keydown", (event) => event.key === "Escape" && (close(), head.focus()));
  return menu;
}

document.addEventListener("pointerdown", (event) => {
  for (const menu of document.querySelectorAll(OPEN_MENUS)) if (!menu.contains(event.target)) menu.open = false;
});
