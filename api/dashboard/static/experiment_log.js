// The end of the log, followed: asked again with the cursor that the service gave, when something happens and now and then.
import { make } from "./dom.js";

const MOST_LINES = 2000;
const AT_ONCE = 1000;
const END = "tail"; // the cursor of whoever has read nothing and wants the last lines

export function followLog(name) {
  const lines = document.getElementById("log-lines");
  const note = document.getElementById("log-note");
  const follow = document.getElementById("log-follow");
  const trial = document.getElementById("log-trial");
  let cursor = END;
  let reading = null;
  let turn = 0;

  const isOver = () => !document.querySelector("h1 .badge:is(.running, .starting, .queued)");
  const source = () => document.querySelector("#log-source input:checked").value;

  async function read() {
    const mine = turn;
    for (let whole = true; whole && mine === turn;) {
      const asked = new URLSearchParams({ source: source(), limit: AT_ONCE, cursor });
      if (source() === "trials" && trial.value !== "") asked.set("trial", trial.value);
      const answer = await fetch(`/v1/experiments/${name}/logs?${asked}`, { headers: { Accept: "application/json" } });
      const page = await answer.json();
      if (mine !== turn) return;
      if (!answer.ok) {
        note.textContent = page.detail ?? "The log cannot be read now.";
        return;
      }
      cursor = page.next;
      add(page.lines);
      whole = page.lines.length >= AT_ONCE;
    }
  }

  function add(fresh) {
    const shown = fresh.slice(-MOST_LINES).map((line) => make("div", {},
      line.trial === null ? null : make("b", {}, `${line.trial}  `), line.text));
    lines.append(...shown);
    while (lines.childElementCount > MOST_LINES) lines.firstChild.remove();
    const shownLines = lines.childElementCount;
    const told = shownLines === 1 ? "The last line." : `The last ${shownLines} lines.`;
    note.textContent = shownLines ? told : `Nothing was printed${isOver() ? "" : " yet"}.`;
    if (follow.checked && fresh.length) lines.scrollTop = lines.scrollHeight;
  }

  function more() {
    if (document.hidden) return Promise.resolve();
    reading ??= read().catch(() => {}).finally(() => { reading = null; });
    return reading;
  }

  async function anew() {
    turn += 1;
    cursor = END;
    lines.replaceChildren();
    await reading;
    more();
  }

  document.getElementById("log-source").addEventListener("change", () => {
    trial.disabled = source() !== "trials";
    anew();
  });
  trial.addEventListener("change", anew);
  follow.addEventListener("change", () => { if (follow.checked) lines.scrollTop = lines.scrollHeight; });
  setInterval(() => { if (follow.checked) more(); }, 5000);
  more();
  return { more };
}
