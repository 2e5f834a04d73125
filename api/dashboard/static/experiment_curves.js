// Learning curves as a reader wants them: on log axes, smoothed, only the best. Browser and address keep it.
import { make } from "./dom.js";
import { set, setting } from "./experiment_settings.js";

const TOPS = ["", "5", "10", "20", "50", "100"];
const STRONGEST = 0.95;
const BEHIND = 0.3; // opacity of the curves as reported, behind those that are smoothed

const weight = () => Math.min(STRONGEST, Math.max(0, Number(setting("smooth")) || 0));
const isLog = (axis) => setting("log").includes(axis);
export const topAsked = () => (/^\d{1,5}$/.test(setting("top")) ? setting("top") : "");

// The figure, as is chosen.
export function viewed(figure) {
  const { data, layout } = figure;
  const axis = (name) => (isLog(name[0]) ? { ...layout[name], type: "log", rangemode: "normal", dtick: null } : layout[name]);
  const shown = { ...layout, xaxis: axis("xaxis"), yaxis: axis("yaxis") };
  shown.uirevision = `${layout.uirevision} ${setting("log")} ${topAsked()}`; // another axis is not zoomed
  if (!weight()) return { data, layout: shown };
  const raw = data.map((trace) => ({
    ...trace, legendgroup: trace.name, showlegend: false, opacity: BEHIND * trace.opacity, hoverinfo: "skip", hovertemplate: null,
    line: { ...trace.line, width: 1 }, mode: "lines",
  }));
  const smooth = data.map((trace) => ({ ...trace, legendgroup: trace.name, y: smoothed(trace, weight()) }));
  return { data: [...raw, ...smooth], layout: shown };
}

// An exponential moving average of each curve, as TensorBoard has it: it does not begin at zero.
function smoothed({ y, customdata }, share) {
  let sum = 0;
  let count = 0;
  return y.map((value, at) => {
    if (customdata[at] === null) sum = count = 0; // the end of a curve
    if (value === null) return null;
    count += 1;
    sum = share * sum + (1 - share) * value;
    return sum / (1 - share ** count);
  });
}

// The choices, above the chart. `changed()` draws it again; the best few are asked of the service.
export function offerViews(section, changed) {
  if (section.querySelector(".views")) return;
  const logs = () => ["x", "y"].filter((axis) => section.querySelector(`[name=log-${axis}]`).checked).join("");
  const box = (axis) => make("label", { class: "check" },
    make("input", { type: "checkbox", name: `log-${axis}`, checked: isLog(axis), onchange: () => { set({ log: logs() }); changed(); } }),
    `log ${axis}`);
  const smooth = (event) => {
    set({ smooth: Number(event.target.value) ? event.target.value : "" });
    changed();
  };
  const top = (event) => {
    set({ top: event.target.value });
    section.dispatchEvent(new CustomEvent("top", { bubbles: true }));
  };
  const tops = TOPS.includes(topAsked()) ? TOPS : [...TOPS, topAsked()];
  section.querySelector(".head").append(make("div", { class: "tools views" },
    make("label", { class: "field" }, "show", make("select", { name: "top", onchange: top, "aria-label": "Trials shown" },
      ...tops.map((value) => make("option", { value, selected: value === topAsked() }, value ? `best ${value}` : "all")))),
    make("label", { class: "field" }, "smooth",
      make("input", { type: "range", name: "smooth", min: 0, max: STRONGEST, step: 0.05, value: weight(), oninput: smooth })),
    box("x"), box("y")));
}
