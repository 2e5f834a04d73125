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
  const rank = document.getElementById("log-rank");
  const ranks = document.getElementById("log-ranks");
  const search = document.getElementById("log-search");
  let cursor = END;
  let reading = null;
  let turn = 0;
  let searched = 0;

  const isOver = () => !document.querySelector("h1 .badge:is(.running, .starting, .queued, .live)");
  const words = () => search.value.trim();
  const isFiltered = () => words() !== "" || rank.value !== "";
  const source = () => document.querySelector("#log-source input:checked").value;

  async function read() {
    const mine = turn;
    for (let goesOn = true; goesOn && mine === turn;) {
      const asked = new URLSearchParams({ source: source(), limit: AT_ONCE });
      if (cursor) asked.set("cursor", cursor);
      if (words()) asked.set("search", words());
      if (source() === "trials" && trial.value !== "") asked.set("trial", trial.value);
      if (source() === "trials" && rank.value !== "") asked.set("rank", rank.value);
      const answer = await fetch(`/v1/experiments/${name}/logs?${asked}`, { headers: { Accept: "application/json" } });
      const page = await answer.json();
      if (mine !== turn) return;
      if (!answer.ok) {
        note.textContent = page.detail ?? "The log cannot be read now.";
        return;
      }
      goesOn = page.lines.length >= AT_ONCE || (isFiltered() && page.next !== cursor);
      cursor = page.next;
      add(page.lines);
    }
  }

  function add(fresh) {
    offerRanks(fresh);
    const shown = fresh.slice(-MOST_LINES).map((line) => make("div", {},
      line.trial === null || trial.value !== "" ? null : make("b", {}, `${line.trial}  `),
      line.rank === null || rank.value !== "" ? null : make("b", {}, `rank ${line.rank} | `), ...marked(line.text, words())));
    lines.append(...shown);
    while (lines.childElementCount > MOST_LINES) lines.firstChild.remove();
    const shownLines = lines.childElementCount;
    note.textContent = sentence(shownLines);
    if (follow.checked && fresh.length) lines.scrollTop = lines.scrollHeight;
  }

  // The gang may have grown since the page was made.
  function offerRanks(fresh) {
    const highest = fresh.reduce((most, line) => Math.max(most, line.rank ?? 0), 0);
    if (!highest) return;
    for (let next = rank.length - 1; next <= highest; next += 1) {
      rank.append(make("option", { value: String(next) }, `rank ${next}`));
    }
    ranks.hidden = false;
  }

  function sentence(count) {
    const still = isOver() ? "" : " yet";
    const by = rank.value === "" ? "" : ` of rank ${rank.value}`;
    if (!count && words()) return `No line${by} has “${words()}”${still}.`;
    if (!count) return by ? `The log has no line${by}${still}.` : `Nothing was printed${still}.`;
    const which = by + (words() ? ` with “${words()}”` : "");
    return count === 1 ? `The last line${which}.` : `The last ${count} lines${which}.`;
  }

  function more() {
    if (document.hidden) return Promise.resolve();
    reading ??= read().catch(() => {}).finally(() => { reading = null; });
    return reading;
  }

  async function anew() {
    turn += 1;
    cursor = isFiltered() ? "" : END; // a search begins at the beginning
    lines.replaceChildren();
    await reading;
    more();
  }

  document.getElementById("log-source").addEventListener("change", () => {
    trial.disabled = rank.disabled = source() !== "trials";
    if (rank.disabled) rank.value = "";
    anew();
  });
  trial.addEventListener("change", anew);
  rank.addEventListener("change", anew);
  search.addEventListener("input", () => {
    clearTimeout(searched);
    searched = setTimeout(anew, 250);
  });
  follow.addEventListener("change", () => { if (follow.checked) lines.scrollTop = lines.scrollHeight; });
  setInterval(() => { if (follow.checked) more(); }, 5000);
  more();
  return { more };
}

// The parts of a line; what is searched for is marked, in upper or lower case.
function marked(text, words) {
  const [line, wanted] = [text.toLowerCase(), words.toLowerCase()];
  const parts = [];
  let from = 0;
  for (let at = wanted ? line.indexOf(wanted) : -1; at >= 0; at = line.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), make("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}
