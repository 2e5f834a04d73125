// The field with the experiment file: line numbers, the marked line, files that are dropped or opened.
import { byId, make, show, show_wrong } from "./dom.js";
import { EXAMPLES } from "./plan_examples.js";

const KEPT = "rubberband.plan.file";
const MOST_BYTES = 256 * 1024;

export class Editor {
  // `changed()` is called when the text is another one, `asked()` when a preview is wanted.
  constructor(changed, asked) {
    this.field = byId("file");
    this.gutter = byId("gutter");
    this.wrong = byId("wrong");
    this.changed = changed;
    this.asked = asked;
    this.marked = 0;
    this.leaving = false;
    // What was typed before this script came, or came with the page, stays.
    if (this.text) this.keep();
    this.field.value ||= sessionStorage.getItem(KEPT) ?? "";
    this.is_example = !this.field.value;
    if (this.is_example) this.offer();
    if (window.location.search) history.replaceState(null, "", window.location.pathname);
    this.listen();
    this.number();
  }

  get text() {
    return this.field.value;
  }

  // An empty editor has an example in it. Whoever comes to paste a file pastes over it.
  offer() {
    this.field.value = EXAMPLES.digits;
    const select = () => this.field.value === EXAMPLES.digits && this.field.select();
    this.field.addEventListener("focus", () => setTimeout(select), { once: true });
  }

  set(text) {
    this.field.value = text;
    this.field.scrollTop = 0;
    this.touched();
  }

  keep() {
    try {
      sessionStorage.setItem(KEPT, this.text);
    } catch {
      sessionStorage.removeItem(KEPT);
    }
  }

  touched() {
    this.keep();
    this.number();
    this.clear();
    this.changed();
  }

  // Tells what is wrong beside the field, and marks the line where that is known.
  // What is wrong with the file; what is only to be known, and hinders nothing, is a `hint`.
  tell(problem, kind = "problem") {
    const { line, detail } = placed(problem.detail ?? "", this.text);
    this.wrong.replaceChildren(make("p", {}, make("b", {}, line ? `Line ${line}: ` : `${problem.title}: `), detail));
    this.wrong.className = kind;
    this.marked = line;
    if (kind === "problem") this.field.setAttribute("aria-invalid", "true");
    this.number();
    const top = line * this.lineHeight();
    if (line && (top < this.field.scrollTop || top > this.field.scrollTop + this.field.clientHeight)) {
      this.field.scrollTop = Math.max(0, top - this.field.clientHeight / 2);
    }
    show_wrong(this.wrong);
  }

  clear() {
    show(this.wrong, false);
    this.field.removeAttribute("aria-invalid");
    if (this.marked) {
      this.marked = 0;
      this.number();
    }
  }

  number() {
    const count = this.text.split("\n").length;
    this.gutter.replaceChildren(...Array.from({ length: count }, (_, at) =>
      make("span", { class: at + 1 === this.marked ? "marked" : null }, String(at + 1))));
    this.gutter.scrollTop = this.field.scrollTop;
  }

  lineHeight() {
    return parseFloat(getComputedStyle(this.field).lineHeight);
  }

  listen() {
    this.field.addEventListener("input", () => this.touched());
    this.field.addEventListener("scroll", () => { this.gutter.scrollTop = this.field.scrollTop; });
    this.field.addEventListener("keydown", (event) => this.key(event));
    byId("editor").addEventListener("submit", (event) => {
      event.preventDefault();
      this.asked();
    });
    for (const button of document.querySelectorAll("[data-example]")) {
      button.addEventListener("click", () => {
        this.set(EXAMPLES[button.dataset.example]);
        this.asked();
      });
    }
    byId("open").addEventListener("click", () => byId("chosen").click());
    byId("chosen").addEventListener("change", (event) => this.read(event.target.files[0]));
    const paper = byId("paper");
    paper.addEventListener("dragover", (event) => {
      event.preventDefault();
      paper.classList.add("over-it");
    });
    paper.addEventListener("dragleave", () => paper.classList.remove("over-it"));
    paper.addEventListener("drop", (event) => {
      event.preventDefault();
      paper.classList.remove("over-it");
      const [file] = event.dataTransfer.files;
      if (file) this.read(file);
    });
  }

  // Tab indents, as a file is written; after Esc it leaves the field.
  key(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      this.asked();
    } else if (event.key === "Escape") this.leaving = true;
    else if (event.key === "Tab" && !event.shiftKey && !this.leaving && this.text) {
      event.preventDefault();
      this.field.setRangeText("  ", this.field.selectionStart, this.field.selectionEnd, "end");
      this.touched();
    } else if (event.key !== "Tab") this.leaving = false;
  }

  async read(file) {
    if (!file) return;
    if (file.size > MOST_BYTES) {
      this.tell({ title: "Too large", detail: `${file.name} is larger than 256 KiB: no experiment file.` });
      return;
    }
    this.set(await file.text());
    this.asked();
  }
}

// The line that an error speaks of: told by the service for YAML, found by its key otherwise.
export function placed(detail, text) {
  const told = /^experiment:(\d+): (.*)$/s.exec(detail);
  if (told) return { line: Number(told[1]), detail: told[2] };
  const json = /\(line (\d+), column \d+\)/.exec(detail);
  if (json) return { line: Number(json[1]), detail };
  const path = /^([\w-]+(?:\.[\w-]+)*): /.exec(detail);
  const key = path?.[1].split(".").at(-1);
  const lines = text.split("\n").map((line, at) => [line, at + 1]);
  const found = key ? lines.filter(([line]) => new RegExp(`(^|[\\s{,"'])${key}["']?\\s*:`).test(line)) : [];
  return { line: found.length === 1 ? found[0][1] : 0, detail };
}
