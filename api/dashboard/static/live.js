// What keeps a page up to date: parts of it that are fetched again.

const latest = new WeakMap(); // element -> the address that was asked for last

// Puts what the service renders now into `element`, once `arranged` was called with it. Nodes that are the same stay, and
// with them focus and selection.
export async function refresh(element, address, arranged = () => {}) {
  latest.set(element, address);
  const answer = await fetch(address, { headers: { Accept: "text/html" } });
  if (answer.redirected || [401, 404].includes(answer.status)) { // signed out, or deleted meanwhile
    window.location.reload();
    return false;
  }
  if (!answer.ok) return false;
  const made = document.createElement("template");
  made.innerHTML = await answer.text();
  if (latest.get(element) !== address) return false; // another choice was made meanwhile
  showTimes(made.content);
  arranged(made.content);
  patch(element, made.content);
  reachScrolled();
  return true;
}

// Instants in the reader's time zone: the text of those with `data-clock`, and what is shown on hovering.
export function showTimes(root) {
  const today = new Date().toDateString();
  for (const element of root.querySelectorAll("time[datetime]")) {
    const at = new Date(element.dateTime);
    const day = at.toDateString() === today ? {} : { day: "numeric", month: "short" };
    if ("clock" in element.dataset) element.textContent = at.toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit" });
    element.title = at.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "long" });
  }
}

// Parts that scroll, on a phone or where they are long, are reached by keyboard too. All are measured before any changes.
export function reachScrolled() {
  const parts = [...document.querySelectorAll("tbody, .charts, .note, .history, .wide, #troubles ul")];
  const own = parts.filter((element) => !element.hasAttribute("tabindex") || "reached" in element.dataset);
  const measured = own.map((element) => {
    const { overflowX, overflowY } = getComputedStyle(element);
    const isLarger = element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 1;
    return [element, isLarger && /auto|scroll/.test(overflowX + overflowY)];
  });
  for (const [element, scrolls] of measured) {
    element.toggleAttribute("data-reached", scrolls);
    if (scrolls) element.setAttribute("tabindex", "0");
    else element.removeAttribute("tabindex");
  }
}

showTimes(document);
reachScrolled();
window.addEventListener("load", reachScrolled);
window.addEventListener("resize", reachScrolled);

// Makes the children of `old` those of `fresh`, changing no more than differs. Elements are known by id or data-key.
export function patch(old, fresh) {
  const nodes = [...fresh.childNodes];
  const wanted = new Set(nodes.map(key));
  const known = new Map();
  for (const child of [...old.children].filter(key)) {
    if (wanted.has(key(child))) known.set(key(child), child);
    else child.remove(); // first, so that what stays need not be moved: that takes the focus from it
  }
  let at = old.firstChild;
  for (const node of nodes) {
    if (node.nodeType === Node.ELEMENT_NODE) at = pastBlanks(at);
    const same = key(node) ? known.get(key(node)) : at && alike(at, node) ? at : null;
    if (!same) {
      old.insertBefore(node, at);
      continue;
    }
    if (same === at) at = at.nextSibling;
    else old.insertBefore(same, at);
    update(same, node);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

// Blanks between elements differ where a part was rendered inside of a page.
function pastBlanks(node) {
  while (node?.nodeType === Node.TEXT_NODE && !node.nodeValue.trim() && node.nextSibling) {
    node = node.nextSibling;
    node.previousSibling.remove();
  }
  return node;
}

function key(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key || "" : "";
}

function alike(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName && !key(one);
}

function update(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (old.isEqualNode(fresh) || old.hasAttribute("data-keep")) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  patch(old, fresh);
}

// Says something to everybody, screen readers included; it goes away by itself.
export function say(text) {
  const told = document.getElementById("told");
  const line = document.createElement("p");
  line.textContent = text;
  told.replaceChildren(line);
  setTimeout(() => line.remove(), 5000);
}
