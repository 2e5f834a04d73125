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

// A table; columns are [title, "words" or ""], rows are lists of texts or elements.
export function table(caption, columns, rows, total = null) {
  const cells = (tag, row) => row.map((cell, at) => make(at || tag === "td" ? "td" : "th",
    { class: columns[at][1] || null, scope: at || tag === "td" ? null : "row" }, cell));
  return make("table", {},
    make("caption", { class: "unseen" }, caption),
    make("thead", {}, make("tr", {}, ...columns.map(([title, kind]) => make("th", { scope: "col", class: kind || null }, title)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("th", row)))),
    total ? make("tfoot", {}, make("tr", {}, ...cells("th", total))) : null);
}

export function show(element, yes = true) {
  element.toggleAttribute("hidden", !yes);
}
