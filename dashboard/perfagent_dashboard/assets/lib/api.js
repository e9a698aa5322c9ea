// Requests to the server's API.


class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const underWay = new Map(); // what is asked for twice at once is asked once

/** JSON of an API path, which several may read; throws Problem with the server's sentence. change: method and body. */
export function api(path, change) {
  if (change) return request(path, change);
  if (!underWay.has(path)) underWay.set(path, request(path).finally(() => underWay.delete(path)));
  return underWay.get(path);
}

async function request(path, change) {
  let response;
  try {
    response = await fetch("/api/v1" + path, { credentials: "same-origin", ...change });
  } catch (error) {
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
