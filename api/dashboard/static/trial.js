// The page of one trial.
import { offerCopies } from "./browser.js";
import { followFigures } from "./experiment_figures.js";
import { followLog } from "./experiment_log.js";
import { watch } from "./experiment_watch.js";

const live = document.getElementById("live");
const log = followLog(live.dataset.name);
watch(live, followFigures(live), log.more);
offerCopies();
