// Experiments side by side; read again every ten seconds while one of them runs.
import { showFigures } from "./experiment_charts.js";
import { refresh } from "./live.js";

const compared = document.getElementById("compared");
const draw = () => showFigures(JSON.parse(document.getElementById("figures").textContent));

async function again() {
  const isTyping = document.activeElement?.id === "add";
  if (document.hidden || isTyping || document.getElementById("active").dataset.active !== "1") return;
  if (await refresh(compared, compared.dataset.address)) draw();
}

draw();
setInterval(again, 10000);
