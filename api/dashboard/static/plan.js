// The preview of a plan: the file, its limits, and the plan that follows them while the slider moves.
import { copy } from "./browser.js";
import { byId, show, show_wrong } from "./dom.js";
import { Editor } from "./plan_editor.js";
import { reach, sure_s } from "./plan_figures.js";
import { Frontier } from "./plan_frontier.js";
import { frontier, preview } from "./plan_ask.js";
import { linked, written } from "./plan_link.js";
import { Live } from "./plan_live.js";
import { over_the_file, refusal } from "./plan_remedies.js";
import { show_all, show_none, show_plan } from "./plan_result.js";
import { Submitter } from "./plan_submit.js";
import { duration, exactly, seconds_of } from "./plan_words.js";

const [slider, deadline, budget] = ["slider", "deadline", "budget"].map(byId);
const MOST_STEPS = 300;
const UNITS_S = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200];
const chart = new Frontier(byId("frontier"));

const as_in_file = () => ({ deadline: null, budget: null, more: {} });
let set = as_in_file();
let shown = { question: null, answer: null };
let limits = { deadline_s: null, max_cost_usd: null };
let range_s = null;
let curve = null;
let curveAsked = null;
let editing = 0;
let addressing = 0;

const question = () => ({ text: editor.text, policy: byId("policy").value, ...set });
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

const live = new Live(preview, told);
const editor = new Editor(() => {
  clearTimeout(editing);
  editing = setTimeout(() => shown.question && outdate(), 0);
}, () => begin());
const submitter = new Submitter(() => shown, () => live.settled());

// A preview from the file and what is set over it, by default nothing; with a curve of its own.
function begin(given = as_in_file()) {
  if (!editor.text.trim()) {
    editor.tell({ title: "Nothing to plan", detail: "paste an experiment file, or load an example." });
    byId("file").focus();
    return;
  }
  set = given;
  range_s = null;
  curve = null;
  byId("preview").textContent = "Planning…";
  live.want(question());
}

function told(answer, asked) {
  byId("preview").textContent = "Preview";
  const now = same(asked, question());
  if (asked.text !== editor.text) return;
  const slug = String(answer.body?.type ?? "").split("/").at(-1);
  shown = { question: asked, answer: answer.ok ? answer.body : null };
  if (!answer.ok && slug !== "infeasible") return void wrong(answer.body, slug, asked);
  editor.clear();
  byId("result").classList.remove("old");
  opened();
  show(byId("limit-wrong"), false);
  const estimate = answer.ok ? answer.body : answer.body.estimate ?? null;
  if (estimate && now) take(estimate.constraints);
  speed(answer, estimate);
  show(byId("fit"), answer.ok && !estimate.size && Object.values(limits).some((limit) => limit !== null));
  if (answer.ok) feasible(estimate);
  else show_none(estimate, answer.body, curve, fix);
  chart.move(limits, answer.ok ? { jct_s: sure_s(estimate), cost_usd: estimate.prediction.cost_usd.mean } : null);
  if (now) {
    address(asked);
    // Of a search that is sized to its limits there is no curve of cost: its size moves with the deadline.
    if (!estimate?.size) fetchCurve(asked);
    submitter.look(asked, answer.ok ? "" : refusal(answer.body).why);
  }
}

function feasible(estimate) {
  show_all();
  show(byId("frontier").closest("section"), !estimate.size);
  show_plan(estimate);
}

// What is wrong with the file or a limit; without a profile it can still be submitted.
function wrong(problem, slug, asked) {
  if (ours(problem, asked)) {
    byId("limit-wrong").replaceChildren(problem.detail);
    show_wrong(byId("limit-wrong"));
    byId("result").classList.add("old");
    return void submitter.look(asked, "see what is wrong with its limits");
  }
  const measured = slug === "profile-missing";
  editor.tell(problem, measured ? "hint" : "problem");
  show(byId("result"), measured);
  show_limits(!measured);
  show(byId("hello"), !measured);
  if (!measured) return void submitter.look(asked, "see what is wrong above");
  show(byId("body"), false);
  show(byId("fixes"), false);
  byId("headline").replaceChildren("Without a profile there is nothing to preview; a submission measures one first.");
  submitter.look(asked);
}

// Without a plan there is nothing that limits could be moved along.
function show_limits(yes) {
  for (const field of document.querySelectorAll(".limits .limit:not(.foot)")) show(field, yes);
}

function opened() {
  show_limits(true);
  show(byId("result"));
  show(byId("hello"), false);
}

// Whether it is a limit in a field that is wrong, not the file; the field is marked.
function ours(problem, asked) {
  const wrong_one = (field, value, key) => {
    const yes = value !== null && problem.detail.includes(key);
    if (yes) field.setAttribute("aria-invalid", "true");
    return yes;
  };
  return wrong_one(deadline, asked.deadline, "constraints.deadline") || wrong_one(budget, asked.budget, "constraints.max_cost");
}

// Limits as the service read them, into the fields that are not being typed in.
function take(read) {
  limits = read;
  if (document.activeElement !== deadline) deadline.value = read.deadline_s === null ? "" : words_of(read.deadline_s);
  if (document.activeElement !== budget) budget.value = read.max_cost_usd === null ? "" : String(read.max_cost_usd);
  deadline.removeAttribute("aria-invalid");
  budget.removeAttribute("aria-invalid");
  if (!range_s && read.deadline_s !== null) range_s = [0.4 * read.deadline_s, 2 * read.deadline_s];
  place();
}

const words_of = (at_s) => (set.deadline !== null && seconds_of(set.deadline) === at_s ? set.deadline : exactly(at_s));

function place() {
  show(byId("reset"), !same(set, as_in_file()));
  byId("more").textContent = over_the_file(set.more);
  show(byId("more"), Object.keys(set.more).length > 0);
  slider.disabled = !range_s;
  if (!range_s) return;
  const [from_s, to_s] = range_s;
  const unit_s = unit_of(range_s);
  slider.min = String(Math.ceil(from_s / unit_s));
  slider.max = String(Math.floor(to_s / unit_s));
  const at = Math.round((limits.deadline_s ?? to_s) / unit_s);
  if (document.activeElement !== slider || Math.abs(Number(slider.value) - at) > 1) slider.value = String(at);
  slider.setAttribute("aria-valuetext", limits.deadline_s === null ? "no deadline" : duration(limits.deadline_s));
  byId("earliest").textContent = duration(from_s);
  byId("latest").textContent = duration(to_s);
}

// What one step of the slider is: small, and what a reader can tell apart.
function unit_of([from_s, to_s]) {
  const fits = (unit_s) => (to_s - from_s) / unit_s <= MOST_STEPS && (unit_s >= 1 || to_s < 60);
  return UNITS_S.find(fits) ?? UNITS_S.at(-1) * Math.ceil((to_s - from_s) / UNITS_S.at(-1) / MOST_STEPS);
}

async function fetchCurve(asked) {
  const key = JSON.stringify([asked.text, asked.policy, asked.more]);
  if (curveAsked?.key === key) return;
  curveAsked?.stop.abort();
  const stop = new AbortController();
  curveAsked = { key, stop };
  const answer = await frontier(asked, stop.signal);
  if (stop.signal.aborted || curveAsked.key !== key) return;
  if (!answer.ok || answer.body.frontier.length === 0) {
    curveAsked = null;
    return;
  }
  curve = answer.body;
  range_s = reach(curve, limits.deadline_s);
  place();
  const plan = shown.answer && { jct_s: sure_s(shown.answer), cost_usd: shown.answer.prediction.cost_usd.mean };
  // First of all the chart's place is shown: what is drawn into a hidden one is not as wide as that.
  if (!shown.answer && live.known.has(JSON.stringify(question()))) live.want(question());
  await chart.show(curve, limits, plan);
}

function replan() {
  place();
  live.want(question());
}

// What a remedy changes: limits go into their fields, the rest stands beside them.
function fix({ deadline: later = null, budget: larger = null, more = {} }) {
  set = { deadline: later ?? set.deadline, budget: larger ?? set.budget, more: { ...set.more, ...more } };
  if (later !== null) deadline.value = later;
  if (larger !== null) budget.value = larger;
  replan();
  (later !== null ? deadline : larger !== null ? budget : byId("reset")).focus();
}

// The address follows the plan, but not each step of the slider: browsers limit how often it changes.
function address(asked) {
  clearTimeout(addressing);
  addressing = setTimeout(async () => {
    const link = await written(asked);
    if (same(asked, question())) history.replaceState(null, "", link || window.location.pathname);
    show(byId("link"), Boolean(link));
  }, 300);
}

async function follow_link() {
  const found = await linked().catch(() => ({ text: "" }));
  if (!found) return false;
  if (!found.text) editor.tell({ title: "Broken link", detail: "it holds no plan; ask for it again, or paste the file." });
  else {
    byId("policy").value = found.policy;
    editor.set(found.text);
    begin({ deadline: found.deadline, budget: found.budget, more: found.more });
  }
  return true;
}

function outdate() {
  byId("result").classList.add("old");
  submitter.look(question(), "the file has changed; preview it again");
}

function speed(answer, estimate) {
  const planning = estimate?.planning_s ? `planned in ${Math.max(1, Math.round(1000 * estimate.planning_s))} ms, ` : "";
  byId("speed").textContent = `${planning}answered in ${Math.max(1, Math.round(answer.ms))} ms`;
}

slider.addEventListener("input", () => {
  const at_s = Number(slider.value) * unit_of(range_s);
  set.deadline = exactly(at_s);
  deadline.value = set.deadline;
  limits = { ...limits, deadline_s: at_s };
  chart.mark(limits);
  replan();
});
deadline.addEventListener("input", () => {
  set.deadline = deadline.value.trim();
  const at_s = seconds_of(set.deadline);
  if (at_s) limits = { ...limits, deadline_s: at_s };
  chart.mark(limits);
  replan();
});
budget.addEventListener("input", () => {
  set.budget = budget.value.trim().replace(",", ".");
  replan();
});
byId("reset").addEventListener("click", () => {
  set = as_in_file();
  slider.focus();
  replan();
});
byId("fit").addEventListener("click", () => {
  const key = shown.answer?.brackets ? "max_t" : "num_samples";
  fix({ more: { [`search.scheduler.${key}`]: "auto" } });
});
byId("policy").addEventListener("change", () => shown.question && replan());
byId("link").addEventListener("click", async () => {
  copy(`${window.location.origin}${window.location.pathname}${await written(question())}`, byId("headline"));
});
window.addEventListener("hashchange", follow_link);
byId("preview").disabled = false;
if (!await follow_link() && !editor.is_example && document.activeElement !== byId("file")) begin();
