/* ---- the conversation that is shown ---- */
let shown = newConversation(), info = null;
const busyNow = () => running.get(shown.id);
function keep(conversation) {
  store.put(conversation).catch(error => hint(`Not kept: ${error.message}`));
  listSoon();
}
const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
const toEnd = () => { low = true; $("log").scrollTop = $("log").scrollHeight; };
const jumpable = () => { $("jump").hidden = atEnd(); };
const follow = () => { if (low) toEnd(); jumpable(); };
// As long as somebody reads at the end, that stays in sight, whatever becomes of the window.
let low = true, tall = 0;
$("log").addEventListener("scroll", () => {
  if ($("log").clientHeight === tall) low = atEnd();
  jumpable();
});
new ResizeObserver(() => { tall = $("log").clientHeight; follow(); }).observe($("log"));
$("jump").onclick = () => { toEnd(); $("text").focus(); };

function busy() {
  const yes = Boolean(busyNow());
  $("send").hidden = yes;
  $("stop").hidden = !yes;
}
function hint(text, ...more) {
  const keys = matchMedia("(pointer: coarse), (max-width: 560px)").matches;
  $("hint").replaceChildren(text || (keys ? "" : "Enter sends · Shift+Enter for a new line · Esc stops"), ...more);
  $("hint").classList.toggle("warm", Boolean(text));
}
function nodeOf(conversation, turn) {
  const branches = branchSwitch(conversation, turn);
  if (turn.role === "tool") return toolNode(turn);
  if (turn.role === "user") {
    const node = userNode(turn, [button("quiet", "Edit", "Edit this message", () => edit(conversation, turn, node)), ...branches]);
    return node;
  }
  const view = new AnswerView(conversation, turn, () => [...actsOf(conversation, turn), ...branchSwitch(conversation, turn)]);
  const state = running.get(conversation.id);
  if (state && state.turn === turn) state.view = view;
  return view.node;
}
function actsOf(conversation, turn) {
  const again = button("quiet", "Again", "Write another answer", () => answerTo(conversation, conversation.turns[turn.parent]));
  if (!turn.content) return [again];
  const shades = button("quiet", "Probabilities", "Show how likely each token was", () => toggleShades(conversation, turn, shades));
  shades.setAttribute("aria-pressed", String(Boolean(turn.shaded && turn.tokens)));
  return [button("quiet", "Copy", "Copy the answer", made => copy(turn.content, made)), again, shades];
}
async function toggleShades(conversation, turn, made) {
  const view = made.closest(".turn").view;
  try {
    made.disabled = true;
    if (!turn.tokens) turn.tokens = await readAgain(messagesOf(branchOf({ ...conversation, head: turn.parent })), $("model").value || undefined, turn.content);
    turn.shaded = !turn.shaded;
    made.setAttribute("aria-pressed", String(turn.shaded));
    view.draw();
    keep(conversation);
  } catch (error) { hint(error.message); } finally { made.disabled = false; }
}
/* Shows a conversation, from what is known of it. */
function showConversation(conversation) {
  shown = conversation;
  setting("conversation", conversation.id);
  const turns = branchOf(conversation);
  $("log").replaceChildren(...(turns.length ? turns.map(turn => nodeOf(conversation, turn)) : [emptyNode()]));
  document.title = conversation.title ? `${conversation.title} · actorium` : "actorium";
  busy();
  toEnd();
  jumpable();
  listSoon();
}
function emptyNode() {
  const starts = ["Tell me a story about a fox.", "Write a short poem about rain.", "Explain how a rainbow forms."];
  const buttons = starts.map(text => button("", text, "", () => { say(text); $("text").focus(); }));
  return el("div", "empty", el("h2", "", "What should it say?"), el("p", "", "Answers stream as the engine makes them. Conversations stay in this browser."), el("div", "", ...buttons));
}
function showError(conversation, error) {
  if (shown !== conversation) return;
  const again = button("", "Try again", "", () => { box.remove(); retry(conversation); }), box = el("div", "error", el("span", "", error.message), again);
  box.setAttribute("role", "alert");
  for (const old of document.querySelectorAll(".error")) old.remove();
  $("log").append(box);
  toEnd();
  if (error.status === 401) { drawer("right", true); $("key").focus(); }
}
/* Asks anew for the last answer, or for the one that is missing. */
function retry(conversation) {
  const head = conversation.turns[conversation.head];
  if (head) answerTo(conversation, head.role === "assistant" ? conversation.turns[head.parent] : head);
  $("text").focus();
}
function say(text) {
  if ((!text && !attached.length) || busyNow()) return false;
  const turn = addTurn(shown, shown.head, { role: "user", content: contentWith(text) });
  shown.title ||= text.replace(/\s+/g, " ").slice(0, 60) || "A picture";
  showConversation(shown);
  answerTo(shown, turn);
  return true;
}
/* Edits a turn of the user's: what comes of it is a branch beside the old one. */
function edit(conversation, turn, node) {
  if (running.has(conversation.id)) return;
  const box = el("textarea", "edit"), cancel = button("quiet", "Cancel", "", () => { made.replaceWith(node); node.querySelector("button").focus(); });
  const made = el("form", "turn user editing", box, el("span", "acts", el("button", "main", "Send"), cancel));
  box.value = textOf(turn.content);
  box.setAttribute("aria-label", "Edited message");
  made.addEventListener("submit", event => {
    event.preventDefault();
    const text = box.value.trim(), pictures = Array.isArray(turn.content) ? turn.content.filter(part => part.type !== "text") : [];
    if (!text && !pictures.length) return;
    const edited = addTurn(conversation, turn.parent, { role: "user", content: pictures.length ? [...pictures, { type: "text", text }] : text });
    showConversation(conversation);
    answerTo(conversation, edited);
    $("text").focus();
  });
  box.addEventListener("keydown", event => {
    if (event.key === "Escape") { event.stopPropagation(); cancel.click(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); made.requestSubmit(); }
  });
  node.replaceWith(made);
  box.rows = Math.min(12, box.value.split("\n").length + 1);
  box.focus();
}
/* Gives what a tool returned; once every call of the answer has that, the model goes on. */
function giveResult(conversation, turn, call, text) {
  addTurn(conversation, conversation.head, { role: "tool", content: text, call: call.id, name: call.name });
  const given = branchOf(conversation).filter(one => one.role === "tool").map(one => one.call);
  keep(conversation);
  showConversation(conversation);
  if (turn.calls.every(one => given.includes(one.id))) answerTo(conversation, conversation.turns[conversation.head]);
  ($("log").querySelector("form.result textarea") || $("text")).focus();
}

/* ---- what is being written ---- */
function grow() {
  const box = $("text");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}
$("ask").addEventListener("submit", event => {
  event.preventDefault();
  if (!say($("text").value.trim())) return;
  $("text").value = "";
  grow();
});
$("stop").onclick = () => { stop(shown); $("text").focus(); };
$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
document.addEventListener("keydown", event => {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "Escape") {
    if (!closeDrawers() && busyNow()) stop(shown);
  } else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    $("text").focus();
  }
});
