// One experiment's page, kept up to date while it runs.
import { follow, refresh } from "./live.js";
import { showFigures } from "./experiment_charts.js";
import { offerActions } from "./experiment_actions.js";
import { followLog } from "./experiment_log.js";

const live = document.getElementById("live");
const name = live.dataset.name;
let figuresAt = 0;
let figuresTook = 0;

const fragment = () => refresh(live, live.dataset.address + window.location.search);

async function figures() {
  const began = performance.now();
  const answer = await fetch(`/experiments/${name}/figures`, { headers: { Accept: "application/json" } });
  if (!answer.ok) return;
  await showFigures(await answer.json());
  figuresTook = performance.now() - began;
  figuresAt = performance.now();
}

// What takes long to draw is drawn less often.
const mayDraw = () => !document.hidden && performance.now() - figuresAt >= 4 * figuresTook;

let again = false;
async function changed() {
  await fragment();
  again = !mayDraw();
  if (!again) await figures();
}

const isActive = () => live.querySelector(".badge.running, .badge.starting, .badge.queued") !== null;

async function timePassed() {
  if (document.hidden || !(isActive() || again)) return;
  await changed();
}

function seen() {
  if (!document.hidden) changed();
}

// Sorting and filtering are addresses; with a script only the part that changes is fetched.
function turn(event) {
  const link = event.target.closest("a[data-part]");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  history.replaceState(null, "", new URL(link.getAttribute("href"), window.location.href).pathname + link.search);
  fragment();
}

live.addEventListener("click", turn);
showFigures(JSON.parse(document.getElementById("figures").textContent));
offerActions(name, changed);
const log = followLog(name);
follow(`/v1/events?experiment=${name}&after=${live.dataset.after}`, () => Promise.all([changed(), log.more()]));
setInterval(timePassed, 5000);
document.addEventListener("visibilitychange", seen);
