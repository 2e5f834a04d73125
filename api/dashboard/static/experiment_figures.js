// The charts of an experiment's page. Each is asked for when it is scrolled to, and again when it may have changed.
import { showFigure } from "./experiment_charts.js";
import { topAsked } from "./experiment_curves.js";
import { set, setting } from "./experiment_settings.js";
import { COMPARING, OF_TRIALS, choiceOf, offerIterations } from "./experiment_choice.js";
import { reachScrolled } from "./live.js";

const NEAR = "200px 0px";
const LONG = "importance"; // takes seconds to compute: it is read once, and again when the experiment is over

export function followFigures(live) {
  const { base } = live.dataset;
  const near = new Set();
  const fresh = new Set(); // what was asked for since the last change
  const versions = new Map(); // chart -> the version that is shown
  const watched = new Set();
  let drawing = null;

  const nameOf = (section) => section.id.slice(2);
  const sections = () => [...live.querySelectorAll(".figure")];
  const shown = () => sections().filter(({ hidden, classList }) => !hidden && !classList.contains("off"));
  const pair = () => Object.fromEntries(["x", "y"].filter(setting).map((axis) => [axis, setting(axis)]));
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) near.add(nameOf(target));
      else near.delete(nameOf(target));
    }
    draw();
  }, { rootMargin: NEAR });

  function address(name) {
    const own = name === "curves" && topAsked() ? { top: topAsked() } : name === "contour" ? pair() : {};
    const words = new URLSearchParams([...Object.entries(own), ...(OF_TRIALS.includes(name) ? choiceOf(name) : [])]);
    const path = [LONG, "contour"].includes(name) ? name : `figures/${name}`;
    return `${base}/${path}${words.size ? `?${words}` : ""}`;
  }

  // Two at a time, so that the page answers in between.
  function draw() {
    drawing ??= Promise.all([drawOnes(), drawOnes()]).then(reachScrolled).finally(() => { drawing = null; });
    return drawing;
  }

  async function drawOnes() {
    for (let name = next(); name; name = next()) {
      fresh.add(name);
      await ask(name).catch(() => {}); // what cannot be had now is asked for at the next change
      await new Promise(requestAnimationFrame);
    }
  }

  // What is in sight comes first, what takes long last.
  function next() {
    const found = shown().map(nameOf).filter((name) => near.has(name) && !fresh.has(name));
    return found.find((name) => name !== LONG && isSeen(name)) ?? found.find((name) => name !== LONG) ?? found[0];
  }

  function isSeen(name) {
    const { top, bottom } = document.getElementById(`s-${name}`).getBoundingClientRect();
    return bottom > 0 && top < window.innerHeight;
  }

  async function ask(name) {
    const asked = address(name);
    const answer = await fetch(asked, { headers: { Accept: "application/json" } });
    const [version, found] = [answer.headers.get("etag"), answer.ok && await answer.json()];
    if (found && asked === address(name) && versions.get(name) !== version) await take(name, version, found); // the latest choice
  }

  async function take(name, version, found) {
    versions.set(name, version);
    document.getElementById(`c-${name}`).style.minHeight = "";
    if (found[name]) await showFigure(name, found[name]);
    else explain(name, found.note);
  }

  function explain(name, note) {
    const section = document.getElementById(`s-${name}`);
    section.hidden = !note;
    if (COMPARING.includes(name)) offerIterations(section);
    if (!note) return;
    section.querySelector(".note").textContent = note;
    section.querySelector(".wide").hidden = true;
  }

  // The service says which charts have something to show.
  function expect() {
    const expected = live.querySelector(".charts")?.dataset.expected.split(" ") ?? [];
    for (const section of sections()) {
      const isEmpty = versions.has(nameOf(section)) && section.hidden;
      section.hidden = isEmpty || !expected.includes(nameOf(section));
      if (!watched.has(section)) watcher.observe(section);
      watched.add(section);
    }
  }

  function changed({ isOver = false } = {}) {
    for (const name of [...fresh]) if (name !== LONG || isOver) fresh.delete(name);
    return draw();
  }

  // A browser prints what is there when the listener ends: what was not scrolled to is asked for, and waited for, here.
  addEventListener("beforeprint", () => {
    for (const name of shown().map(nameOf).filter((name) => !versions.has(name) || !fresh.has(name))) {
      const request = new XMLHttpRequest();
      request.open("GET", address(name), false);
      request.send();
      fresh.add(name);
      if (request.status === 200) take(name, request.getResponseHeader("etag"), JSON.parse(request.responseText));
    }
  });

  live.addEventListener("top", () => {
    fresh.delete("curves");
    draw();
  });

  live.addEventListener("chosen", () => {
    for (const name of OF_TRIALS) for (const known of [fresh, versions]) known.delete(name);
    expect(); // what had nothing to show may have now
    draw();
  });

  live.addEventListener("pair", ({ detail }) => {
    set(detail);
    fresh.delete("contour");
    draw();
  });

  return { expect, changed };
}
