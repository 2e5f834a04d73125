// Which charts are shown, and in which order: a list that pointer and keys change, and a link that shows others the same.
import { kept } from "./address.js";
import { copy } from "./browser.js";
import { byId, make } from "./dom.js";
import { backToOwn, backToUsual, isLink, keepAsOwn, linkTo, set, setting } from "./experiment_settings.js";

const LONGEST = 40; // letters of a name that is passed over
let order = []; // names of all charts, also of those that this experiment has not
const off = new Set();
const asked = new Set(); // hidden, but shown for this visit as the address leads there

export const isOff = (name) => off.has(name) && !asked.has(name);
const nameOf = (section) => section.id.replace(/^s-/, "");

// What the browser keeps names all charts, those that are hidden as `-slices`: one of a later version is shown. A link names
// those that it shows.
const whole = () => order.map((name) => (off.has(name) ? `-${name}` : name)).join(" ");
const ofLink = () => order.filter((name) => !isOff(name)).join(" ") || whole();

// Reads a view. What a link does not name is hidden, and last in the list; else it stays behind the one before it. Returns the
// names of no chart.
function read(text, usual) {
  const words = text.split(/\s+/).filter(Boolean);
  const bare = (word) => word.replace(/^-/, "");
  order = [...new Set(words.map(bare))].filter((name) => usual.includes(name));
  const isWhole = !isLink || !words.some((word) => usual.includes(word));
  const place = (at) => (!isWhole ? order.length : at ? order.indexOf(usual[at - 1]) + 1 : 0);
  usual.forEach((name, at) => {
    if (words.includes(`-${name}`) || !(isWhole || words.includes(name))) off.add(name);
    if (!order.includes(name)) order.splice(place(at), 0, name);
  });
  return words.map(bare).filter((name) => !usual.includes(name));
}

// Puts charts and jumps in order, and hides those that are off; also in a part of the page that is yet to be shown.
export function arrange(root) {
  if (!order.length) return;
  sort([...root.querySelectorAll(".charts > section")], nameOf);
  sort([...root.querySelectorAll(".jumps > [data-key]")], (link) => link.dataset.key);
}

function sort(elements, name) {
  for (const one of elements) one.classList.toggle("off", isOff(name(one)));
  const sorted = [...elements].sort((one, other) => order.indexOf(name(one)) - order.indexOf(name(other)));
  if (sorted.every((one, at) => one === elements[at])) return; // what is moved would lose the focus
  const behind = elements.at(-1).nextSibling;
  for (const one of sorted) behind ? behind.before(one) : elements[0].parentElement.append(one);
}

// `redraw(name)` draws a chart that is shown again, in the width that it has now.
export function offerView(live, redraw) {
  const box = byId("view");
  if (!box) return; // nothing has started
  const usual = live.dataset.charts.split(" ");
  const rows = make("ol");
  const said = make("p", { class: "note", role: "status" });
  const passedOver = read(setting("view"), usual).map((name) => `“${name.slice(0, LONGEST)}”`);
  let listed = "";

  function changed(name) {
    if (isLink) set({ view: ofLink() });
    else set({ view: whole() === usual.join(" ") ? "" : whole() });
    arrange(live);
    fill();
    if (name && !isOff(name)) redraw(name);
  }

  const titles = () => new Map([...live.querySelectorAll(".charts > section:not([hidden])")]
    .map((section) => [nameOf(section), section.querySelector("h2").textContent]));

  function turn(name, isOn) {
    asked.delete(name);
    if (isOn) off.delete(name);
    else off.add(name);
    changed(name);
  }

  function move(name, by) {
    const names = [...titles().keys()];
    const other = names[names.indexOf(name) + by];
    order = order.filter((one) => one !== name);
    order.splice(order.indexOf(other) + (by > 0 ? 1 : 0), 0, name);
    changed();
  }

  function fill() {
    const shown = [...titles()];
    const hidden = shown.filter(([name]) => isOff(name)).length;
    const now = JSON.stringify([shown, shown.map(([name]) => isOff(name))]);
    if (now === listed) return;
    listed = now;
    box.querySelector("summary").textContent = hidden ? `Charts: ${hidden} of ${shown.length} hidden` : "Charts";
    const { id } = rows.contains(document.activeElement) ? document.activeElement : {};
    rows.replaceChildren(...shown.map(([name, title], at) => row(name, title, at === 0, at === shown.length - 1)));
    const again = id && byId(id);
    if (again) (again.disabled ? again.parentElement.querySelector("button:enabled") : again)?.focus();
  }

  const row = (name, title, isFirst, isLast) => make("li", {},
    make("label", { class: "check" },
      make("input", { type: "checkbox", id: `show-${name}`, checked: !isOff(name), onchange: ({ target }) => turn(name, target.checked) }), title),
    make("span", {}, mover(name, title, "up", isFirst), mover(name, title, "down", isLast)));

  const mover = (name, title, way, isEnd) => make("button", {
    type: "button", class: "quiet", id: `${way}-${name}`, disabled: isEnd, "aria-label": `Move ${title} ${way}`,
    onclick: () => move(name, way === "up" ? -1 : 1),
  }, way === "up" ? "↑" : "↓");

  function say(...more) {
    passedOver.push(...more);
    const names = [...new Set(passedOver)];
    if (names.length) said.textContent = `Unknown in this view, and passed over: ${names.slice(0, 5).join(", ")}${names.length > 5 ? ", …" : ""}.`;
    said.hidden = !names.length;
  }

  // A link to a chart that is hidden shows it, and changes nothing that is kept.
  function reach(id) {
    const section = byId(id)?.closest(".charts > section");
    if (!section) return;
    const wasOff = isOff(nameOf(section));
    asked.add(nameOf(section));
    arrange(live);
    fill();
    if (wasOff) redraw(nameOf(section));
    section.scrollIntoView();
  }

  const reachGrown = () => reach(`s-${kept().get("chart")}`);
  const reachNamed = () => reach(window.location.hash.slice(1));

  const button = (text, onclick) => make("button", { type: "button", onclick }, text);
  const address = make("code");
  const copyLink = () => {
    address.textContent = linkTo(ofLink());
    address.hidden = false;
    copy(address.textContent, address);
  };
  address.hidden = true;
  box.querySelector("details").append(rows, make("div", { class: "buttons" },
    isLink ? null : button("As it was", backToUsual), button("Copy link", copyLink)), address);
  if (isLink) box.append(make("div", { class: "row" }, "These are the charts of a link. This browser keeps its own.", make("span", { class: "buttons" },
    button("Show mine", backToOwn), button("Keep these", () => keepAsOwn(whole())))));
  box.append(said);
  document.addEventListener("passedover", ({ detail }) => say(`“${detail.slice(0, LONGEST)}”`));
  new MutationObserver(fill).observe(live, { subtree: true, attributeFilter: ["hidden"] });
  addEventListener("hashchange", reachNamed);
  addEventListener("popstate", reachGrown);
  arrange(live);
  fill();
  say();
  reachNamed();
  reachGrown();
}
