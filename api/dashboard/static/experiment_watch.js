// A page of an experiment or of one of its trials, kept up to date while it runs.
import { follow } from "./events.js";
import { arrange } from "./experiment_view.js";
import { refresh } from "./live.js";

// `figures` are the charts (see experiment_figures.js), `more()` reads whatever else changes.
export function watch(live, figures, more) {
  let lookedAt = 0;
  let took = 0;
  let looking = false;
  let again = false; // whether something changed since it was looked at
  let later = null;

  const isActive = () => live.querySelector(".badge:is(.running, .starting, .queued, .live)") !== null;

  async function fragment() {
    if (await refresh(live, live.dataset.address + window.location.search, arrange)) figures.expect();
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

  figures.expect();
  const { after, name } = live.dataset;
  follow({ after, experiment: name, wanted: isActive, changed: () => Promise.all([changed(), more()]) });
  setInterval(() => { if (!document.hidden && isActive()) changed(); }, 5000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) changed(); });
  return { acted, fragment };
}
