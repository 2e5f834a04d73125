// Notices of the browser about one experiment, as long as one of its pages is open, also in a hidden tab.
const EVERY_MS = 30000; // hidden tabs get a turn a minute
const ACTIVE = ["queued", "starting", "running"];

// The button `notify` turns them on and off; browsers allow them to pages of https and of this machine.
export function offerNotices(name) {
  const button = document.getElementById("notify");
  if (!button || !("Notification" in window) || !isSecureContext) return;
  const kept = `notify ${name}`;
  const known = { state: button.dataset.state, isLate: false };
  let timer = null;
  button.hidden = false;

  async function look() {
    const answer = await fetch(`/v1/experiments/${name}`).catch(() => null);
    if (!answer?.ok || timer === null) return;
    const { state, reason, slack_s, summary } = await answer.json();
    const isLate = state === "running" && slack_s !== null && slack_s < 0;
    if (state !== known.state && !ACTIVE.includes(state)) tell(`${name}: ${state}`, reason || best(summary), "end");
    else if (isLate && !known.isLate) tell(`${name} is late`, "It is expected to end after its deadline.", "late");
    Object.assign(known, { state, isLate: isLate || known.isLate });
  }

  // One notice, however many tabs show the experiment.
  function tell(title, body, tag) {
    const notice = new Notification(title, { body, tag: `${name} ${tag}`, icon: "/static/icon.svg" });
    notice.onclick = () => { window.focus(); notice.close(); };
  }

  function turn(isOn) {
    button.setAttribute("aria-pressed", String(isOn));
    button.textContent = isOn ? "Notices on" : "Notify me";
    if (isOn) localStorage.setItem(kept, "on");
    else localStorage.removeItem(kept);
    clearInterval(timer);
    timer = isOn ? setInterval(look, EVERY_MS) : null;
  }

  button.addEventListener("click", async () => {
    const isOff = timer === null;
    if (isOff && await Notification.requestPermission() !== "granted") button.title = "This browser's settings forbid it.";
    else turn(isOff);
  });
  turn(localStorage.getItem(kept) === "on" && Notification.permission === "granted");
}

function best({ best_value, metric }) {
  return best_value === null ? "" : `best ${metric}: ${Number(best_value.toPrecision(6))}`;
}
