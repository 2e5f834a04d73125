// One experiment's page, kept up to date while it runs.
import { follow } from "./events.js";
import { refresh } from "./live.js";
import { followFigures } from "./experiment_figures.js";
import { offerActions } from "./experiment_actions.js";
import { followLog } from "./experiment_log.js";
import { offerNotices } from "./notify.js";

const live = document.getElementById("live");
const name = live.dataset.name;
let lookedAt = 0;
let took = 0;
let looking = false;
let again = false; // whether something changed since it was looked at
let later = null;

const figures = followFigures(live);

async function fragment() {
  if (await refresh(live, live.dataset.address + window.location.search)) figures.expect();
}

// What takes long to find out and to draw is looked at less often, and nothing while nobody sees it.
async function changed() {
  again = true;
  if (looking || later || document.hidden) return;
  const rest_ms = lookedAt + 2 * took - performance.now();
  if (rest_ms > 0) later = setTimeout(() => { later = null; changed(); }, rest_ms);
  else await look();
}

async function look() {
  const began = performance.now();
  looking = true;
  again = false;
  try {
    const before = isActive();
    await fragment();
    await figures.changed({ isOver: before && !isActive() });
  } finally {
    looking = false;
    lookedAt = performance.now();
    took = lookedAt - began;
  }
  if (again) changed();
}

function acted() {
  took = 0;
  return changed();
}

const isActive = () => live.querySelector(".badge.running, .badge.starting, .badge.queued") !== null;

function timePassed() {
  if (!document.hidden && isActive()) changed();
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

// On a phone the stages lie side by side: the current one comes first.
function toCurrentStage() {
  const row = live.querySelector(".stages [aria-current]");
  if (row) row.parentElement.scrollLeft = row.offsetLeft - row.parentElement.offsetLeft;
}

live.addEventListener("click", turn);
toCurrentStage();
figures.expect();
offerActions(name, acted);
offerNotices(name);
const log = followLog(name);
const { after } = live.dataset;
follow({ after, experiment: name, wanted: isActive, changed: () => Promise.all([changed(), log.more()]) });
setInterval(timePassed, 5000);
document.addEventListener("visibilitychange", seen);
