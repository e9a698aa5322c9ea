// Requests to the server's API.

class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const underWay = new Map(); // what is asked for twice at once is asked once

/** JSON of an API path, which several may read; throws Problem with the server's sentence. */
export function api(path) {
  if (!underWay.has(path)) underWay.set(path, request(path).finally(() => underWay.delete(path)));
  return underWay.get(path);
}

/** Whether the server answers, within so many milliseconds. */
export const isUp = (ms) => fetch("/healthz", { cache: "no-store", signal: AbortSignal.timeout(ms) }).then(({ ok }) => ok, () => false);

/** Sends something; the answer's JSON, null for an empty one. */
export const change = (method, path, body) => request(path, { method, body: body && JSON.stringify(body), headers: { "Content-Type": "application/json" } });

async function request(path, options) {
  const response = await fetch("/api/v1" + path, { credentials: "same-origin", ...options }).catch((error) => {
    throw new Problem(0, error.message);
  });
  const body = await response.json().catch(() => null); // not JSON: a proxy's page; the status says enough
  if (response.ok) return body;
  throw new Problem(response.status, body?.error?.message ?? `${response.status} ${response.statusText}`);
}
