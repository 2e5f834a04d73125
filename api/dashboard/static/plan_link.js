// The address of what is shown: the file, the policy, and what is set over the file, after `#plan=`. Browsers do not send
// that part to a service, so a file stays between those who have the link.
const PREFIX = "#plan=";
const MOST = 32000; // letters of an address that chats and mails still take

// The question as the last part of an address; empty if it is too long for one.
export async function written({ text, policy, deadline, budget, more }) {
  const bytes = new TextEncoder().encode(JSON.stringify({ text, policy, deadline, budget, more }));
  const packed = await through(bytes, new CompressionStream("deflate-raw"));
  if (packed.length > MOST / 2) return "";
  return PREFIX + btoa(String.fromCharCode(...packed)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

// The question of this page's address; null without one. Throws if it cannot be read.
export async function linked() {
  const { hash } = window.location;
  if (!hash.startsWith(PREFIX)) return null;
  const packed = atob(hash.slice(PREFIX.length).replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = await through(Uint8Array.from(packed, (letter) => letter.charCodeAt(0)), new DecompressionStream("deflate-raw"));
  const found = JSON.parse(new TextDecoder().decode(bytes));
  const word = (value) => (typeof value === "string" ? value : null);
  const more = Object.entries(found.more ?? {}).filter(([, value]) => ["string", "number"].includes(typeof value));
  return {
    text: word(found.text) ?? "", policy: word(found.policy) ?? "optimal",
    deadline: word(found.deadline), budget: word(found.budget), more: Object.fromEntries(more),
  };
}

async function through(bytes, stream) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}
