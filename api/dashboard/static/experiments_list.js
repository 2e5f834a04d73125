// The list of experiments, kept up to date; times of day age by themselves.
import { follow, refresh, say } from "./live.js";

const list = document.getElementById("experiments");
const again = () => refresh(list, list.dataset.address);

follow(`/v1/events?after=${list.dataset.after}`, again);
setInterval(() => { if (!document.hidden) again(); }, 30000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) again(); });

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
  say("Copied.");
});
