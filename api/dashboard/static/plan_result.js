// What an estimate says, in words, cards and tables.
import { draw } from "./charts.js";
import { byId, make, show, table } from "./dom.js";
import { allocation_figure } from "./plan_figures.js";
import { option } from "./plan_ask.js";
import { nearest, refusal, told } from "./plan_remedies.js";
import { counted, difference, duration, gpus_each, percent, place_of, promised, usd } from "./plan_words.js";

const POLICIES = {
  optimal: "elastic, the cheapest plan",
  fastest: "elastic, the fastest plan",
  static: "fixed cluster of the best size",
  naive_elastic: "elastic, same GPUs per trial",
  greedy: "elastic, greedy search",
};

const SCHEDULERS = {
  asha: "asha: no SYNC, fixed cluster",
  none: "none: each trial trains to its end",
  sha: "sha: elastic, SYNC after each rung",
};

let allocated = "";
let asking = new AbortController();
const PAUSE_MS = 250;

// Everything below the limits, for a plan that there is.
export function show_plan(estimate) {
  show(byId("body"));
  show(byId("fixes"), false);
  const { prediction, constraints } = estimate;
  const sure = prediction.p_both === 1;
  headline(
    `${duration(prediction.jct_s.mean)} and ${usd(prediction.cost_usd.mean)} USD`,
    verdict(estimate),
    [sized(estimate.size), slack(constraints.deadline_s, prediction.jct_s.mean), room(constraints.max_cost_usd, prediction.cost_usd.mean),
      sure ? "" : `both kept with ${percent(prediction.p_both)}`, saving(estimate)],
    estimate.promise ? `The pool promises it: ${promised(estimate.promise)}.` : "",
  );
  byId("cards").replaceChildren(...cards(estimate));
  byId("stages").replaceChildren(stages(estimate), ...bill(estimate.bill ?? []));
  byId("options").replaceChildren(options(estimate));
  complete(estimate);
  byId("assumptions").replaceChildren(assumptions(estimate.assumptions));
  byId("notes").replaceChildren(...estimate.notes.map((note) => make("li", {}, note)));
  const figure = allocation_figure(estimate);
  const words = JSON.stringify(figure);
  if (words !== allocated) draw(byId("allocation"), figure);
  allocated = words;
}

// No plan: why, and what to change; `curve` is cost against deadline if it is known.
export function show_none(estimate, problem, curve, fix) {
  show(byId("body"), Boolean(curve));
  for (const section of byId("body").children) show(section, section.contains(byId("frontier")) && Boolean(curve));
  const { text, badge } = refusal(problem);
  headline(text, ["failed", badge], []);
  const is_told = problem.remedies?.length || problem.left_usd !== undefined;
  const remedies = is_told ? problem.remedies.map(told) : nearest(estimate?.constraints, problem.nearest, curve);
  const line = sentence((remedies.length && estimate?.obstacle) || problem.detail);
  // The same remedies are shown again when the curve arrives: a button that has the focus keeps it.
  const same = JSON.stringify([line, remedies]);
  if (byId("fixes").dataset.shown !== same) {
    byId("fixes").dataset.shown = same;
    byId("fixes").replaceChildren(
      make("p", {}, line),
      make("p", { class: "buttons" }, ...remedies.map(({ label, brings, changes }) =>
        make("button", { type: "button", onclick: () => fix(changes) }, label, brings ? make("small", {}, ` ${brings}`) : null))),
    );
  }
  show(byId("fixes"));
}

export function show_all() {
  for (const section of byId("body").children) show(section);
}

function headline(text, [kind, badge], facts, promise = "") {
  byId("headline").replaceChildren(
    make("p", { class: "big" }, text, " ", make("span", { class: `badge ${kind}` }, badge)),
    make("p", { class: "note" }, facts.filter(Boolean).join("; ")),
    promise ? make("p", { class: "promise" }, promise) : "",
  );
}

function sized(size) {
  if (!size || size.number === null) return "";
  return size.key === "num_samples" ? `${counted(size.number, "configuration")} fit` : `max_t: ${size.number} fits`;
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

function verdict({ feasible, constraints }) {
  if (!feasible) return ["failed", "not within the limits"];
  const free = constraints.deadline_s === null && constraints.max_cost_usd === null;
  return free ? ["none", "no limits set"] : ["done", "within the limits"];
}

function slack(deadline_s, jct_s) {
  if (deadline_s === null) return "no deadline";
  if (Math.abs(deadline_s - jct_s) < 0.01 * deadline_s) return "just in time";
  return `${duration(Math.abs(deadline_s - jct_s))} ${deadline_s >= jct_s ? "before" : "after"} the deadline`;
}

function room(max_cost_usd, cost_usd) {
  if (max_cost_usd === null) return "no budget";
  return `${usd(Math.abs(max_cost_usd - cost_usd))} USD ${max_cost_usd >= cost_usd ? "below" : "above"} the budget`;
}

function fixed_cluster(estimate) {
  return estimate.options.find((one) => one.policy === "static" && one.instance_type === estimate.instance_type && one.plan)
    ?? (estimate.baselines.static?.plan ? estimate.baselines.static : null);
}

function saving(estimate) {
  const fixed = fixed_cluster(estimate);
  if (!fixed || estimate.policy === "static") return "";
  const share = 1 - estimate.prediction.cost_usd.mean / fixed.prediction.cost_usd.mean;
  return share >= 0.005 ? `elasticity saves ${percent(share)} of the cost of the best fixed cluster` : "";
}

function cards(estimate) {
  const { prediction, constraints } = estimate;
  const fixed = fixed_cluster(estimate);
  const varies = prediction.num_samples > 1;
  const card = (name, value, note) => make("div", { class: "card" }, make("span", {}, name), make("b", {}, value), make("small", {}, note));
  const found = [
    card("time", duration(prediction.jct_s.mean), varies ? `p95 ${duration(prediction.jct_s.p95)}` : limit("deadline", constraints.deadline_s, duration)),
    card("cost", `${usd(prediction.cost_usd.mean)} USD`, varies ? `p95 ${usd(prediction.cost_usd.p95)} USD` : limit("budget", constraints.max_cost_usd, (value) => `${usd(value)} USD`)),
  ];
  if (varies) found.push(card("P(both limits kept)", percent(prediction.p_both), `${percent(constraints.confidence)} asked`));
  if (fixed && estimate.policy !== "static") {
    found.push(card("against a fixed cluster", difference(prediction.cost_usd.mean, fixed.prediction.cost_usd.mean), `that costs ${usd(fixed.prediction.cost_usd.mean)} USD`));
  }
  const most = Math.max(...estimate.plan.stages.map((stage) => stage.instances));
  found.push(card("at most", counted(most, "instance"), estimate.instance_type));
  return found;
}

const limit = (name, value, words) => (value === null ? `no ${name}` : `${name} ${words(value)}`);

function stages(estimate) {
  const several = Boolean(estimate.brackets);
  const markets = estimate.plan.stages.some((stage) => stage.market !== "on_demand");
  const columns = [["stage", ""], ...(several ? [["bracket", ""]] : []), ["trials", ""], ["iterations", ""], ["instances", ""],
    ...(markets ? [["market", "words"]] : []), [`${place_of(estimate.plan.stages[0])}s per trial`, ""], ["starts", ""], ["start-up", ""], ["training", ""], ["cost (USD)", ""]];
  const highest_usd = Math.max(...estimate.plan.stages.map((stage) => stage.cost_usd));
  const rows = estimate.plan.stages.map((stage) => [String(stage.stage), ...(several ? [String(stage.bracket)] : []),
    String(stage.trials), `${estimate.scheduler ? "up to " : ""}${stage.iterations}`, String(stage.instances), ...(markets ? [stage.market.replace("_", " ")] : []),
    gpus_each(stage), duration(stage.start_s), duration(stage.provisioning_s), duration(stage.duration_s), usd(stage.cost_usd, highest_usd)]);
  return table("The plan by stage", columns, rows);
}

function bill(lines) {
  if (lines.length < 2) return [];
  const smallest = Math.min(...lines.map((one) => one.usd).filter((amount) => amount > 0));
  return [table("The bill", [["the bill", "words"], ["cost (USD)", ""]], lines.map((one) => [one.line, usd(one.usd, smallest)]))];
}

// Asks for the rows that are simulated, once limits rest; a row stays with its estimate.
async function complete(estimate) {
  asking.abort();
  const { signal } = asking = new AbortController();
  for (const one of estimate.options.filter((each) => each.pending)) {
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    if (signal.aborted) return;
    const found = await option(one.url, signal);
    if (!found || signal.aborted) return;
    const rows = estimate.options.map((other) => (other === one ? { ...one, ...found, pending: false } : other));
    if (!found.failed) estimate.options = rows;
    byId("options").replaceChildren(options({ ...estimate, options: rows }));
  }
}

function options(estimate) {
  const fixed = fixed_cluster(estimate);
  const types = new Set([estimate.instance_type, ...estimate.options.map((one) => one.instance_type)]);
  const spot = estimate.options.some((one) => one.spot);
  const batches = new Set([estimate.batch, ...estimate.options.map((one) => one.batch)]).size > 1;
  const name = (one, own) => [
    own ? `this plan: ${SCHEDULERS[estimate.scheduler] ?? words_of(estimate)}` : SCHEDULERS[one.scheduler] ?? POLICIES[one.policy] ?? one.policy,
    types.size > 1 ? `on ${one.instance_type}` : "", spot && !own ? (one.spot ? "spot where it pays" : "on demand only") : "",
    batches && one.batch === "fixed" ? "fixed batch" : "",
  ].filter(Boolean).join(", ");
  const row = (one, own) => (one.prediction
    ? [name(one, own), shape(one), duration(one.prediction.jct_s.mean), usd(one.prediction.cost_usd.mean),
      own && !fixed ? "" : difference(one.prediction.cost_usd.mean, (fixed ?? estimate).prediction.cost_usd.mean)]
    : [name(one, own), one.failed ? `not known: ${one.failed}` : one.pending ? "simulating …" : "none within the limits", "-", "-", "-"]);
  const columns = [["option", "words"], ["instances", "words"], ["time", ""], ["cost (USD)", ""], [fixed ? "against fixed" : "against this plan", ""]];
  return table("Options", columns, [row(estimate, true), ...estimate.options.map((one) => row(one, false))]);
}

function words_of(estimate) {
  const fastest = estimate.policy === "optimal" && estimate.objective === "min_time";
  return POLICIES[fastest ? "fastest" : estimate.policy] ?? estimate.policy;
}

function shape(one) {
  const counts = one.plan.stages.map((stage) => stage.instances);
  const steps = counts.filter((count, at) => at === 0 || count !== counts[at - 1]);
  return steps.length > 8 ? `${steps.slice(0, 8).join(" > ")} > …` : steps.join(" > ");
}

function assumptions(known) {
  const signed = (value, text) => (Math.abs(value) < 1e-9 ? "0" : `${value > 0 ? "+" : "−"}${text}`);
  const rows = known.map((one) => [one.name, one.value, one.basis, one.change,
    signed(one.effect_usd, usd(Math.abs(one.effect_usd))), signed(one.effect_s, duration(Math.abs(one.effect_s))),
    one.p_kept === 1 ? "yes" : one.p_kept === 0 ? "no" : percent(one.p_kept)]);
  return table("Assumptions", [["assumption", "words"], ["assumed", "words"], ["source", "words"], ["if it is", "words"],
    ["cost (USD)", ""], ["time", ""], ["limits kept", ""]], rows);
}
