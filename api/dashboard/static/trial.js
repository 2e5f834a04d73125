// The page of one trial.
import { offerCopies } from "./browser.js";
import { offerDialogs } from "./experiment_actions.js";
import { followFigures } from "./experiment_figures.js";
import { followLog } from "./experiment_log.js";
import { watch } from "./experiment_watch.js";

const live = document.getElementById("live");
const log = followLog(live.dataset.name);
const { acted } = watch(live, followFigures(live), log.more);
offerDialogs(`/v1${live.dataset.base}`, acted);
offerCopies();
