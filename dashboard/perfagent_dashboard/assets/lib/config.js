// What the server tells the pages at their start: words, metrics, charts, colors.

export const { config } = window.perfagent;
export const { words } = config;
export const theme = () => window.perfagent.theme;
export const onTheme = (listener) => window.perfagent.onTheme(listener);

const fill = (text, values) => text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));

/** A sentence of the pages with its {values} put in. */
export const say = (key, values) => fill(words[key] ?? key, values || {});
