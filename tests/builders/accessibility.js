// Rules that a page breaks now, with the elements; see accessibility.py.
() => {
  const faults = [];
  const note = (rule, element, more = "") => faults.push(
    `${rule}: <${element.tagName.toLowerCase()}${element.id ? " id=" + element.id : ""}`
    + `${element.className && element.className.baseVal === undefined ? " class=" + element.className : ""}>`
    + ` ${(element.textContent || "").trim().slice(0, 40)} ${more}`);
  const all = [...document.querySelectorAll("body *")];
  const seen = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true })
    && element.getClientRects().length > 0 && !element.closest("[hidden], dialog:not([open]), .unseen, .skip");
  const hidden = (element) => Boolean(element.closest("[aria-hidden=true]"));

  // Colours, laid over each other.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  canvas.canvas.width = canvas.canvas.height = 1;
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((value, at) => a * value + (1 - a) * under[at]);
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) layers.unshift(rgba(getComputedStyle(one).backgroundColor));
    const page = rgba(getComputedStyle(document.documentElement).colorScheme.includes("dark")
      && matchMedia("(prefers-color-scheme: dark)").matches ? "#121212" : "#fff").slice(0, 3);
    return layers.reduce((below, layer) => over(layer, below), page);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [dark, bright] = [light(one), light(other)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  for (const element of all) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.nodeValue.trim());
    if (!own || !seen(element) || element.closest("svg, option, :disabled, [aria-disabled=true], .js-plotly-plot")) continue;
    const style = getComputedStyle(element);
    let opacity = 1;
    for (let one = element; one; one = one.parentElement) opacity *= Number(getComputedStyle(one).opacity);
    const back = behind(element);
    const [r, g, b, a] = rgba(style.color);
    const found = contrast(over([r, g, b, a * opacity], back), back);
    const px = parseFloat(style.fontSize);
    const least = px >= 24 || (px >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    if (found < least - 0.005) note("contrast", element, `${found.toFixed(2)} < ${least}`);
  }

  // Names of what can be used, as far as they come from the page.
  const words = (id) => id.split(/\s+/).map((one) => document.getElementById(one)?.textContent.trim() ?? "").join(" ").trim();
  const name = (element) => element.getAttribute("aria-label")?.trim() || words(element.getAttribute("aria-labelledby") ?? "")
    || [...(element.labels ?? [])].map((label) => label.textContent.trim()).join(" ")
    || (/^(INPUT|SELECT|TEXTAREA|IMG)$/.test(element.tagName) ? element.getAttribute("alt") ?? element.title : element.textContent.trim())
    || element.title;
  const controls = "a[href], button, input:not([type=hidden]), select, textarea, summary, [role=button], [role=slider], [role=img], img";
  for (const element of document.querySelectorAll(controls)) if (seen(element) && !hidden(element) && !name(element)) note("name", element);
  for (const element of document.querySelectorAll("[role=region], nav, dialog[open]")) if (seen(element) && !name(element)) note("region's name", element);
  const role = (element) => element.getAttribute("role") || { SECTION: "region", NAV: "navigation" }[element.tagName] || element.tagName;
  const landmarks = [...document.querySelectorAll("nav, form[aria-label], aside, [role=region], section[aria-label], section[aria-labelledby]")];
  const named = landmarks.filter(seen).map((element) => `${role(element)} ${name(element)}`);
  const twice = named.filter((one, at) => named.indexOf(one) !== at);
  if (twice.length) note("two landmarks of one name", document.body, twice.join(", "));

  // References and ids.
  const ids = all.map((element) => element.id).filter(Boolean);
  for (const id of new Set(ids.filter((id, at) => ids.indexOf(id) !== at))) note("id twice", document.getElementById(id));
  for (const key of ["aria-labelledby", "aria-describedby", "aria-controls", "for"]) {
    for (const element of document.querySelectorAll(`[${key}]`)) {
      const gone = element.getAttribute(key).split(/\s+/).filter((id) => id && !document.getElementById(id));
      if (gone.length) note(`${key} of nothing`, element, gone.join(" "));
    }
  }

  // Structure.
  if (!document.documentElement.lang) note("language", document.documentElement);
  if (!document.title.trim()) note("title", document.documentElement);
  if (document.querySelectorAll("main").length !== 1) note("one main", document.body);
  const isRead = (element) => element.checkVisibility() && !element.closest("[hidden], dialog:not([open])");
  const headings = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].filter(isRead);
  if (headings.filter((one) => one.tagName === "H1").length !== 1) note("one h1", document.body);
  headings.forEach((one, at) => {
    const [level, before] = [one, headings[at - 1]].map((each) => (each ? Number(each.tagName[1]) : 0));
    if (level > before + 1) note("heading's order", one);
  });
  for (const element of document.querySelectorAll("ul > :not(li, script, template), ol > :not(li, script, template)")) note("list", element);
  for (const element of document.querySelectorAll("th")) if (seen(element) && !element.textContent.trim()) note("empty header", element);
  for (const element of document.querySelectorAll("dl > :not(dt, dd, div)")) note("list of terms", element);
  for (const element of document.querySelectorAll("a[href] button, button a[href], a[href] a[href], button button, label button")) note("nested controls", element);

  // Keyboard: what scrolls is reached, or holds what is.
  for (const element of all) {
    const style = getComputedStyle(element);
    const scrolls = /auto|scroll/.test(style.overflowX + style.overflowY)
      && (element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 1);
    if (scrolls && seen(element) && element.tabIndex < 0 && !element.querySelector("a[href], button, input, select, [tabindex='0']")) note("scrolled, not reached", element);
  }
  for (const element of document.querySelectorAll("[tabindex]")) if (element.tabIndex > 0) note("order of tabs", element);

  // Targets of at least 24 px, or with as much room; links within text are free.
  for (const element of document.querySelectorAll("button, select, input:not([type=hidden]), nav a[href], a.button")) {
    const { width, height } = element.getBoundingClientRect();
    const label = element.closest("label")?.getBoundingClientRect();
    if (seen(element) && !element.disabled && Math.min(Math.max(width, label?.width ?? 0), Math.max(height, label?.height ?? 0)) < 23.5
      && getComputedStyle(element).display !== "inline") note("target", element, `${width.toFixed(0)} x ${height.toFixed(0)}`);
  }
  return faults;
}
