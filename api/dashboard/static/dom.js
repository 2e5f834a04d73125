// Elements from words. Text is always text, never markup.
export const byId = (id) => document.getElementById(id);

// make("td", { class: "words" }, "a", otherElement); properties that are null are left out.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// A text in parts, its instants as elements that showTimes() writes in the reader's time zone.
export function timed(text) {
  return text.split(/(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)/).map((part, at) => (at % 2 ? make("time", { datetime: part, "data-clock": true }, part) : part));
}

// A table, whose rows are cards on a phone; columns are [title, "words" or ""], rows are lists of texts or elements.
// The roles are written out, as cards undo them.
export function table(caption, columns, rows) {
  const head = ([title, kind]) => make("th", { role: "columnheader", scope: "col", class: kind || null }, title);
  const first = (cell, [title, kind]) => make("th",
    { role: "rowheader", scope: "row", class: kind || null, "data-label": kind ? null : title }, cell);
  const other = (cell, [title, kind]) => make("td", { role: "cell", class: kind || null, "data-label": title }, cell);
  const cells = (row) => row.map((cell, at) => (at ? other : first)(cell, columns[at]));
  return make("table", { class: "stacks", role: "table" },
    make("caption", { class: "unseen" }, caption),
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...columns.map(head))),
    make("tbody", { role: "rowgroup" }, ...rows.map((row) => make("tr", { role: "row" }, ...cells(row)))));
}

export function show(element, yes = true) {
  element.toggleAttribute("hidden", !yes);
}

// What is wrong, shown where a reader sees it: scrolled to if it is out of view.
export function show_wrong(element) {
  show(element);
  element.scrollIntoView({ block: "nearest" });
}
