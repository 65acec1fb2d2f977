/* ---- the list of conversations ---- */
const BEFORE = setting("conversation"); // as this tab showed it before it was loaded anew
let listing = false;
function listSoon() {
  if (listing) return;
  listing = true;
  setTimeout(() => { listing = false; list().catch(error => hint(error.message)); }, 60);
}
async function list() {
  const all = await store.all(), wanted = $("search").value.trim().toLowerCase();
  const matches = one => !wanted || one.title.toLowerCase().includes(wanted) || Object.values(one.turns).some(turn => textOf(turn.content).toLowerCase().includes(wanted));
  const active = document.activeElement, row = active && active.closest("#conversations li"), at = row && [...row.querySelectorAll("button")].indexOf(active);
  if (row && row.querySelector("input")) return; // being renamed
  $("conversations").replaceChildren(...all.filter(one => Object.keys(one.turns).length && matches(one)).map(rowOf));
  const again = row && [...$("conversations").children].find(one => one.dataset.id === row.dataset.id);
  if (again && at >= 0) again.querySelectorAll("button")[at].focus();
  $("none").hidden = $("conversations").childElementCount > 0;
}
function rowOf(conversation) {
  const title = conversation.title || "Untitled";
  const name = button("name", title, "", () => { openConversation(conversation.id); closeDrawers(); $("text").focus(); });
  if (conversation.id === shown.id) name.setAttribute("aria-current", "true");
  if (running.has(conversation.id)) name.prepend(el("span", "dot running"));
  const row = el("li", "", name, button("quiet", "✎", `Rename ${title}`, () => rename(conversation, row)), button("quiet", "✕", `Delete ${title}`, () => removeConversation(conversation, row)));
  row.dataset.id = conversation.id;
  return row;
}
/* The conversation as this page knows it, or as it is kept. */
async function openConversation(id) {
  const state = running.get(id), kept = state ? state.conversation : (await store.all()).find(one => one.id === id);
  if (!kept || kept.id === shown.id) return;
  showConversation(kept);
  resume(kept);
}
function rename(conversation, row) {
  const field = el("input"), id = conversation.id;
  let ended = false; // what is removed loses the focus, too
  field.value = conversation.title;
  field.setAttribute("aria-label", "New name");
  const end = async keepIt => {
    if (ended) return;
    ended = true;
    const title = field.value.trim();
    field.remove();
    if (keepIt && title) {
      const one = id === shown.id ? shown : running.has(id) ? running.get(id).conversation : conversation;
      one.title = title;
      await store.put(one);
      if (one === shown) document.title = `${title} · actorium`;
    }
    await list();
    const again = [...$("conversations").children].find(one => one.dataset.id === id);
    if (again) again.querySelectorAll("button")[1].focus();
  };
  field.addEventListener("keydown", event => {
    if (event.key === "Enter") { event.preventDefault(); end(true); }
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  });
  field.addEventListener("blur", () => end(true));
  row.replaceChildren(field);
  field.select();
}
async function removeConversation(conversation, row) {
  const after = row.nextElementSibling || row.previousElementSibling;
  stop(conversation);
  await store.remove(conversation.id);
  if (conversation.id === shown.id) showConversation(newConversation());
  const undo = button("quiet", "Undo", "", async () => { store.removed.delete(conversation.id); await store.put(conversation); hint(""); await list(); $("text").focus(); });
  hint(`Deleted “${conversation.title}”. `, undo);
  (after ? after.querySelector("button") : $("new")).focus();
  await list();
}
$("new").onclick = () => { closeDrawers(); showConversation(newConversation()); $("text").focus(); };
$("search").addEventListener("input", listSoon);
$("export").onclick = async () => {
  const conversations = (await store.all()).map(one => ({ ...one, turns: Object.fromEntries(Object.entries(one.turns).map(([id, { pending, ...turn }]) => [id, turn])) }));
  const link = el("a"), url = URL.createObjectURL(new Blob([JSON.stringify({ conversations }, null, 1)], { type: "application/json" }));
  link.href = url;
  link.download = "conversations.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
};
$("import").onclick = () => $("import-file").click();
$("import-file").onchange = async () => {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  if (!file) return;
  try {
    const found = imported(await file.text());
    for (const one of found) await store.put(one);
    hint(`${found.length} conversation${found.length === 1 ? "" : "s"} taken in.`);
    await list();
  } catch (error) { hint(`${file.name} is no file of conversations: ${error.message}`); }
};

/* ---- the start ---- */
(async () => {
  showConversation(shown);
  hint("");
  meet();
  watch(onSample, error => showState("bad", error.status === 401 ? "Locked" : "Away", error.message));
  const before = BEFORE && (await store.all()).find(one => one.id === BEFORE);
  if (before && !branchOf(shown).length) { showConversation(before); resume(before); }
})();
