// Requests that change something, and what the service answers.

// { ok, body }; a key makes a request that is sent twice count once.
export async function send(method, address, body = null, key = null) {
  const headers = { Accept: "application/json", ...(key ? { "Idempotency-Key": key } : {}) };
  if (body) headers["Content-Type"] = "application/json";
  try {
    const answer = await fetch(address, { method, headers, body: body ? JSON.stringify(body) : null });
    return { ok: answer.ok, body: await answer.json() };
  } catch {
    return { ok: false, body: { detail: "The service cannot be reached; is it running?" } };
  }
}

export async function busy(button, work) {
  button.disabled = true;
  try {
    return await work();
  } finally {
    button.disabled = false;
  }
}
