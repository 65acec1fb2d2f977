/* ---- turns as they are shown ---- */
class AnswerView {
  constructor(conversation, turn, acts) {
    this.conversation = conversation; this.turn = turn; this.waiting = false;
    this.boxes = el("div", "boxes"); this.said = el("div", "said");
    this.acts = el("span", "acts"); this.counts = el("span"); this.note = el("span", "note");
    this.node = el("article", "turn assistant", this.boxes, this.said, el("div", "facts", this.acts, this.counts, this.note));
    this.node.view = this;
    this.node.setAttribute("aria-label", "Answer");
    this.offered = acts;
    this.live(Boolean(turn.pending));
  }
  live(yes) {
    this.node.classList.toggle("live", yes);
    if (yes) this.node.setAttribute("aria-busy", "true"); else this.node.removeAttribute("aria-busy");
    this.acts.replaceChildren(...(yes ? [] : this.offered(this)));
    this.draw();
  }
  drawSoon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; if (this.node.isConnected) { this.draw(); follow(); } });
  }
  /* A folded text beside the answer, made when there is some. */
  aside(name, title, text, kind) {
    let box = this.boxes.querySelector(`[data-name="${name}"]`);
    if (!box) {
      box = el("details", `aside ${kind}`, el("summary"), el("div"));
      box.dataset.name = name;
      box.open = kind === "call";
      this.boxes.append(box);
    }
    box.firstChild.textContent = title;
    const inner = box.children[1];
    if (inner.textContent.length <= text.length && text.startsWith(inner.textContent)) inner.append(text.slice(inner.textContent.length)); else inner.textContent = text;
    return box;
  }
  draw() {
    const turn = this.turn, calls = turn.calls || [];
    if (turn.reasoning) this.aside("reasoning", turn.thought ? `Thought for ${turn.thought.toFixed(1)} s` : "Thinking", turn.reasoning, "reasoning");
    calls.forEach((call, i) => {
      const box = this.aside(`call${i}`, `Calls ${call.name}`, turn.pending ? call.arguments : indented(call.arguments), "call");
      if (!turn.pending && call.id) this.offerResult(box, call);
    });
    const asked = turn.tokens && turn.tokens.length && (turn.shaded || (turn.pending && turn.shaded !== false));
    if (asked) drawTokens(this.said, turn.tokens, turn.content, !turn.reasoning && !calls.length);
    else {
      if (this.said.classList.contains("spread")) { this.said.classList.remove("spread"); this.said.replaceChildren(); delete this.said.source; }
      render(this.said, turn.content);
    }
    this.counts.textContent = countsOf(turn);
    this.note.textContent = turn.note || "";
  }
  /* A field for what a tool returned, until it is given. */
  offerResult(box, call) {
    const given = Object.values(this.conversation.turns).some(one => one.role === "tool" && one.call === call.id);
    const field = box.querySelector("form");
    if (given && field) field.remove();
    if (given || field) return;
    const text = el("textarea"), made = el("form", "result", text, el("button", "", "Give result"));
    text.rows = 1; text.placeholder = "What the tool returned";
    text.setAttribute("aria-label", `What ${call.name} returned`);
    made.addEventListener("submit", event => { event.preventDefault(); if (text.value.trim()) giveResult(this.conversation, this.turn, call, text.value); });
    box.append(made);
  }
}
function indented(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}
function countsOf(turn) {
  const used = turn.usage || {}, made = used.completion_tokens, parts = [];
  if (made) {
    const seconds = Math.max(1e-3, ((turn.pending ? performance.now() - turn.began : turn.took) - (turn.first || 0)) / 1000);
    parts.push(`${made} token${made === 1 ? "" : "s"}`);
    if (turn.took !== undefined || turn.began !== undefined) parts.push(`${(made / seconds).toFixed(0)} tokens/s`);
  }
  if (turn.first !== undefined) parts.push(`first after ${Math.round(turn.first)} ms`);
  const details = used.completion_tokens_details || {};
  const drafted = (details.accepted_prediction_tokens || 0) + (details.rejected_prediction_tokens || 0);
  if (drafted) parts.push(`${Math.round(100 * details.accepted_prediction_tokens / drafted)} % of drafts accepted`);
  const cached = (used.prompt_tokens_details || {}).cached_tokens;
  if (cached) parts.push(`${cached} of ${used.prompt_tokens} prompt tokens cached`);
  return parts.join(" · ");
}
const textOf = content => typeof content === "string" ? content : content.filter(part => part.type === "text").map(part => part.text).join("");
function picture(url, video) {
  const made = el(video ? "video" : "img", "picture");
  made.src = url;
  if (video) { made.muted = true; made.setAttribute("aria-label", "a video of yours"); } else made.alt = "a picture of yours";
  return made;
}
function userNode(turn, acts) {
  const shown = Array.isArray(turn.content) ? turn.content.filter(part => part.type !== "text").map(part => picture((part.image_url || part.video_url).url, String((part.video_url || {}).url || "").startsWith("data:video/"))) : [];
  const node = el("article", "turn user", el("div", "bubble", ...shown, textOf(turn.content)), el("span", "acts", ...acts));
  node.setAttribute("aria-label", "You");
  node.turn = turn;
  return node;
}
function toolNode(turn) {
  const box = el("details", "aside call", el("summary", "", `${turn.name || "A tool"} returned`), el("div", "", turn.content));
  return el("article", "turn tool", box);
}
/* "‹ 2 of 3 ›" for a turn that has others in its place. */
function branchSwitch(conversation, turn) {
  const all = siblings(conversation, turn), at = all.indexOf(turn);
  if (all.length < 2) return [];
  const to = (sign, label, other) => {
    const made = button("quiet", sign, label, () => { conversation.head = newestLeaf(conversation, other).id; keep(conversation); showConversation(conversation); });
    made.disabled = !other;
    return made;
  };
  return [el("span", "branches", to("‹", "The one before", all[at - 1]), `${at + 1} of ${all.length}`, to("›", "The one after", all[at + 1]))];
}
