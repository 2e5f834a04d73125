// A chart that fills the window: by its button, or by the key f for the one that is read. The address has it.
import { keep, kept } from "./address.js";
import { make } from "./dom.js";

export function offerGrowth(live, redraw) {
  const grown = () => live.querySelector(".figure.grown");
  const nameOf = (section) => section.id.slice(2);

  function grow(section) {
    const before = grown();
    before?.classList.remove("grown");
    if (section && section !== before) section.classList.add("grown");
    document.documentElement.classList.toggle("covered", grown() !== null);
    keep({ chart: grown() ? nameOf(grown()) : "" });
    for (const one of [before, section].filter(Boolean)) redraw(nameOf(one));
  }

  function inSight() {
    const height = (section) => {
      const { top, bottom } = section.getBoundingClientRect();
      return Math.min(bottom, window.innerHeight) - Math.max(top, 0);
    };
    const shown = [...live.querySelectorAll(".figure:not([hidden])")].filter((section) => section.querySelector(".main-svg"));
    const [best] = shown.sort((one, other) => height(other) - height(one));
    return best && height(best) > 0 ? best : null;
  }

  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && grown()) grow(grown());
    if (event.key === "f" && (grown() ?? inSight())) grow(grown() ?? inSight());
  });
  live.addEventListener("drawn", ({ target }) => {
    const files = target.querySelector(".files");
    if (files && !files.querySelector(".grow")) {
      files.append(make("button", { type: "button", class: "quiet grow", title: "Fill the window (f)", onclick: () => grow(target) }, "Window"));
    }
    if (kept().get("chart") === nameOf(target) && !grown()) grow(target);
  });
  // A step back to an address without it, or forth to one with it.
  addEventListener("popstate", () => {
    const asked = document.getElementById(`s-${kept().get("chart")}`);
    if (grown() !== asked) grow(asked ?? grown());
  });
}
