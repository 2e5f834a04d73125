// What browsers give only to pages of https and of this machine (random ids, the clipboard), for those of http too.
import { say } from "./live.js";

// What makes a request that is sent twice count once.
export function freshKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Copies a text; where the browser does not, the element that shows it is selected.
export async function copy(text, shown) {
  if (await written(text)) return say("Copied.");
  getSelection().selectAllChildren(shown);
  say("This browser does not copy. The text is selected: press Ctrl+C.");
}

async function written(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.value = text;
  field.setAttribute("class", "unseen");
  document.body.append(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isDone;
}

// Each button `data-copy` copies the code that is seen beside it.
export function offerCopies() {
  document.addEventListener("click", (event) => {
    const beside = event.target.closest("[data-copy]")?.closest(".copy").querySelectorAll("code");
    const shown = beside && [...beside].find((code) => code.getClientRects().length);
    if (shown) copy(shown.textContent, shown);
  });
}
