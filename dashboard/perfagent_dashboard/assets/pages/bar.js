// The bar on top of every page.

import { api } from "../lib/api.js";
import { onTheme, say, theme, words } from "../lib/config.js";
import { el, setChildren, setText } from "../lib/dom.js";
import { Soonest } from "../lib/soonest.js";

const known = JSON.parse(document.getElementById("first").dataset.known); // when the page was made; null: to be asked for

const counting = new Soonest(async () => {
  const badge = document.getElementById("count-alerts");
  const found = known.inbox ?? (await api("/alerts/inbox").catch(() => null));
  known.inbox = null;
  if (!badge || !found) return;
  const { counts: { open }, severities: { info } } = found;
  setText(badge, String(open || ""));
  badge.title = open ? say("open_alerts", { count: open, severe: open - info, info }) : "";
}, 1000);

/** How many alerts are open, beside the word Alerts, as its page counts them. They change by the dozen when several runs
 * stop at once. */
export const countAlerts = () => counting.within(0);

const CHOICES = { auto: ["system", "theme_system"], light: ["sun", "theme_light"], dark: ["moon", "theme_dark"] };

/** The buttons of the bar, each time Dash has made them anew. */
export function barButtons() {
  const button = document.getElementById("theme");
  if (!button || button.dataset.ready) return;
  button.dataset.ready = "1";
  const show = () => {
    const [icon, word] = CHOICES[window.perfagent.themeChoice()];
    setChildren(button, el("i", { class: `icon of-${icon}`, "aria-hidden": "true" }));
    button.title = say("theme_title", { theme: words[word] });
    button.setAttribute("aria-label", button.title);
    window.dash_clientside?.set_props("mantine", { forceColorScheme: theme() });
  };
  button.addEventListener("click", () => window.perfagent.nextTheme());
  onTheme(show);
  show();
  languageButton();
  account();
}

/** Who is logged in, and the way out; the way in for who sees the page without a login. */
async function account() {
  const session = known.session ?? (await api("/session").catch(() => null));
  const place = document.getElementById("account");
  if (!place || !session) return;
  if (session.who === "anyone") {
    const next = encodeURIComponent(location.pathname + location.search);
    setChildren(place, el("a", { class: "button quiet", href: `/login?next=${next}` }, words.log_in));
    return;
  }
  const title = say("log_out_title", { name: session.name });
  const out = el("button", { class: "button quiet", type: "button", title, "aria-label": title, on: { click: logOut } });
  out.append(el("i", { class: "icon of-logout", "aria-hidden": "true" }));
  const name = el("a", { class: "account-name", href: "/settings?tab=account", title: words.settings_account }, session.name);
  setChildren(place, name, out);
}

async function logOut() {
  await fetch("/api/v1/session", { method: "DELETE", credentials: "same-origin" });
  location.assign("/login");
}

/** The choice is a cookie, because the server writes the pages. */
function languageButton() {
  const button = document.getElementById("language");
  setText(button, words.language_other);
  button.title = words.language_title;
  button.addEventListener("click", () => {
    document.cookie = `perfagent-language=${button.lang}; path=/; max-age=31536000; samesite=lax`;
    location.reload();
  });
}
