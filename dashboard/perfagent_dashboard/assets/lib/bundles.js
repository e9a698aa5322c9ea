// The scripts of component libraries, loaded once: "charts" is plotly, "grid" AG Grid.

import { config } from "./config.js";

const loading = new Map();

export function need(bundle) {
  if (!loading.has(bundle)) loading.set(bundle, Promise.all(config.bundles[bundle].map(load)).catch((problem) => (loading.delete(bundle), Promise.reject(problem))));
  return loading.get(bundle);
}

function load(source) {
  if (document.querySelector(`script[src="${source}"]`)) return null; // the document names it
  return new Promise((done, failed) => {
    const script = Object.assign(document.createElement("script"), { src: source, onload: done, onerror: () => (script.remove(), failed(new Error(source))) });
    document.head.append(script);
  });
}
