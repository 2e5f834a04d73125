// The line of jumps stays in sight, and marks the place that is read.
const HELD_MS = 5000;
const READ = 0.3; // a place that begins above this part of the window is read

export function markJumps(live) {
  let waiting = false;

  function mark() {
    waiting = false;
    const links = [...live.querySelectorAll(".jumps a:not([hidden])")];
    const places = links.map((link) => [link, document.querySelector(link.hash)]).filter(([, place]) => place?.getClientRects().length);
    const read = places.filter(([, place]) => place.getBoundingClientRect().top < READ * window.innerHeight);
    const bottom = window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 2;
    const [here] = (bottom ? places.at(-1) : read.at(-1)) ?? [];
    if (links.filter((link) => link.ariaCurrent === "true").join() === String(here ?? "")) return;
    for (const link of links) link.ariaCurrent = link === here ? "true" : null;
  }

  function later() {
    if (!waiting) requestAnimationFrame(mark);
    waiting = true;
  }

  // Charts above a place get their height as they are drawn: it is held in sight for that long, unless the reader moves.
  let held = null;
  let holding = 0;
  live.addEventListener("click", (event) => {
    const link = event.target.closest(".jumps a");
    held = link && document.querySelector(link.hash);
    clearTimeout(holding);
    holding = setTimeout(() => { held = null; }, HELD_MS);
  });
  for (const kind of ["wheel", "touchmove", "keydown", "pointerdown"]) addEventListener(kind, () => { held = null; }, { passive: true });
  new ResizeObserver(() => held?.scrollIntoView()).observe(document.body);

  addEventListener("scroll", later, { passive: true });
  // What reloads has no mark.
  new MutationObserver(later).observe(live, { subtree: true, childList: true, attributeFilter: ["aria-current"] });
  later();
}
