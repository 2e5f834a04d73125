// What would make a plan possible, as buttons: { label, brings, changes: { deadline, budget, more } }.
import { counted, deadline_above, duration, usd, usd_above } from "./plan_words.js";

const LABELS = {
  "resources.gpus_per_trial.max": (value) => `Up to ${counted(value, "GPU")} per trial`,
  "resources.gpus_per_trial.min": (value) => `From ${counted(value, "GPU")} per trial on`,
  "resources.max_instances": (value) => `Up to ${counted(value, "instance")}`,
  "constraints.deadline": (value) => `Move the deadline to ${value}`,
  "constraints.max_cost": (value, was) => `${was && was < value ? "Raise" : "Set"} the budget to ${value < 1 ? value : usd(value)} USD`,
};
const AUTO = {
  "search.scheduler.num_samples": "As many configurations as the limits allow",
  "search.scheduler.max_t": "max_t as large as the limits allow",
};
const FIELDS = { "constraints.deadline": "deadline", "constraints.max_cost": "budget" };

// A remedy as the service tells it.
export function told(remedy) {
  const words = remedy.changes.map(({ key, value, was }) => LABELS[key]?.(value, was) ?? `${key}=${value}`);
  const changes = { more: {} };
  for (const { key, value } of remedy.changes) {
    if (FIELDS[key]) changes[FIELDS[key]] = String(value);
    else changes.more[key] = value;
  }
  return { label: joined(words), brings: `${duration(remedy.jct_s)}, ${usd(remedy.cost_usd)} USD`, changes };
}

// Why there is no plan, in a few words: { text, badge, why }. Only a pool says from when on there would be one.
export function refusal({ start_at, left_usd }) {
  if (left_usd !== undefined) {
    const text = "The pool has no money for this plan";
    return { text, badge: "above the month's cap", why: "the pool has no money for the plan" };
  }
  if (start_at) {
    const text = "The pool has no room by this deadline";
    return { text, badge: "promised to others", why: "the pool has no room by the deadline" };
  }
  return { text: "No plan meets these limits", badge: "not within the limits", why: "no plan meets the limits" };
}

// What stands beside the limits of what is set over the file.
export function over_the_file(more) {
  const label = (key, value) => (value === "auto" ? AUTO[key] : LABELS[key]?.(value)) ?? `${key}=${value}`;
  const words = Object.entries(more).map(([key, value]) => label(key, value));
  return words.length ? `Set here: ${joined(words).replace(/^./, (first) => first.toLowerCase())}.` : "";
}

// Where the service had no time to look for any: from the curve if it is known, else from the nearest plans.
export function nearest(limits, known, curve) {
  const points = curve?.frontier ?? [];
  const deadline_s = limits?.deadline_s ?? Infinity;
  const budget = limits?.max_cost_usd ?? Infinity;
  const affordable = points.filter((point) => point.cost_usd <= budget + 1e-9);
  const timely = points.filter((point) => point.jct_s <= deadline_s + 1e-6);
  const found = [];
  if (affordable.length) found.push({ jct_s: affordable[0].jct_s });
  if (timely.length) found.push({ cost_usd: timely.at(-1).cost_usd });
  if (!found.length && points.length) found.push(points[0]);
  if (!found.length && known) {
    if (known.jct_s > deadline_s) found.push({ jct_s: known.jct_s });
    if (known.cost_usd > budget) found.push({ cost_usd: known.cost_usd });
  }
  return found.map(({ jct_s = null, cost_usd = null }) => {
    const changes = { deadline: jct_s && deadline_above(jct_s), budget: cost_usd && usd_above(cost_usd) };
    const words = [
      changes.deadline && LABELS["constraints.deadline"](changes.deadline),
      changes.budget && LABELS["constraints.max_cost"](Number(changes.budget), budget),
    ];
    return { label: joined(words.filter(Boolean)), brings: "", changes };
  });
}

const joined = ([first, ...others]) => [first, ...others.map((word) => word.replace(/^./, (one) => one.toLowerCase()))].join(" and ");
