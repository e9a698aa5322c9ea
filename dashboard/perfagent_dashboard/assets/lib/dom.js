// Elements. Text from outside (names, messages, console lines) only ever becomes a text node.

/** A new element. Attributes by name, `class` included; on: {event: handler}; children are nodes or become text nodes. */
export const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

/** The same of a picture. */
export const svg = (tag, attributes, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value == null || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}

/** Replaces what is in a node; what is absent is left out, as in el. */
export const setChildren = (node, ...children) => node.replaceChildren(...children.flat().filter((child) => child != null && child !== false));

/** Sets the text only when it differs: an untouched node costs no layout. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Says something in the place of a button's words, for a moment. */
export function flash(button, text) {
  const told = button.querySelector("span") ?? button;
  const before = told.textContent;
  told.textContent = text;
  setTimeout(() => (told.textContent = before), 1600);
}
