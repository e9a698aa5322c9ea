// Requests to the server's API.


class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** JSON of an API path; throws Problem with the server's sentence. */
export async function api(path, options) {
  let response;
  try {
    response = await fetch("/api/v1" + path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, error.message);
  }
  let body = null;
  try {
    body = await response.json();
  } catch {
    // Not JSON: a proxy's page. The status says enough.
  }
  if (response.ok) return body;
  throw new Problem(response.status, body?.error?.message ?? `${response.status} ${response.statusText}`);
}

let asked = null;

/** Rule -> the series on whose charts its alert is marked, best first: what the server's rules say of themselves. Read once. */
export function marksOfRules() {
  asked ??= api("/rules").then(({ rules }) => Object.fromEntries(rules.map(({ rule, charts }) => [rule, charts])));
  asked.catch(() => (asked = null)); // the next page asks again
  return asked;
}
