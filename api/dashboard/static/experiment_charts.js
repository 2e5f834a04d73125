// The page's charts. Plotly's own buttons become switches that a keyboard reaches; what is chosen and zoomed stays.
import { draw, narrow, save } from "./charts.js";
import { make } from "./dom.js";
import { offerViews, viewed } from "./experiment_curves.js";
import { COMPARING, offerIterations } from "./experiment_choice.js";
import { passOver, set, setting } from "./experiment_settings.js";
import { brushed, overlay } from "./experiment_parallel.js";

const switchable = new Map(); // chart -> its latest figure

export async function showFigures(figures) {
  for (const [name, figure] of Object.entries(figures)) await showFigure(name, figure);
}

// Whoever has the contours hears of other parameters by an event of the section.
function offerPairs(section, { parameters, chosen: [x, y] }) {
  const tools = section.querySelector(".tools");
  const choose = (axis, value) => {
    const other = axis === "x" ? y : x;
    const rest = value === other ? (axis === "x" ? x : y) : other; // the same twice: they change places
    const pair = axis === "x" ? { x: value, y: rest } : { x: rest, y: value };
    section.dispatchEvent(new CustomEvent("pair", { bubbles: true, detail: pair }));
  };
  for (const axis of ["x", "y"]) if (setting(axis) && !parameters.some(([name]) => name === setting(axis))) passOver(axis);
  const select = (axis, value) => make("label", { class: "field" }, axis,
    make("select", { name: axis, onchange: (event) => choose(axis, event.target.value) },
      ...parameters.map(([name, text]) => make("option", { value: name, selected: name === value }, text))));
  const shown = JSON.stringify([parameters, x, y]);
  if (tools.dataset.shown === shown) return;
  tools.dataset.shown = shown;
  const focused = tools.contains(document.activeElement) ? document.activeElement.name : "";
  tools.replaceChildren(select("x", x), select("y", y));
  if (focused) tools.querySelector(`select[name=${focused}]`).focus();
}

export async function showFigure(name, latest) {
  const element = document.getElementById(`c-${name}`);
  if (!element) return;
  const section = element.closest("section");
  section.hidden = false;
  element.closest(".wide").hidden = false;
  const figure = switched(name, section, latest);
  const meta = figure.layout.meta ?? {};
  const note = section.querySelector(".note");
  note.dataset.whole ??= note.textContent;
  const words = meta.note ?? note.dataset.whole;
  if (note.textContent !== words) note.textContent = words; // it may have links
  if (meta.parameters) offerPairs(section, meta);
  const isColumn = meta.panels && narrow.matches;
  element.parentElement.style.minWidth = meta.least_width_px && !isColumn ? `${meta.least_width_px}px` : "";
  const isCurves = name === "curves";
  if (COMPARING.includes(name)) offerIterations(section);
  if (isCurves) offerViews(section, () => redraw(name));
  await draw(element, meta.axes ? brushed(figure) : isCurves ? viewed(figure) : figure);
  leadToPages(element);
  offerFiles(section, element, name);
  section.dispatchEvent(new Event("drawn", { bubbles: true }));
  if (meta.axes) overlay(section, element, figure, () => redraw(name));
}

// Draws the latest figure again, as is chosen now.
export function redraw(name) {
  return switchable.has(name) ? showFigure(name, switchable.get(name)) : null;
}

function offerFiles(section, element, name) {
  if (!window.Plotly || section.querySelector(".files")) return;
  const { name: experiment } = document.getElementById("live")?.dataset ?? {};
  const button = (format) => make("button", {
    type: "button", class: "quiet", "aria-label": `Save as ${format.toUpperCase()}`,
    onclick: () => save(element, [experiment, name].filter(Boolean).join("-"), format),
  }, format.toUpperCase());
  section.querySelector(".note").after(make("div", { class: "files" }, button("png"), button("svg")));
}

// A click on a point, a curve or a bar of a trial or an experiment leads to its page.
function leadToPages(element) {
  if (!element.on || element.dataset.leads) return;
  element.dataset.leads = "yes";
  element.on("plotly_click", ({ points: [point] }) => {
    const address = addressOf(point);
    if (address) window.location.assign(address);
  });
}

function addressOf({ data, customdata }) {
  const trials = document.getElementById("live")?.dataset.trials;
  const [first] = Array.isArray(customdata) ? customdata : [customdata];
  return data.meta?.href ?? (trials && /^\d+$/.test(String(first)) ? `${trials}/${Number(first)}` : null);
}

// The figure with the chosen button of its menu pressed, and without the menu.
function switched(name, section, figure) {
  switchable.set(name, figure);
  const { updatemenus, ...layout } = figure.layout;
  if (!updatemenus) return { data: figure.data, layout: { uirevision: name, ...layout } };
  const buttons = updatemenus[0].buttons;
  const tools = section.querySelector(".tools");
  const asked = buttons.findIndex(({ label }) => axisOf(label) === setting(name));
  if (asked < 0 && setting(name)) passOver(name);
  const pressed = Math.max(0, asked);
  if (!tools.childElementCount) tools.append(choices(name, buttons, pressed));
  const [data, changes] = buttons[pressed].args;
  const traces = figure.data.map((trace, at) => {
    const own = Object.entries(data).map(([key, values]) => [key, values[at % values.length]]);
    return { ...trace, ...Object.fromEntries(own) };
  });
  const axis = { ...layout.xaxis, title: { text: changes["xaxis.title.text"] }, dtick: changes["xaxis.dtick"] };
  const margin = { ...layout.margin, t: 16 };
  return { data: traces, layout: { ...layout, margin, xaxis: axis, uirevision: `${name} ${pressed}` } };
}

const axisOf = (label) => label.replace(/^over /, "");

function choices(name, buttons, pressed) {
  const choose = (event) => {
    set({ [name]: axisOf(buttons[event.target.value].label) });
    showFigure(name, switchable.get(name));
  };
  const radios = buttons.map(({ label }, at) => make("label", {},
    make("input", { type: "radio", name: `x-${name}`, value: at, checked: at === pressed, onchange: choose }),
    make("span", {}, label)));
  return make("fieldset", { class: "switch" }, make("legend", { class: "unseen" }, "Horizontal axis"), ...radios);
}
