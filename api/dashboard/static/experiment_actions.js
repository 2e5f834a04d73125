// Cancel, resume, extend, add, limit and delete: each in a dialog, and what an extension changes is shown before it is asked for.
import { freshKey } from "./browser.js";
import { make, show, show_wrong, timed } from "./dom.js";
import { say, showTimes } from "./live.js";
import { duration, usd } from "./plan_words.js";
import { busy, send } from "./requests.js";

const dialog = (id) => document.getElementById(id);

export function offerActions(name, changed) {
  const address = `/v1/experiments/${name}`;
  offerDialogs(address, changed);
  offerExtension(address, changed);
  offerAddition(address, changed);
  offerLimit(address, changed);
  offerDeletion(address);
}

// Buttons that open dialogs, and those within that ask for what needs no more words.
export function offerDialogs(address, changed) {
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-dialog]");
    if (opener) open(dialog(opener.dataset.dialog), opener.dataset);
    if (event.target.closest("[data-close]")) event.target.closest("dialog").close();
  });
  for (const button of document.querySelectorAll("[data-do]")) {
    button.addEventListener("click", () => act(button, `${address}/${button.dataset.do}`, changed));
  }
}

// `filled` has the values that fields begin with.
function open(element, filled = {}) {
  complain(element, null);
  element.dispatchEvent(new Event("opened"));
  for (const input of element.querySelectorAll("input[name]")) if (filled[input.name]) input.value = filled[input.name];
  element.showModal();
}

async function act(button, address, changed) {
  const element = button.closest("dialog");
  const answer = await busy(button, () => send("POST", address, null, freshKey()));
  if (!answer.ok) return complain(element, answer.body);
  element.close();
  say(button.dataset.said);
  changed();
}

function offerExtension(address, changed) {
  offerChange("extend", changed, "The limits were changed.", (form) => {
    const limits = limitsOf(form);
    return limits && [`${address}/extend`, limits];
  }, "Give a deadline, a max_cost or a target.");
}

function offerAddition(address, changed) {
  offerChange("add", changed, "The trials were added.", (form) => {
    const [number, values, clone] = ["num_samples", "configuration", "clone_of"].map((name) => form.elements[name].value.trim());
    if (number) return [`${address}/extend`, { num_samples: `+${number.replace(/^\+/, "")}` }];
    if (!values && !clone) return null;
    const trial = { configuration: configurationOf(values), from_checkpoint: form.elements.from_checkpoint.checked };
    return [`${address}/trials`, clone ? { ...trial, clone_of: Number(clone) } : trial];
  }, "Give a number, values, or a trial.");
}

// A change whose effect is shown before it is asked for: `asked` reads the form, and is null if nothing is asked for.
function offerChange(id, changed, said, asked, missing) {
  const element = dialog(id);
  const form = document.getElementById(`${id}-form`);
  const told = document.getElementById(`${id}-told`);
  const apply = document.getElementById(`${id}-apply`);
  let wanted = null; // what was looked at, and the key of asking for it
  const forget = () => {
    wanted = null;
    apply.disabled = true;
    told.replaceChildren();
    complain(element, null);
  };
  element.addEventListener("opened", () => {
    form.reset();
    forget();
  });
  form.addEventListener("input", forget);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    forget();
    const found = asked(form);
    if (!found) return complain(element, { detail: missing });
    const [path, body] = found;
    const answer = await busy(form.querySelector(`#${id}-look`), () => send("POST", path, { ...body, dry_run: true }));
    if (!answer.ok) return complain(element, answer.body);
    told.replaceChildren(...extension(answer.body));
    showTimes(told);
    wanted = { path, body, key: freshKey() };
    apply.disabled = false;
  });
  apply.addEventListener("click", async () => {
    const { path, body, key } = wanted;
    const answer = await busy(apply, () => send("POST", path, { ...body, dry_run: false }, key));
    if (!answer.ok) return complain(element, answer.body);
    element.close();
    say(said);
    changed();
  });
}

// `lr=0.1 width=64` as values; what is no JSON is a text.
function configurationOf(text) {
  const pairs = text.split(/\s+/).filter(Boolean).map((part) => {
    const [, name, value] = /^([^=]*)=?(.*)$/.exec(part);
    try {
      return [name, JSON.parse(value)];
    } catch {
      return [name, value];
    }
  });
  return Object.fromEntries(pairs);
}

function offerLimit(address, changed) {
  const element = dialog("limit");
  const form = document.getElementById("limit-form");
  let key = ""; // one for each change, so that a request that is sent again counts once
  element.addEventListener("opened", () => {
    form.reset();
    key = freshKey();
  });
  form.addEventListener("input", () => {
    key = freshKey();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = form.elements.max_instances.value.trim();
    const body = { max_instances: text ? Number(text) : null };
    const answer = await busy(document.getElementById("limit-apply"), () => send("POST", `${address}/limit`, body, key));
    if (!answer.ok) return complain(element, answer.body);
    element.close();
    say(text ? `At most ${text} instances from now on.` : "The limit was lifted.");
    changed();
  });
}

// What goes, and how large it is, is shown before it can be deleted.
function offerDeletion(address) {
  const element = dialog("delete");
  const told = document.getElementById("delete-what");
  const apply = document.getElementById("delete-do");
  let key = "";
  element.addEventListener("opened", async () => {
    key = freshKey();
    apply.disabled = true;
    told.textContent = "…";
    const answer = await send("DELETE", `${address}?dry_run=true`);
    if (!answer.ok) return complain(element, answer.body);
    told.textContent = answer.body.text;
    apply.disabled = false;
  });
  apply.addEventListener("click", async () => {
    const answer = await busy(apply, () => send("DELETE", address, null, key));
    if (!answer.ok) return complain(element, answer.body);
    window.location.assign("/");
  });
}

// null if nothing is asked for. An amount that is no number is left to the service to refuse.
function limitsOf(form) {
  const deadline = form.elements.deadline.value.trim();
  const cost = form.elements.max_cost.value.trim();
  const target = form.elements.target.value.trim();
  if (!deadline && !cost && !target) return null;
  const number = (text) => (Number.isFinite(Number(text)) ? Number(text) : text);
  return { ...(deadline ? { deadline } : {}), ...(cost ? { max_cost: number(cost) } : {}), ...(target ? { target: number(target) } : {}) };
}

function extension({ before, after, added_s, added_usd }) {
  const time = Math.abs(added_s) < 0.5 ? "no later" : `${duration(Math.abs(added_s))} ${added_s > 0 ? "later" : "earlier"}`;
  const money = Math.abs(added_usd) < 5e-7 ? "no extra cost" : `${usd(Math.abs(added_usd))} USD ${added_usd > 0 ? "more" : "less"}`;
  const line = (label, outlook) => make("p", { class: outlook.feasible ? null : "warn" },
    make("b", {}, `${label}: `), `${duration(outlook.jct_s)} and ${usd(outlook.cost_usd)} USD expected`,
    make("small", { class: "faint" }, " (", ...timed(limit(outlook)), `) ${outlook.reason}`));
  return [make("strong", {}, `${time}, ${money}`), line("now", before), line("then", after)];
}

function limit({ deadline_s, deadline, max_cost_usd, target }) {
  const time = deadline_s === null ? "no deadline" : `deadline ${deadline}`;
  const ends = target === null ? "" : `, target ${target}`;
  return `${time}, ${max_cost_usd === null ? "no max_cost" : `max_cost ${usd(max_cost_usd)} USD`}${ends}`;
}

// A problem stands after the field that it begins with (`max_cost: …`), or the only one that is filled in, or else
// above the buttons.
function complain(element, problem) {
  const line = element.querySelector("[data-problem]");
  for (const field of element.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  show(line, false);
  if (!problem) return;
  line.textContent = problem.detail ?? problem.title;
  line.setAttribute("role", "alert");
  const name = /^'?(?:constraints\.)?(\w+)'?[:=]/.exec(line.textContent)?.[1];
  const inputs = [...element.querySelectorAll("input")];
  const given = inputs.filter((input) => input.value.trim());
  const field = inputs.find((input) => input.name === name) ?? (given.length === 1 ? given[0] : null);
  if (field) field.after(line);
  else element.querySelector(".buttons").before(line);
  show_wrong(line);
  field?.setAttribute("aria-invalid", "true");
  field?.focus();
}
