// The trials that are chosen, and the iterations after which they are compared: one choice of the table and of all charts
// of trials. The address keeps it.
import { keep, kept } from "./address.js";
import { make } from "./dom.js";

export const COMPARING = ["parallel", "importance", "trade-off", "slices", "contour"];
export const OF_TRIALS = ["curves", ...COMPARING];
const WORDS = ["status", "filter", "brush", "after"];
const OF_TABLE = [...WORDS, "columns", "sort", "down", "page"];

// The words of the address that choose a chart's trials. Parallel coordinates grey what is out of the ranges.
export function choiceOf(chart) {
  const without = { parallel: "brush", curves: "after" }[chart];
  return WORDS.filter((word) => word !== without).flatMap((word) => kept().getAll(word).map((value) => [word, value]));
}

const textOf = (words) => JSON.stringify(words.map((word) => kept().getAll(word)));
export const choice = () => textOf(WORDS);
export const table = () => textOf(OF_TABLE);

// A link of the table is a step to its words. The others stay.
export function turnTo({ search }) {
  const words = new URLSearchParams(search);
  keep(Object.fromEntries(OF_TABLE.map((word) => [word, words.getAll(word)])), { isStep: true });
}

// The filter and the columns of the table; `chosen()` fetches what they change.
export function offerChoice(live, chosen) {
  const changed = (form) => {
    const boxes = [...form.querySelectorAll("[name=columns]")];
    const shown = boxes.filter(({ checked }) => checked).map(({ value }) => value);
    const columns = boxes.every((box) => box.checked === box.hasAttribute("data-usual")) ? [] : shown;
    keep({ filter: form.elements.filter.value.trim(), columns, page: "" }, { isStep: true });
    chosen();
  };
  live.addEventListener("submit", (event) => {
    if (event.target.id !== "choose") return;
    event.preventDefault();
    changed(event.target);
  });
  live.addEventListener("change", (event) => { if (event.target.closest("#choose")) changed(event.target.closest("#choose")); });
  live.addEventListener("search", (event) => { if (event.target.closest("#choose")) changed(event.target.closest("#choose")); }); // emptied
}

// After a step back, the form has what the address has.
export function showChoice(live) {
  const form = live.querySelector("#choose");
  if (!form) return;
  const columns = kept().getAll("columns");
  form.elements.filter.value = kept().get("filter") ?? "";
  for (const box of form.querySelectorAll("[name=columns]")) box.checked = columns.length ? columns.includes(box.value) : box.hasAttribute("data-usual");
}

// The table's choice, above a chart as well.
export function offerIterations(section) {
  const links = [...document.querySelectorAll("#metrics a")];
  const texts = links.map((link) => `${link.textContent}${link.hasAttribute("aria-current") ? "*" : ""}`).join();
  const old = section.querySelector(".iterations");
  if (old?.dataset.shown === texts) return;
  const options = links.map((link, at) => make("option", { value: at, selected: link.hasAttribute("aria-current") }, link.textContent));
  const choose = (event) => links[event.target.value].click();
  const label = make("label", { class: "field" }, "metric", make("select", { name: "after", onchange: choose }, ...options));
  const tools = make("div", { class: "tools iterations", hidden: !links.length }, label);
  tools.dataset.shown = texts;
  if (old) old.replaceWith(tools);
  else section.querySelector(".head").append(tools);
}
