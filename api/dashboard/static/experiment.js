// One experiment's page.
import { keep, kept } from "./address.js";
import { offerCopies } from "./browser.js";
import { offerActions } from "./experiment_actions.js";
import { redraw } from "./experiment_charts.js";
import { CHOICES } from "./experiment_curves.js";
import { followFigures } from "./experiment_figures.js";
import { choice, offerChoice } from "./experiment_choice.js";
import { markJumps } from "./experiment_jumps.js";
import { offerGrowth } from "./experiment_growth.js";
import { offerLabels } from "./experiment_labels.js";
import { followLog } from "./experiment_log.js";
import { watch } from "./experiment_watch.js";
import { offerNotices } from "./notify.js";

const live = document.getElementById("live");
const { name } = live.dataset;
const log = followLog(name);
const { acted, fragment } = watch(live, followFigures(live), log.more);

// Sorting and filtering are addresses; with a script only the part that changes is fetched.
function turn(event) {
  const link = event.target.closest("a[data-part]");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  const before = choice();
  const chosen = Object.fromEntries(CHOICES.map((name) => [name, kept().get(name)]));
  history.replaceState(null, "", new URL(link.getAttribute("href"), window.location.href).pathname + link.search);
  keep(chosen);
  fragment().then(() => { if (choice() !== before) live.dispatchEvent(new Event("chosen")); });
  redraw("parallel"); // its ranges may have gone
}

// On a phone the stages lie side by side: the current one comes first.
function toCurrentStage() {
  const row = live.querySelector(".stages [aria-current]");
  if (row) row.parentElement.scrollLeft = row.offsetLeft - row.parentElement.offsetLeft;
}

live.addEventListener("click", turn);
const choose = () => fragment().then(() => live.dispatchEvent(new Event("chosen")));
live.addEventListener("brushed", choose);
offerChoice(live, choose);
toCurrentStage();
markJumps(live);
offerGrowth(live, redraw);
offerActions(name, acted);
offerLabels(live, name, acted);
offerCopies();
offerNotices(name);
