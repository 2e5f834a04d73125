// The list of experiments, kept up to date; times of day age by themselves.
import { offerCopies } from "./browser.js";
import { follow } from "./events.js";
import { refresh } from "./live.js";

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
  compare.title = number > MOST ? `Choose 2 to ${MOST} experiments` : "Choose experiments in the list first";
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
