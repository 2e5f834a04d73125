// Starting what was previewed: whether that is allowed, what it will do, and the asking.
import { freshKey } from "./browser.js";
import { byId, make, show, show_wrong } from "./dom.js";
import { preflight, preview, submit } from "./plan_ask.js";
import { duration, promised, usd } from "./plan_words.js";

const WHERE = { local: "on this service's machine", virtual: "on a simulated cloud (nothing is spent)", aws: "on AWS" };

export class Submitter {
  // `current()` gives { question, answer } of the plan that is shown; `settled()` waits until that is the newest.
  constructor(current, settled) {
    this.current = current;
    this.settled = settled;
    this.key = null;
    byId("submit").addEventListener("click", () => this.ask());
    byId("start").addEventListener("click", () => this.start());
    byId("later").addEventListener("click", () => this.extend());
  }

  // Looks whether the present file may be submitted; `reason` tells why not, whatever the service says.
  async look(question, reason = "") {
    this.asking?.abort();
    this.asking = new AbortController();
    if (reason) return this.refuse(reason);
    const { signal } = this.asking;
    const answer = await preflight(question, signal);
    if (signal.aborted) return;
    this.told = answer.ok ? answer.body : null;
    if (!answer.ok) this.refuse(answer.body?.detail ?? "the service does not answer");
    else if (answer.body.reason) this.refuse(answer.body.reason);
    else {
      byId("submit").disabled = false;
      byId("may").textContent = `Starts ${answer.body.name} ${this.where()}, after asking once more.`;
    }
  }

  where() {
    const { provider, region } = this.told;
    return provider === "aws" ? `on AWS in ${region}` : WHERE[provider] ?? provider;
  }

  refuse(reason) {
    byId("submit").disabled = true;
    byId("may").textContent = `Cannot be submitted: ${reason}.`.replace(/\.\.$/, ".");
  }

  async ask() {
    await this.settled();
    if (byId("submit").disabled) return;
    this.chosen = { ...this.current() };
    const { question } = this.chosen;
    const fresh = await preflight(question); // others may have been submitted since it was planned
    if (fresh.ok && !fresh.body.reason) this.told = fresh.body;
    this.key = freshKey();
    this.forget();
    byId("start").disabled = false;
    byId("name").value = this.told.free_name;
    show(byId("taken"), this.told.free_name !== this.told.name);
    byId("taken").textContent = `The name ${this.told.name} is taken.`;
    this.tell();
    byId("confirm").showModal();
  }

  // What it will do, by the present limits and the present queue.
  tell() {
    const { answer } = this.chosen;
    const { queue } = this.told;
    byId("confirm-words").textContent = words(this.told, answer);
    const facts = [["runs", this.told.entrypoint], ["where", this.where()], ...limits(answer?.constraints ?? this.told)];
    if (answer?.promise) facts.push(["promised", promised(answer.promise)]);
    byId("confirm-facts").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
    const line = byId("confirm-queue");
    show(line, Boolean(queue));
    line.textContent = queue ? `${queue.text}${queue.warning && `, ${queue.warning}`}.` : "";
    line.className = queue?.warning ? "hint" : "note";
    show(byId("later"), Boolean(queue?.deadline));
    byId("later").textContent = `Deadline ${queue?.deadline}`;
    byId("start").textContent = startWords(queue);
    byId("start").classList.toggle("primary", !queue?.deadline);
    byId("later").classList.toggle("primary", Boolean(queue?.deadline));
  }

  // The same with a deadline that can be met once its turn has come.
  async extend() {
    const button = byId("later");
    this.forget();
    const question = { ...this.chosen.question, deadline: this.told.queue.deadline };
    button.disabled = true;
    const [told, planned] = await Promise.all([preflight(question), this.chosen.answer ? preview(question) : null]);
    button.disabled = false;
    const wrong = [told, planned].find((answer) => answer && !answer.ok)?.body ?? (told.body.reason && { detail: told.body.reason });
    if (wrong) return this.complain(wrong);
    this.chosen = { question, answer: planned?.body ?? null };
    this.told = told.body;
    this.key = freshKey();
    this.tell();
    byId("start").focus();
  }

  async start() {
    const button = byId("start");
    this.forget();
    if (!byId("name").reportValidity()) return;
    button.disabled = true;
    button.textContent = "Starting…";
    const { question, answer } = this.chosen;
    const name = byId("name").value === this.told.name ? null : byId("name").value;
    const made = await submit({ ...question, name }, answer?.id ?? null, this.key);
    button.textContent = startWords(this.told.queue);
    if (made.ok) {
      window.location.assign(`/experiments/${encodeURIComponent(made.body.name)}`);
      return;
    }
    button.disabled = false;
    this.key = freshKey();
    this.complain(made.body ?? {});
  }

  // A name that is taken is told beside the name, all else above the buttons.
  complain({ type = "", title = "Failed", detail = "" }) {
    const is_name = type.endsWith("/name-taken");
    const line = byId("confirm-wrong");
    line.replaceChildren(make("p", {}, make("b", {}, `${title}: `), detail));
    (is_name ? byId("taken") : byId("confirm-facts")).after(line);
    show_wrong(line);
    if (!is_name) return;
    byId("name").setAttribute("aria-invalid", "true");
    byId("name").focus();
  }

  forget() {
    show(byId("confirm-wrong"), false);
    byId("name").removeAttribute("aria-invalid");
  }
}

function startWords(queue) {
  return queue?.warning ? "Start anyway" : queue ? "Queue it" : "Start it";
}

function words(told, answer) {
  if (!answer) return `RubberBand first measures a profile of ${told.entrypoint}, then plans and runs the experiment.`;
  const { prediction, instance_type } = answer;
  const does = {
    local: "runs it on this service's machine", virtual: "simulates it, and nothing is rented", ray: "runs it on its Ray cluster",
  }[told.provider] ?? `rents ${instance_type} instances as planned, and releases them when it ends`;
  return `RubberBand ${does}: about ${duration(prediction.jct_s.mean)} and ${usd(prediction.cost_usd.mean)} USD.`;
}

function limits({ deadline_s, max_cost_usd }) {
  return [
    ["deadline", deadline_s === null ? "none" : `${duration(deadline_s)} from now`],
    ["spends at most", max_cost_usd === null ? "no limit is set" : `${usd(max_cost_usd)} USD`],
  ];
}
