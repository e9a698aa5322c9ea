// What this browser remembers from visit to visit. Storage can be forbidden; then it lasts as long as the page.

function remembered(name) {
  try {
    return JSON.parse(localStorage.getItem(`perfagent.${name}`)) ?? [];
  } catch {
    return [];
  }
}

export const pins = new Set(remembered("pins"));
export const folded = new Set(remembered("folded"));
/** Names of charts that somebody has moved to the front of their section, in their order. */
export const moved = remembered("order");

export function remember() {
  try {
    for (const [name, value] of Object.entries({ pins: [...pins], folded: [...folded], order: moved })) localStorage.setItem(`perfagent.${name}`, JSON.stringify(value));
  } catch {
    // As above.
  }
}
