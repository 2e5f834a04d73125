// Plotly's figures in the colours of the page: `draw(element, figure)`. The page names plotly's script; it is large, and
// what is drawn before it came is drawn once it has.
import { merged } from "./charts_dense.js";
import { narrowed } from "./charts_narrow.js";

const dark = window.matchMedia("(prefers-color-scheme: dark)");
export const narrow = window.matchMedia("(max-width: 720px)");
const drawn = new Map();
const AROUND_PX = 170; // title, choices and note of a chart that fills the window
const LIMIT = "#d62728"; // of deadlines and caps in the figures that come: too dark to read on a dark page
// Whether or not plotly came, nothing is waited for any more once the page is loaded.
const loaded = new Promise((resolve) => {
  if (document.readyState === "complete") resolve();
  else window.addEventListener("load", resolve);
});

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function themed(figure, width) {
  const text = colour("--text");
  const grid = colour("--line");
  const small = narrow.matches;
  const layout = small ? narrowed({ ...figure, layout: { height: 360, ...figure.layout } }, width) : figure.layout;
  const whole = {
    ...layout,
    height: layout.height ?? 360,
    font: { color: text, size: small ? 10 : 12, family: "system-ui, sans-serif" },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    dragmode: small ? false : (layout.dragmode ?? "zoom"),
    hoverlabel: { align: "left", bgcolor: colour("--raised"), bordercolor: grid, font: { color: text } },
  };
  for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
    whole[name] = { ...layout[name], gridcolor: grid, zerolinecolor: grid, automargin: layout[name].automargin ?? true };
  }
  if (layout.annotations) {
    const readable = (font) => (font?.color === LIMIT ? { ...font, color: colour("--bad") } : font);
    // Beside each other, the whole names of stages need a wide page.
    const short = (text) => (small ? String(text).replace(/^stage (\d+)$/, "$1") : text);
    whole.annotations = layout.annotations.map((note) => ({ ...note, text: short(note.text), font: readable(note.font) }));
  }
  if (layout.updatemenus) {
    const button = { bgcolor: colour("--sunk"), bordercolor: grid, font: { color: text } };
    whole.updatemenus = layout.updatemenus.map((menu) => ({ ...menu, ...button, showactive: false }));
  }
  return whole;
}

// Draws, or changes what was drawn; the promise waits for plotly.
export async function draw(element, figure) {
  drawn.set(element, figure);
  const themedLayout = themed(figure, element.clientWidth);
  if (element.closest(".grown")) themedLayout.height = Math.max(320, window.innerHeight - AROUND_PX);
  const { data, layout } = merged({ data: figure.data, layout: themedLayout }, hiddenOf(element, figure.layout));
  element.style.height = `${layout.height}px`;
  if (!window.Plotly) await loaded;
  if (drawn.get(element) !== figure) return;
  await window.Plotly?.react(element, data, layout, { responsive: true, displayModeBar: false });
}

function hiddenOf({ data, layout }, { uirevision }) {
  const isSame = layout && layout.uirevision === uirevision;
  return new Set(isSame ? data.filter(({ visible }) => visible === "legendonly").map(({ legendgroup }) => legendgroup) : []);
}

// Saves a chart as it is now, as a file of a format that plotly knows.
export function save(element, filename, format) {
  const layout = { ...element.layout, paper_bgcolor: colour("--raised") };
  const { clientWidth: width, clientHeight: height } = element;
  return window.Plotly.downloadImage({ data: element.data, layout }, { format, filename, width, height, scale: format === "png" ? 2 : 1 });
}

// Forgets a chart whose element leaves the page.
export function forget(element) {
  drawn.delete(element);
  window.Plotly?.purge(element);
}

function drawAgain() {
  for (const [element, figure] of drawn) draw(element, figure);
}

dark.addEventListener("change", drawAgain);
narrow.addEventListener("change", drawAgain);
