// What a reader has chosen on a page, kept in its address: the link shows another reader the same.
export const kept = () => new URLSearchParams(window.location.search);

// The words with changes, as { top: "10", brush: ["lr:20-60"] }; an empty value goes.
export function changed(words, changes) {
  for (const [name, value] of Object.entries(changes)) {
    words.delete(name);
    for (const one of [value].flat()) if (one) words.append(name, one);
  }
  return words.size ? `?${words}` : "";
}

// A step is one that the browser's back button undoes.
export function keep(changes, { isStep = false } = {}) {
  const asked = changed(kept(), changes);
  if (asked === window.location.search) return;
  history[isStep ? "pushState" : "replaceState"](null, "", window.location.pathname + asked + window.location.hash);
}
