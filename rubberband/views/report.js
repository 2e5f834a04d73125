// The page of a report, in one module with charts_dense.js and charts_narrow.js.
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 700px)").matches;

function theme(layout) {
  const text = dark.matches ? "#e4e8ec" : "#1d2329";
  const grid = dark.matches ? "#333a42" : "#dde1e6";
  const themed = {
    ...layout,
    font: { color: text, size: narrow ? 10 : 12, family: "system-ui, sans-serif" },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    dragmode: narrow ? false : "zoom",
    hoverlabel: { align: "left" },
  };
  for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
    themed[name] = { ...layout[name], gridcolor: grid, zerolinecolor: grid, automargin: layout[name].automargin ?? true };
  }
  if (layout.annotations) {
    // The red of limits is too dark on a dark page; whole names of stages need a wide one.
    const font = (own) => (dark.matches && own?.color === "#d62728" ? { ...own, color: "#ff8f86" } : own);
    const short = (words) => (narrow ? String(words).replace(/^stage (\d+)$/, "$1") : words);
    themed.annotations = layout.annotations.map((note) => ({ ...note, text: short(note.text), font: font(note.font) }));
  }
  if (layout.updatemenus) {
    const button = { bgcolor: dark.matches ? "#1f2429" : "#f4f6f8", bordercolor: grid, font: { color: text } };
    themed.updatemenus = layout.updatemenus.map((menu) => ({ ...menu, ...button, showactive: false }));
  }
  return themed;
}

// Instants in the reader's time zone; another day than today is named.
for (const element of document.querySelectorAll("time[data-clock]")) {
  const at = new Date(element.dateTime);
  const day = at.toDateString() === new Date().toDateString() ? {} : { day: "numeric", month: "short" };
  element.textContent = at.toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit" });
}

const pressed = new Map(); // chart -> number of the pressed button, where lines are paths

function draw() {
  for (const [name, figure] of Object.entries(figures)) drawOne(name, figure);
}

function drawOne(name, figure) {
  const element = document.getElementById(name);
  const layoutHere = narrow ? narrowed(figure, element.clientWidth) : figure.layout;
  element.style.height = `${layoutHere.height}px`;
  if (narrow && layoutHere.meta?.panels) element.style.minWidth = "";
  const whole = turned({ data: figure.data, layout: theme(layoutHere) }, pressed.get(name));
  const { data, layout } = merged(whole, hiddenOf(element));
  const skips = (menu) => ({ ...menu, buttons: menu.buttons.map((button) => ({ ...button, method: "skip" })) });
  if (data !== whole.data) layout.updatemenus = layout.updatemenus?.map(skips);
  Plotly.react(element, data, layout, { responsive: true, displayModeBar: false });
  element.removeAllListeners("plotly_click");
  element.on("plotly_click", ({ points: [point] }) => toTrial(point));
  element.removeAllListeners("plotly_buttonclicked");
  element.on("plotly_buttonclicked", ({ button, active }) => {
    if (button.method !== "skip") return;
    pressed.set(name, active);
    drawOne(name, figure);
  });
}

// The figure with a button pressed. Plotly changes traces by itself, and not the paths that stand for them.
function turned({ data, layout }, at = 0) {
  if (!at) return { data, layout };
  const [{ x }, changes] = layout.updatemenus[0].buttons[at].args;
  const xaxis = { ...layout.xaxis, title: { text: changes["xaxis.title.text"] }, dtick: changes["xaxis.dtick"] };
  return { data: data.map((trace, index) => ({ ...trace, x: x[index] })), layout: { ...layout, xaxis } };
}

// The groups that a reader has taken out by the legend stay out.
function hiddenOf({ data = [] }) {
  return new Set(data.filter(({ visible }) => visible === "legendonly").map(({ legendgroup }) => legendgroup));
}

// A point, a curve or a bar of a trial leads to its page, where the report is a service's.
function toTrial({ customdata }) {
  const { trials } = document.querySelector("main").dataset;
  const [first] = Array.isArray(customdata) ? customdata : [customdata];
  if (trials && /^\d+$/.test(String(first))) window.location.assign(`${trials}/${first}`);
}

function sortable(table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head) => {
    head.tabIndex = 0;
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") head.click(); });
  });
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const cell = (row) => row.cells[column].textContent;
    const order = (a, b) => cell(a).localeCompare(cell(b), undefined, { numeric: true });
    const figure = (a, b) => Number(cell(a)) - Number(cell(b));
    const known = (row) => cell(row) !== "-";
    const numeric = [...body.rows].filter(known).every((row) => Number.isFinite(Number(cell(row))));
    const compare = numeric ? figure : order;
    const rows = [...body.rows].sort((a, b) => known(b) - known(a) || (down ? compare(b, a) : compare(a, b)));
    body.append(...rows);
  }));
}

// Plotly is in the page as base64 of gzip; without it there are tables only.
async function unpack() {
  const packed = document.getElementById("plotly");
  if (!packed) return;
  const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
  const unzipped = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unzipped).text();
  document.head.append(script);
  draw();
  dark.addEventListener("change", draw);
}

unpack().catch((error) => {
  document.querySelectorAll(".chart").forEach((chart) => {
    chart.style.height = "auto";
    chart.textContent = `This browser cannot draw the chart (${error.message}); one of 2023 or later can.`;
  });
});
document.querySelectorAll("table.sortable").forEach(sortable);
