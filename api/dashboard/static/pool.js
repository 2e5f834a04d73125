// The pool that experiments share, read again every ten seconds.
import { showFigures } from "./experiment_charts.js";
import { refresh } from "./live.js";

const pool = document.getElementById("pool");

async function draw() {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  await showFigures(figures);
  for (const section of pool.querySelectorAll(".figure")) section.hidden = !(section.id.slice(2) in figures);
}

async function again() {
  if (!document.hidden && (await refresh(pool, pool.dataset.address))) await draw();
}

draw();
setInterval(again, 10000);
document.addEventListener("visibilitychange", again);
