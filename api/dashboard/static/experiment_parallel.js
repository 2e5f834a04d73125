// Brushing parallel coordinates: a range on an axis leaves only the trials that pass through it. By pointer on the
// axis, or by keyboard: each axis has a lower and an upper end, which arrow keys move.
import { keep, kept } from "./address.js";
import { counted } from "./plan_words.js";
import { make } from "./dom.js";

const ranges = new Map(); // name of an axis -> [low, high], from 0 to 1; the address has percents
let written = null; // the ranges in the address, as last read or written
let later = 0;
const SLIGHT = 0.02;
const Y_RANGE = [-0.03, 1.03];

const inAddress = () => kept().getAll("brush");

function read() {
  if (written === inAddress().join("\n")) return;
  written = inAddress().join("\n");
  ranges.clear();
  for (const text of inAddress()) {
    const found = /^(.+):(\d{1,3})-(\d{1,3})$/s.exec(text);
    if (found) ranges.set(found[1], [Number(found[2]) / 100, Number(found[3]) / 100]);
  }
}

// The table follows once a reader has chosen.
function write(section) {
  clearTimeout(later);
  later = setTimeout(() => {
    const texts = [...ranges].map(([name, [low, high]]) => `${name}:${Math.round(100 * low)}-${Math.round(100 * high)}`);
    written = texts.join("\n");
    later = 0;
    keep({ brush: texts, page: "" });
    section.dispatchEvent(new CustomEvent("brushed", { bubbles: true }));
  }, 200);
}

// The figure with only what passes through all ranges in colour.
export function brushed(figure) {
  if (!later) read();
  if (!ranges.size) return figure;
  const axes = figure.layout.meta.names;
  const others = { x: [], y: [] };
  const data = figure.data.map((trace) => {
    const kept = { x: [], y: [], customdata: [] };
    for (const from of starts(trace, axes.length)) {
      const places = trace.y.slice(from, from + axes.length);
      const into = passes(places, axes) ? kept : others;
      into.x.push(...trace.x.slice(from, from + axes.length), null);
      into.y.push(...places, null);
      if (into === kept) kept.customdata.push(...trace.customdata.slice(from, from + axes.length), null);
    }
    return { ...trace, ...kept, opacity: 0.95 };
  });
  const behind = { ...figure.data[0], ...others, customdata: [], hoverinfo: "skip", hovertemplate: null, opacity: 0.13 };
  behind.line = { color: "#8a8f98", width: 1 };
  return { ...figure, data: [behind, ...data] };
}

function* starts(trace, width) {
  for (let from = 0; from < trace.x.length; from += width + 1) yield from;
}

function passes(places, axes) {
  return axes.every((name, at) => {
    const range = ranges.get(name);
    return !range || (places[at] !== null && places[at] >= range[0] - 1e-9 && places[at] <= range[1] + 1e-9);
  });
}

function count(figure) {
  const axes = figure.layout.meta.names;
  let all = 0;
  let kept = 0;
  for (const trace of figure.data) {
    for (const from of starts(trace, axes.length)) {
      all += 1;
      kept += passes(trace.y.slice(from, from + axes.length), axes);
    }
  }
  return [kept, all];
}

// Puts a strip over every axis, which is pulled or moved by keys; `changed` is called when the ranges are.
export function overlay(section, element, figure, changed) {
  const plot = element.parentElement;
  const { names } = figure.layout.meta;
  const strips = [...plot.querySelectorAll(".brush")];
  const chosen = () => {
    write(section);
    changed();
  };
  if (strips.map((strip) => strip.dataset.axis).join("\n") !== names.join("\n")) {
    strips.forEach((strip) => strip.remove());
    names.forEach((name) => plot.append(strip(name, chosen)));
    new ResizeObserver(() => place(plot, element)).observe(element);
  }
  place(plot, element);
  tell(section, figure, chosen);
}

function place(plot, element) {
  const { margin, meta, height } = element.layout;
  const width = element.clientWidth - margin.l - margin.r;
  const inner = height - margin.t - margin.b;
  const span = Y_RANGE[1] - Y_RANGE[0];
  plot.querySelectorAll(".brush").forEach((strip, at) => {
    strip.style.left = `${margin.l + (width * at) / Math.max(1, meta.axes.length - 1)}px`;
    strip.style.top = `${margin.t + (inner * (Y_RANGE[1] - 1)) / span}px`;
    strip.style.height = `${inner / span}px`;
    const range = ranges.get(strip.dataset.axis);
    const mark = strip.querySelector("i");
    mark.hidden = !range;
    if (range) {
      mark.style.top = `${100 * (1 - range[1])}%`;
      mark.style.height = `${100 * (range[1] - range[0])}%`;
    }
    const [low, high] = strip.querySelectorAll("input");
    [low.value, high.value] = (range ?? [0, 1]).map((end) => Math.round(100 * end));
  });
}

function strip(name, changed) {
  const set = (range) => {
    const whole = range?.map((end) => Math.round(100 * end) / 100); // percents, as in the address
    if (whole && whole[1] - whole[0] < 1) ranges.set(name, whole);
    else ranges.delete(name);
    changed();
  };
  const end = (which) => make("input", {
    type: "range", min: 0, max: 100, step: 2, value: which === "from" ? 0 : 100, "aria-label": `${name}, ${which}, percent of the axis`,
    oninput: (event) => {
      const [low, high] = [...event.target.parentElement.querySelectorAll("input")].map((input) => Number(input.value) / 100);
      set([Math.min(low, high), Math.max(low, high)]);
    },
    onkeydown: (event) => { if (event.key === "Escape") set(null); },
  });
  const element = make("div", { class: "brush", role: "group", "aria-label": `Range of ${name}`, title: `Pull to choose a range of ${name}` },
    make("i", { hidden: true }), end("from"), end("to"));
  element.dataset.axis = name;
  pull(element, set);
  return element;
}

function pull(element, set) {
  let from = null;
  const at = (event) => {
    const box = element.getBoundingClientRect();
    return Math.min(1, Math.max(0, 1 - (event.clientY - box.top) / box.height));
  };
  const range = (event) => [Math.min(from, at(event)), Math.max(from, at(event))];
  element.addEventListener("pointerdown", (event) => {
    from = at(event);
    element.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  element.addEventListener("pointermove", (event) => {
    if (from !== null) set(range(event));
  });
  element.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [low, high] = range(event);
    from = null;
    set(high - low < SLIGHT ? null : [low, high]);
  });
}

function tell(section, figure, changed) {
  const tools = section.querySelector(".tools");
  if (!tools.childElementCount) {
    const clear = () => {
      ranges.clear();
      changed();
    };
    tools.append(make("span", { class: "faint", "aria-live": "polite" }), make("button", { type: "button", class: "quiet", onclick: clear }, "Clear"));
  }
  const [told, button] = tools.children;
  const [kept, all] = count(figure);
  const text = ranges.size ? `${kept} of ${counted(all, "trial")}` : "pull along an axis to choose a range";
  if (told.textContent !== text) told.textContent = text;
  button.hidden = !ranges.size;
}
