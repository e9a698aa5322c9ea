// A small form over the page.

import { words } from "./config.js";
import { el, setText } from "./dom.js";

/** save(): may take its time; what it throws is said in the form, which stays. */
export function formDialog(title, fields, save) {
  const trouble = el("p", { class: "trouble", role: "alert" });
  const done = el("button", { class: "button filled" }, words.save);
  const dialog = el("dialog", { class: "card form-dialog", "aria-label": title, on: { close: () => dialog.remove() } });
  const form = el("form", null, el("h2", null, title), fields, trouble, el("div", { class: "actions" }, done, el("button", { type: "button", class: "button", on: { click: () => dialog.close() } }, words.cancel)));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    setText(trouble, "");
    done.disabled = true;
    try {
      await save();
      dialog.close();
    } catch (problem) {
      setText(trouble, problem.message);
    }
    done.disabled = false;
  });
  dialog.append(form);
  document.body.append(dialog);
  dialog.showModal();
}

/** In the place of what was deleted: that it was, and how to take that back. */
export function showDeleted(node, text, undo) {
  const back = el("button", { type: "button", class: "button small" }, words.undo);
  back.addEventListener("click", async () => {
    back.disabled = true;
    await undo().then(() => node.remove(), (problem) => setText(back, problem.message));
  });
  node.replaceChildren(el("p", { class: "undo", role: "status" }, text, back));
}
