// The iterations after which configurations are compared: one choice of the table and of all charts that compare them.
import { kept } from "./address.js";
import { make } from "./dom.js";

export const COMPARING = ["parallel", "importance", "trade-off", "slices", "contour"];
export const afterAsked = () => (/^\d{1,9}$/.test(kept().get("after") ?? "") ? kept().get("after") : "");

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
