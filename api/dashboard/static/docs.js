// The page of the REST API: the operation or type that the address names is open.
import { offerCopies } from "./browser.js";

function openNamed() {
  const named = document.getElementById(decodeURIComponent(window.location.hash.slice(1)));
  if (named?.tagName !== "DETAILS") return;
  named.open = true;
  named.scrollIntoView();
}

window.addEventListener("hashchange", openNamed);
openNamed();
offerCopies();
