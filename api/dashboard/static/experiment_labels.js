// Tags, note and archive of an experiment, changed in place.
import { byId, show } from "./dom.js";
import { announce } from "./events.js";
import { say } from "./live.js";
import { send } from "./requests.js";

export function offerLabels(live, name, changed) {
  const adding = byId("add-tag");
  if (!adding) return; // this reader changes nothing
  const noting = byId("note-form");
  const address = `/v1/experiments/${name}`;
  let before = ""; // the note that is edited

  async function change(words) {
    const answer = await send("PATCH", address, words);
    if (answer.body.note !== undefined && !answer.ok) {
      before = answer.body.note;
      say(`The note was changed meanwhile, to “${before.slice(0, 200)}”. Save again to replace that.`);
    } else if (!answer.ok) say(answer.body.detail ?? answer.body.title);
    else announce([name]);
    await changed();
    return answer.ok;
  }

  function edit(yes) {
    show(noting, yes);
    for (const id of ["remark", "edit-note"]) byId(id).classList.toggle("unseen", yes);
  }

  adding.addEventListener("submit", async (event) => {
    event.preventDefault();
    const tag = adding.elements.tag.value.trim();
    if (tag && await change({ add_tags: [tag] })) adding.reset();
  });
  noting.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (await change({ note: noting.elements.note.value, note_before: before })) edit(false);
  });
  live.addEventListener("click", (event) => {
    const { untag, archive } = event.target.dataset;
    if (untag) change({ remove_tags: [untag] });
    if (archive) change({ archived: archive === "true" });
    if ("unchanged" in event.target.dataset) edit(false);
    if (event.target.id !== "edit-note") return;
    before = byId("remark").textContent;
    noting.elements.note.value = before;
    edit(true);
    noting.elements.note.focus();
  });
}
