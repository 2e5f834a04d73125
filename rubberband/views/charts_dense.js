// Lines of many trials. Plotly makes an element of each stretch between two gaps, and that takes most of the time of a
// chart of thousands of trials. Here, all stretches of a trace are one path. The trace keeps its points, for hovering.
const MANY = 50; // gaps of a trace

const isLines = ({ type, mode }) => type === "scatter" && mode === "lines";
const isDense = (trace) => isLines(trace) && trace.y.reduce((gaps, y) => gaps + (y === null), 0) > MANY;

// The figure of lines with paths in their place, if a trace of it is dense. `hidden` are the groups that a reader has
// taken out by the legend: plotly remembers that of traces and not of paths.
export function merged({ data, layout }, hidden = new Set()) {
  if (!data.some(isDense) || !data.every(isLines)) return { data, layout };
  const lines = data.map((trace, at) => ({ ...trace, legendgroup: trace.legendgroup ?? `lines ${at}` }));
  const points = lines.map(({ line, ...trace }) => ({
    ...trace, mode: "none", showlegend: false, hoverlabel: layout.hoverlabel?.bgcolor ? {} : { bgcolor: line.color },
  }));
  const legend = lines.filter(({ name, showlegend }) => name && showlegend !== false);
  const entries = legend.map((trace) => ({ ...trace, x: [null], y: [null], customdata: [null] }));
  const paths = lines.map((trace) => ({ ...pathOf(trace, layout), visible: hidden.has(trace.legendgroup) ? "legendonly" : true }));
  return { data: [...points, ...entries], layout: { ...layout, shapes: [...(layout.shapes ?? []), ...paths] } };
}

function pathOf({ legendgroup, x, y, line, opacity }, layout) {
  const [isLogX, isLogY] = [layout.xaxis?.type === "log", layout.yaxis?.type === "log"];
  const isPoint = (at) => at < x.length && x[at] !== null && y[at] !== null && !(isLogX && x[at] <= 0) && !(isLogY && y[at] <= 0);
  let path = "";
  for (let at = 0, isOn = false; at < x.length; at += 1) {
    const is = isPoint(at);
    if (is && (isOn || isPoint(at + 1))) path += `${isOn ? "L" : "M"}${x[at]},${y[at]}`;
    isOn = is;
  }
  return { type: "path", path: path || "M0,0", line, opacity, legendgroup, layer: "above" };
}
