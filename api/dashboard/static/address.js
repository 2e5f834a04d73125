// What a reader has chosen on a page, kept in its address: the link shows another reader the same.
export const kept = () => new URLSearchParams(window.location.search);

// keep({ top: "10", brush: ["lr:20-60"] }); an empty value goes.
export function keep(changes) {
  const words = kept();
  for (const [name, value] of Object.entries(changes)) {
    words.delete(name);
    for (const one of [value].flat()) if (one) words.append(name, one);
  }
  const asked = words.size ? `?${words}` : "";
  if (asked !== window.location.search) history.replaceState(null, "", window.location.pathname + asked + window.location.hash);
}
