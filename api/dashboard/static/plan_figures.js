// The preview's charts as plotly figures, from the estimate's JSON.
import { counted, duration, gpus_each, place_of, time_unit, usd } from "./plan_words.js";

const STAGES = ["#3b82c4", "#8f9a2e", "#2a9d6f", "#b565a7", "#c8553d", "#6c8ebf", "#d6568c", "#7a6fd0"];
const LIMIT = "#d62728";
const STAR = "#6b63d9";
const LEGEND = {
  legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 },
  margin: { l: 10, r: 14, t: 26, b: 76 },
  hovermode: "closest",
};

// How long the plan surely takes: the quantile that the confidence asks for.
export function sure_s(estimate) {
  const times = estimate.prediction.jct_s;
  const asked = `p${Math.round(100 * estimate.constraints.confidence)}`;
  return times[asked] ?? times.mean;
}

// From where to where deadlines are drawn, and the slider goes.
export function reach(curve, asked_s) {
  const points = [...curve.frontier, ...curve.static_frontier];
  const first_s = Math.min(...points.map((point) => point.jct_s));
  const last_s = Math.max(...points.map((point) => point.jct_s));
  const near_s = asked_s !== null && asked_s < 2 * last_s ? asked_s : 0;
  return [0.8 * first_s, Math.max(1.15 * last_s, 1.5 * first_s, 1.05 * near_s)];
}

function steps(name, points, far_s, unit_s, line) {
  const last = points.at(-1);
  return {
    type: "scatter", mode: "lines", name, hoverinfo: "text",
    x: [...points.map((point) => point.jct_s / unit_s), far_s / unit_s],
    y: [...points.map((point) => point.cost_usd), last.cost_usd],
    text: [...points.map((point) => `${name}<br>${duration(point.jct_s)}, ${usd(point.cost_usd)} USD`), name],
    line: { shape: "hv", width: 2.5, ...line },
  };
}

// The lines of the limits, in the chart's units; `top_usd` is the height of the chart.
export function limit_marks(limits, unit_s, far_s, top_usd) {
  const shapes = [];
  const annotations = [];
  const line = (along, at) => ({
    type: "line", line: { width: 1.5, color: LIMIT },
    ...(along === "x" ? { x0: at, x1: at, yref: "paper", y0: 0, y1: 1 } : { y0: at, y1: at, xref: "paper", x0: 0, x1: 1 }),
  });
  if (limits.deadline_s !== null && limits.deadline_s <= far_s) {
    const x = limits.deadline_s / unit_s;
    shapes.push(line("x", x));
    annotations.push({ x, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, text: "deadline", font: { color: LIMIT } });
  }
  if (limits.max_cost_usd !== null && limits.max_cost_usd <= top_usd) {
    shapes.push(line("y", limits.max_cost_usd));
    annotations.push({
      y: limits.max_cost_usd, xref: "paper", x: 1, xanchor: "right", yanchor: "bottom", showarrow: false,
      text: "budget", font: { color: LIMIT },
    });
  }
  return { shapes, annotations };
}

// The whole figure, high enough for the chosen point (or null).
export function frontier_figure(curve, limits, point) {
  const [from_s, far_s] = reach(curve, limits.deadline_s);
  const [unit, unit_s] = time_unit(far_s);
  const costs = [...curve.frontier, ...curve.static_frontier].map((one) => one.cost_usd);
  const top_usd = Math.max(...costs, point?.cost_usd ?? 0) * 1.08;
  const data = [steps(curve.static_frontier.length ? "elastic: the cheapest plan" : "the cheapest plan", curve.frontier, far_s, unit_s, { color: STAGES[0] })];
  if (curve.static_frontier.length) {
    data.push(steps("fixed cluster: the best size", curve.static_frontier, far_s, unit_s, { color: STAGES[1], dash: "dot" }));
  }
  // The plan itself is drawn above the chart, where it moves; this is its line of the legend.
  data.push({
    type: "scatter", mode: "markers", name: "this plan", x: [null], y: [null],
    marker: { size: 15, symbol: "star", color: STAR, line: { width: 1, color: "#fff" } },
  });
  const layout = {
    height: 320, showlegend: true,
    xaxis: { title: { text: `deadline (${unit})` }, range: [from_s / unit_s, far_s / unit_s], fixedrange: true },
    yaxis: { title: { text: "cost (USD)" }, range: [0, top_usd], fixedrange: true },
    ...limit_marks({ ...limits, deadline_s: null }, unit_s, far_s, top_usd),
    ...LEGEND,
  };
  return { data, layout, from_s, far_s, top_usd, budget_usd: limits.max_cost_usd };
}

// Instances over time; the brackets of hyperband run in lanes beside each other.
export function allocation_figure(estimate) {
  const lanes = lanes_of(estimate);
  const deadline_s = estimate.constraints.deadline_s;
  const jct_s = Math.max(...lanes.flat().map((stage) => stage.start_s + stage.provisioning_s + stage.duration_s));
  const near_s = deadline_s !== null && deadline_s < 2.5 * jct_s ? deadline_s : 0;
  const end_s = 1.03 * Math.max(jct_s, near_s);
  const [unit, unit_s] = time_unit(end_s);
  const edges = [...new Set(lanes.flat().flatMap((stage) => [stage.start_s, ends(stage)]))].sort((a, b) => a - b);
  const data = lanes.map((stages, at) => lane(stages, at, lanes.length, edges, unit_s));
  const most = Math.max(...edges.map((edge) => lanes.reduce((sum, stages) => sum + (held(stages, edge)?.instances ?? 0), 0)));
  const names = lanes.length > 1 || estimate.scheduler ? [] : lanes[0].filter((stage) => ends(stage) - stage.start_s > 0.06 * end_s).map((stage) => ({
    x: (stage.start_s + ends(stage)) / 2 / unit_s, y: stage.instances, yanchor: "bottom", showarrow: false,
    text: estimate.brackets ? `${stage.bracket}.${stage.stage}`
      : ends(stage) - stage.start_s > 0.12 * end_s ? `stage ${stage.stage}` : String(stage.stage),
  }));
  const marks = limit_marks({ deadline_s, max_cost_usd: null }, unit_s, end_s, 0);
  const between = lanes.length > 1 ? [] : lanes[0].slice(1).map((stage) => ({
    type: "line", yref: "paper", x0: stage.start_s / unit_s, x1: stage.start_s / unit_s, y0: 0, y1: 1,
    line: { width: 1, dash: "dot", color: "#9aa0a8" },
  }));
  const layout = {
    height: 280, showlegend: lanes.length > 1,
    xaxis: { title: { text: `time since the start (${unit})` }, range: [0, end_s / unit_s] },
    yaxis: { title: { text: "instances" }, range: [0, most * 1.2], tickformat: "d", nticks: Math.min(most + 1, 8) },
    shapes: [...between, ...marks.shapes], annotations: [...names, ...marks.annotations],
    ...LEGEND, margin: { ...LEGEND.margin, b: lanes.length > 1 ? 76 : 44 },
  };
  return { data, layout };
}

const ends = (stage) => stage.start_s + stage.provisioning_s + stage.duration_s;

function held(stages, at_s) {
  return stages.find((stage) => stage.start_s <= at_s && at_s < ends(stage) - 1e-9) ?? null;
}

function lanes_of(estimate) {
  if (!estimate.brackets) return [estimate.plan.stages];
  const lanes = new Map();
  for (const bracket of estimate.brackets) lanes.set(bracket.lane, [...(lanes.get(bracket.lane) ?? []), ...bracket.stages]);
  return [...lanes.values()];
}

function lane(stages, at, count, edges, unit_s) {
  const words = (stage) => stage === null ? "done" : [
    `${stage.bracket === undefined ? "" : `bracket ${stage.bracket}, `}stage ${stage.stage}: ${counted(stage.instances, "instance")}, ${counted(stage.trials, "trial")} on ${gpus_each(stage)} ${place_of(stage)}${stage.gpus_per_trial === 1 ? "" : "s"} each`,
    `${duration(stage.provisioning_s)} to start, ${duration(stage.duration_s)} to train, ${usd(stage.cost_usd)} USD`,
  ].join("<br>");
  return {
    type: "scatter", mode: "lines", name: count > 1 ? `lane ${at}` : "instances", hoverinfo: "text",
    x: edges.map((edge) => edge / unit_s), y: edges.map((edge) => held(stages, edge)?.instances ?? 0),
    text: edges.map((edge) => words(held(stages, edge))),
    line: { shape: "hv", color: STAGES[at % STAGES.length], width: 1.5 }, stackgroup: "instances",
  };
}
