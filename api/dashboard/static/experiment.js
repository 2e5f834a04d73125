// One experiment's page.
import { offerCopies } from "./browser.js";
import { offerActions } from "./experiment_actions.js";
import { redraw } from "./experiment_charts.js";
import { followFigures } from "./experiment_figures.js";
import { choice, offerChoice, showChoice, table, turnTo } from "./experiment_choice.js";
import { markJumps } from "./experiment_jumps.js";
import { offerGrowth } from "./experiment_growth.js";
import { offerLabels } from "./experiment_labels.js";
import { followLog } from "./experiment_log.js";
import { carry } from "./experiment_settings.js";
import { offerView } from "./experiment_view.js";
import { watch } from "./experiment_watch.js";
import { offerNotices } from "./notify.js";

const live = document.getElementById("live");
const { name } = live.dataset;
offerView(live, redraw); // first: what is hidden is not asked for
const log = followLog(name);
const { acted, fragment } = watch(live, followFigures(live), log.more);

let shown = table();
let drawn = choice();

// Sorting and filtering are addresses; with a script only the part that changes is fetched.
function turn(event) {
  const link = event.target.closest("a[data-part]");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  turnTo(link);
  follow();
}

// The page as its address has it now.
function follow() {
  const isOther = drawn !== choice();
  [shown, drawn] = [table(), choice()];
  fragment().then(() => {
    toFirstTrial();
    if (isOther) live.dispatchEvent(new Event("chosen"));
  });
  redraw("parallel"); // its ranges may have gone
}

addEventListener("popstate", () => {
  if (table() === shown) return; // another place of the page
  carry();
  showChoice(live);
  follow();
});

// On a phone the stages lie side by side: the current one comes first.
function toCurrentStage() {
  const row = live.querySelector(".stages [aria-current]");
  if (row) row.parentElement.scrollLeft = row.offsetLeft - row.parentElement.offsetLeft;
}

// Trials lie side by side there too: another order begins with its first.
function toFirstTrial() {
  live.querySelector("table.trials tbody")?.scrollTo({ left: 0 });
}

live.addEventListener("click", turn);
live.addEventListener("brushed", follow);
offerChoice(live, follow);
toCurrentStage();
markJumps(live);
offerGrowth(live, redraw);
offerActions(name, acted);
offerLabels(live, name, acted);
offerCopies();
offerNotices(name);
