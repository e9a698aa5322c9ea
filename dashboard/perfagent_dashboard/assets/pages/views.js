// The menu of views that people saved under a name: what stands in the address of a page, kept on the server.

import { api, change } from "../lib/api.js";
import { say, words } from "../lib/config.js";
import { el, setChildren } from "../lib/dom.js";
import { dropDown } from "../lib/drop_down.js";

const button = (text, act, more) => el("button", { type: "button", class: "button quiet small", on: { click: act }, ...more }, text);
const onViews = (method, { name, project }, body) => change(method, `/views/${encodeURIComponent(name)}?${new URLSearchParams(project ? { project } : {})}`, body);

/** Fills the menus that Dash has put up. */
export function findViews() {
  for (const root of document.querySelectorAll(".views:empty")) root.append(menuOf(root.dataset.views));
}

function menuOf(page) {
  const list = el("div", { class: "chart-items views-items" });
  return dropDown(el("summary", { class: "button" }, words.views), list, () => show(list, page));
}

async function show(list, page, note = "") {
  try {
    const [{ views }, session] = await Promise.all([api("/views"), api("/session")]);
    const may = (project) => session.everywhere.includes("operate") || Boolean(project && session.projects[project]?.includes("operate"));
    const said = el("p", { class: "quiet", role: "status" }, note || (views.length ? "" : words.views_none));
    const rows = views.map((view) => row(view, may(view.project), (text) => show(list, page, text)));
    const asked = new URLSearchParams(location.search).get("project") ?? "";
    const project = asked || session.everywhere.includes("operate") ? asked : Object.keys(session.projects).find(may);
    setChildren(list, ...rows, said, project != null && may(project) ? form(list, page, project) : null);
  } catch (problem) {
    setChildren(list, el("p", { role: "alert" }, problem.message));
  }
}

function row(view, isMine, done) {
  const link = `/views/${encodeURIComponent(view.name)}${view.project ? `?project=${encodeURIComponent(view.project)}` : ""}`;
  const drop = button("✕", async () => {
    if (drop.textContent === "✕") drop.textContent = words.view_delete;
    else done(await onViews("DELETE", view).then(() => say("view_deleted", { name: view.name }), (problem) => problem.message));
  }, { "aria-label": say("view_delete_title", { name: view.name }) });
  const where = [words[`nav_${view.page}`], view.project, view.who].filter(Boolean).join(" · ");
  return el("div", { class: "view" }, el("a", { href: link }, view.name, el("small", null, where)), isMine ? drop : null);
}

function form(list, page, project) {
  const name = el("input", { type: "text", maxlength: 64, required: true, placeholder: words.view_name, "aria-label": words.view_name });
  const said = el("p", { class: "quiet", role: "status" });
  const save = async (replace) => {
    try {
      await onViews("PUT", { name: name.value.trim(), project }, { page, query: location.search.slice(1), replace });
      show(list, page, say("view_saved", { name: name.value.trim() }));
    } catch (problem) {
      setChildren(said, problem.status === 409 && !replace ? [say("view_there", { name: name.value.trim() }), " ", button(words.view_replace, () => save(true))] : problem.message);
    }
  };
  const made = el("form", { class: "view-form" }, name, el("button", { type: "submit", class: "button small" }, words.view_save), said);
  made.addEventListener("submit", (event) => {
    event.preventDefault();
    save(false);
  });
  return made;
}
