// The list of experiments, kept up to date; times of day age by themselves.
import { freshKey, offerCopies } from "./browser.js";
import { byId, make, show, show_wrong } from "./dom.js";
import { announce, follow } from "./events.js";
import { refresh, say } from "./live.js";
import { busy, send } from "./requests.js";

const list = document.getElementById("experiments");
const search = document.getElementById("search");
const compare = document.getElementById("compare");
const MOST = 8;
let searched = 0;

async function again() {
  if (await refresh(list, list.dataset.address)) count();
}

// A search is an address; with a script the list follows the words as they are typed.
function find() {
  const words = new URLSearchParams(new FormData(search));
  for (const [name, value] of [...words]) if (!value.trim()) words.delete(name);
  const asked = words.size ? `?${words}` : "";
  history.replaceState(null, "", `/${asked}`);
  list.dataset.address = `/fragments/experiments${asked}`;
  again();
}

const chosen = () => [...list.querySelectorAll("input[name=name]:checked")];

function count() {
  const number = chosen().length;
  const button = compare.querySelector("button");
  button.disabled = number < 2 || number > MOST;
  button.textContent = number ? `Compare ${number}` : "Compare";
  for (const one of [byId("archive"), byId("delete")]) if (one) show(one, number > 0);
  compare.title = number > MOST ? `Choose 2 to ${MOST} experiments` : "Choose experiments in the list first";
}

// What is done with all that are chosen; the first problem is what is said.
async function each(names, ask) {
  const answers = await Promise.all(names.map(ask));
  return { answers, problem: answers.find((answer) => !answer.ok)?.body };
}

const address = (name) => `/v1/experiments/${name}`;

async function archive(event) {
  const archived = event.target.dataset.archived === "true";
  const names = chosen().map((box) => box.value);
  const { problem } = await busy(event.target, () => each(names, (name) => send("PATCH", address(name), { archived })));
  announce(names);
  say(problem ? problem.detail : archived ? "Archived. The filter “Archived” lists them." : "They are listed again.");
  again();
}

function offerDeletion() {
  const dialog = byId("deletion");
  const apply = byId("deletion-do");
  const complain = (problem) => {
    const line = dialog.querySelector("[data-problem]");
    line.textContent = problem?.detail ?? "";
    show(line, Boolean(problem));
    if (problem) show_wrong(line);
  };
  let wanted = []; // names, each with the key of deleting it
  byId("delete").addEventListener("click", async () => {
    wanted = chosen().map((box) => [box.value, freshKey()]);
    complain(null);
    apply.disabled = true;
    byId("deletion-list").replaceChildren(...wanted.map(([name]) => make("li", {}, name)));
    dialog.showModal();
    const { answers, problem } = await each(wanted, ([name]) => send("DELETE", `${address(name)}?dry_run=true`));
    byId("deletion-list").replaceChildren(...answers.map(({ body }) => make("li", {}, body.text ?? body.detail)));
    apply.disabled = Boolean(problem);
  });
  apply.addEventListener("click", async () => {
    const { problem } = await busy(apply, () => each(wanted, ([name, key]) => send("DELETE", address(name), null, key)));
    again();
    announce(wanted.map(([name]) => name));
    if (problem) return complain(problem);
    dialog.close();
    say("Deleted.");
  });
}

if (byId("deletion")) {
  byId("archive").addEventListener("click", archive);
  offerDeletion();
}
search.addEventListener("submit", (event) => {
  event.preventDefault();
  find();
});
search.addEventListener("input", () => {
  clearTimeout(searched);
  searched = setTimeout(find, 250);
});
list.addEventListener("change", count);
count();

follow({ after: list.dataset.after, changed: again });
setInterval(() => { if (!document.hidden) again(); }, 30000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) again(); });
offerCopies();
