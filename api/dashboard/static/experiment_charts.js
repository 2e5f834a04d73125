// The page's charts. Plotly's own buttons become switches that a keyboard reaches; what is chosen and zoomed stays.
import { draw } from "./charts.js";
import { make } from "./dom.js";
import { brushed, overlay } from "./experiment_parallel.js";

const chosen = new Map();
let latest = {};

export async function showFigures(figures) {
  latest = figures;
  for (const name of Object.keys(figures)) await showFigure(name);
  for (const link of document.querySelectorAll(".jumps [data-for]")) link.hidden = !(link.dataset.for in figures);
}

async function showFigure(name) {
  const element = document.getElementById(`c-${name}`);
  if (!element) return;
  const section = element.closest("section");
  section.hidden = false;
  const figure = switched(name, section, latest[name]);
  const meta = figure.layout.meta ?? {};
  element.parentElement.style.minWidth = meta.least_width_px ? `${meta.least_width_px}px` : "";
  await draw(element, meta.axes ? brushed(figure) : figure);
  if (meta.axes) overlay(section, element, figure, () => showFigure(name));
}

// The figure with the chosen button of its menu pressed, and without the menu.
function switched(name, section, figure) {
  const { updatemenus, ...layout } = figure.layout;
  if (!updatemenus) return { data: figure.data, layout: { uirevision: name, ...layout } };
  const buttons = updatemenus[0].buttons;
  const tools = section.querySelector(".tools");
  if (!tools.childElementCount) tools.append(choices(name, buttons));
  const [data, changes] = buttons[chosen.get(name) ?? 0].args;
  const traces = figure.data.map((trace, at) => {
    const own = Object.entries(data).map(([key, values]) => [key, values[at % values.length]]);
    return { ...trace, ...Object.fromEntries(own) };
  });
  const axis = { ...layout.xaxis, title: { text: changes["xaxis.title.text"] }, dtick: changes["xaxis.dtick"] };
  const margin = { ...layout.margin, t: 16 };
  return { data: traces, layout: { ...layout, margin, xaxis: axis, uirevision: `${name} ${chosen.get(name) ?? 0}` } };
}

function choices(name, buttons) {
  const choose = (event) => {
    chosen.set(name, Number(event.target.value));
    showFigure(name);
  };
  const radios = buttons.map(({ label }, at) => make("label", {},
    make("input", { type: "radio", name: `x-${name}`, value: at, checked: at === 0, onchange: choose }),
    make("span", {}, label)));
  return make("fieldset", { class: "switch" }, make("legend", { class: "unseen" }, "Horizontal axis"), ...radios);
}
