// The REST API, as RapiDoc shows the OpenAPI document, in the colours of the page.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const shown = document.querySelector("rapi-doc");

function paint() {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  shown.setAttribute("theme", dark.matches ? "dark" : "light");
  shown.setAttribute("bg-color", colour("--raised"));
  shown.setAttribute("text-color", colour("--text"));
  shown.setAttribute("primary-color", colour("--accent"));
}

paint();
dark.addEventListener("change", paint);
