// Questions to the service about the pasted file. Answers are never thrown: { ok, status, body, ms }.

// { text, policy, deadline, budget, more, name }: the latter are what is set over the file's; null leaves them.
// `more` holds other keys and their values.
export function sets_of(question) {
  const sets = [];
  if (question.deadline !== null) sets.push(`constraints.deadline=${question.deadline || "null"}`);
  if (question.budget !== null) sets.push(`constraints.max_cost=${question.budget || "null"}`);
  for (const [key, value] of Object.entries(question.more ?? {})) sets.push(`${key}=${value}`);
  if (question.name) sets.push(`name=${question.name}`);
  return sets;
}

export function preview(question, signal = null) {
  return ask("/v1/plans", question, [["policy", question.policy], ...named(sets_of(question))], { signal });
}

// All of cost against deadline, whatever the limits.
export function frontier(question, signal) {
  const free = sets_of({ ...question, deadline: "", budget: "" });
  return ask("/v1/plans", question, [["policy", question.policy], ["frontier", "true"], ...named(free)], { signal });
}

// The row of another scheduler, which is simulated.
export async function option(url, signal) {
  try {
    const answer = await fetch(url, { headers: { Accept: "application/json" }, signal });
    const body = await answer.json();
    return answer.ok ? body : { failed: body.detail };
  } catch (error) {
    return error.name === "AbortError" ? null : { failed: "the service cannot be reached; is it running?" };
  }
}

export function preflight(question, signal = null) {
  return ask("/plan/check", question, [["policy", question.policy], ...named(sets_of(question))], { signal });
}

export function submit(question, plan, key) {
  const asked = [["policy", question.policy], ...(plan ? [["plan", plan]] : []), ...named(sets_of(question))];
  return ask("/v1/experiments", question, asked, { headers: { "Idempotency-Key": key } });
}

const named = (sets) => sets.map((set) => ["set", set]);

async function ask(path, question, asked, { signal = null, headers = {} }) {
  const began = performance.now();
  const type = question.text.trimStart().startsWith("{") ? "application/json" : "application/yaml";
  try {
    const answer = await fetch(`${path}?${new URLSearchParams(asked)}`, {
      method: "POST",
      headers: { "Content-Type": type, Accept: "application/json", ...headers },
      body: question.text,
      signal,
    });
    const body = await answer.json();
    const location = answer.headers.get("Location");
    return { ok: answer.ok, status: answer.status, body, location, ms: performance.now() - began };
  } catch (error) {
    if (error.name === "AbortError") return { ok: false, status: 0, body: null, ms: 0 };
    const detail = "the service cannot be reached; is it running?";
    return { ok: false, status: -1, body: { title: "No answer", detail }, ms: 0 };
  }
}
