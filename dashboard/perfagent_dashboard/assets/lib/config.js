// What the server tells the pages at their start: words, metrics, charts, colors.

export const { config } = window.perfagent;
export const { words } = config;
export const theme = () => window.perfagent.theme;
export const onTheme = (listener) => window.perfagent.onTheme(listener);

const plurals = new Intl.PluralRules(config.language);

/** A sentence of the pages with its {figures} put in. Where it has two forms, `count` chooses: for one, or for any other number. */
export function say(key, figures = {}) {
  const text = Array.isArray(words[key]) ? words[key][plurals.select(figures.count) === "one" ? 0 : 1] : words[key];
  return text.replace(/\{(\w+)\}/g, (_, name) => (typeof figures[name] === "number" ? figures[name].toLocaleString(config.language) : figures[name]));
}
