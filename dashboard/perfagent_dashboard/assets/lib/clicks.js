// No click is lost: it is pending until its answer is there, said to have failed when that does not come, and not taken
// while the server cannot be reached.

import { isUp } from "./api.js";
import { el } from "./dom.js";
import { say, words } from "./config.js";
import { clockTime } from "./times.js";

const ANSWERS = "/_dash-update-component";
// What Dash sends to the server when it is pressed: it has an id. The tools of a chart have none, and work without it.
const SENT = ":is(main, [role=dialog]) :is(button, summary):is([id^='{'], [id]:not([id^=mantine-])), [role=tab], [role=switch], [role=menuitem]";
const AGAIN_MS = 2000;

let pending = 0;
let bar = null;
let asking = 0;

/** The live connection is gone, since Unix seconds: a proxy may have closed it, while the server answers. */
export async function suspect(since) {
  if (!(await isUp(AGAIN_MS))) offline(since);
}

/** The server does not answer, since Unix seconds. */
function offline(since = Date.now() / 1000) {
  clearTimeout(asking);
  asking = setTimeout(ask, AGAIN_MS);
  if (bar) return;
  bar = el("p", { class: "offline", role: "alert" }, say("offline", { time: clockTime(since) }));
  document.querySelector(".bar")?.after(bar);
  document.body.classList.add("is-offline");
}

export function online() {
  clearTimeout(asking);
  bar?.remove();
  bar = null;
  document.body.classList.remove("is-offline");
}

/** A page without a live connection has nobody else who notices that the server is back. */
async function ask() {
  if (await isUp(AGAIN_MS)) online();
  else if (bar) asking = setTimeout(ask, AGAIN_MS);
}

function failed() {
  const sent = { action: "show", message: words.not_done, color: "red", autoClose: 12000, withBorder: true };
  window.dash_clientside?.set_props("notes", { sendNotifications: [sent] });
}

document.addEventListener("click", (event) => {
  const pressed = event.target.closest?.(SENT);
  if (!pressed) return;
  if (bar) {
    event.preventDefault();
    event.stopImmediatePropagation();
    bar.classList.remove("again");
    requestAnimationFrame(() => bar?.classList.add("again"));
  } else if (pressed.matches("button:not([role=tab])")) pressed.classList.add("pending");
}, { capture: true });

/** Whether Dash asks only because buttons were drawn: nobody has pressed one. */
function isUnpressed(body) {
  const { changedPropIds: changed, inputs } = JSON.parse(body);
  return changed.length > 0 && changed.every((one) => /\.n_(clicks|submit)$/.test(one)) && inputs.flat().every(({ value }) => value == null);
}

const send = window.fetch;
window.fetch = async (asked, options) => {
  if (!String(asked?.url ?? asked).includes(ANSWERS)) return send(asked, options);
  if (isUnpressed(options.body)) return new Response(null, { status: 204 });
  pending += 1;
  try {
    const answer = await send(asked, options);
    if (answer.status >= 500) failed();
    return answer;
  } catch (error) {
    if (error.name !== "AbortError") {
      offline();
      failed();
    }
    throw error;
  } finally {
    pending -= 1;
    if (!pending) for (const one of document.querySelectorAll(".pending")) one.classList.remove("pending");
  }
};
