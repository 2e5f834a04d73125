// The charts as a reader wants them: which and in which order (`view`), and their settings. The browser keeps them for all
// experiments. An address with `view` has all of them instead: what is changed there is kept in that address alone.
import { changed, keep, kept } from "./address.js";

const KEY = "charts";
const WORDS = ["view", "curves", "batches", "log", "smooth", "top", "x", "y"]; // curves and batches: their horizontal axes
export const isLink = Boolean(kept().get("view"));
const chosen = Object.fromEntries([...(isLink ? [] : own()), ...kept()]);

// A browser may refuse to keep anything.
function own() {
  try {
    return new URLSearchParams(localStorage.getItem(KEY) ?? "");
  } catch {
    return new URLSearchParams();
  }
}

function remember(words) {
  try {
    localStorage.setItem(KEY, changed(own(), words).slice(1));
  } catch { /* it lasts as long as the page */ }
}

const only = (values, names) => Object.fromEntries(names.map((name) => [name, values[name] ?? ""]));

export const setting = (word) => chosen[word] ?? "";

export function set(changes) {
  Object.assign(chosen, changes);
  const words = only(changes, WORDS.filter((word) => word in changes));
  if (!isLink) remember(words);
  keep(isLink ? words : { ...words, view: "" });
}

// The address of another choice of trials has them too.
export function carry() {
  keep({ ...only(chosen, WORDS), ...(isLink ? {} : { view: "" }) });
}

export const linkTo = (view) => window.location.origin + window.location.pathname + changed(kept(), { ...only(chosen, WORDS), view });

// The page as this browser shows it: with the link's charts from now on, as before it, or as at first.
export const keepAsOwn = (view) => leave({ ...only(chosen, WORDS), view });
export const backToOwn = () => leave({});
export const backToUsual = () => leave(only({}, WORDS));

function leave(words) {
  remember(words);
  keep(only({}, WORDS));
  window.location.reload();
}

// A name in the link that this page does not know is passed over; whoever shows the view says so.
export function passOver(word) {
  if (kept().has(word)) document.dispatchEvent(new CustomEvent("passedover", { detail: `${word}=${setting(word)}` }));
}
