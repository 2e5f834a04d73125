// The line of jumps stays in sight, and marks the place that is read.
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

  addEventListener("scroll", later, { passive: true });
  // What reloads has no mark.
  new MutationObserver(later).observe(live, { subtree: true, childList: true, attributeFilter: ["aria-current"] });
  later();
}
