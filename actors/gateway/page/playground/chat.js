/* ---- an answer ---- */
class Answer {
  constructor() {
    this.text = ""; this.tokens = []; this.asides = {}; this.waiting = false; this.shown = "";
    this.turn = state.turns.length;
    this.said = el("div", "said");
    this.counts = el("span"); this.note = el("span", "note"); this.acts = el("span", "acts");
    this.facts = el("div", "facts", this.acts, this.counts, this.note);
    this.node = el("div", "turn assistant live", this.said, this.facts);
    this.node.setAttribute("aria-busy", "true");
    this.decoder = new TextDecoder();
    this.began = performance.now(); this.first = null;
  }
  aside(name, title, text, kind) {
    if (!this.asides[name]) {
      const box = el("details", `aside ${kind}`, el("summary", "", title), el("div"));
      box.open = kind === "call";
      this.node.insertBefore(box, this.said);
      this.asides[name] = box.lastChild;
    }
    this.asides[name].append(text);
  }
  take(chunk) {
    for (const choice of chunk.choices || []) {
      const said = choice.delta || {};
      if (this.first === null && (said.content || said.reasoning_content || said.tool_calls)) this.first = performance.now();
      if (said.content) this.text += said.content;
      if (said.reasoning_content) this.aside("reasoning", "Reasoning", said.reasoning_content, "reasoning");
      for (const call of said.tool_calls || []) this.aside(`call${call.index}`, `Calls ${call.function.name || ""}`, call.function.arguments || "", "call");
      if (choice.logprobs) this.tokens.push(...choice.logprobs.content);
      if (choice.finish_reason) this.finish = choice.finish_reason;
    }
    if (chunk.usage) this.usage = chunk.usage;
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }
  draw() {
    if (this.tokens.length) this.spread(); else render(this.said, this.text);
    this.counts.textContent = this.told();
    if (low) toEnd();
    jumpable();
  }
  /* A span for each token. What is no part of the text, the end of the sequence, is told apart. */
  spread() {
    const whole = !Object.keys(this.asides).length;
    this.said.classList.add("spread");
    while (this.said.children.length < this.tokens.length) {
      const token = this.tokens[this.said.children.length];
      const text = token.bytes ? this.decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token;
      const end = whole && text && !this.text.startsWith(this.shown + text);
      if (!end) this.shown += text;
      this.said.append(shade(token, end ? token.token : text, end));
    }
    const first = this.said.firstElementChild;
    if (first && !this.said.querySelector('[tabindex="0"]')) first.tabIndex = 0;
  }
  told() {
    const used = this.usage || {}, parts = [], made = used.completion_tokens;
    if (made) {
      const seconds = Math.max(1e-3, (performance.now() - (this.first || this.began)) / 1000);
      parts.push(`${made} token${made === 1 ? "" : "s"}`, `${(made / seconds).toFixed(0)} tokens/s`);
    }
    if (this.first !== null) parts.push(`first after ${Math.round(this.first - this.began)} ms`);
    const details = used.completion_tokens_details || {};
    const drafted = (details.accepted_prediction_tokens || 0) + (details.rejected_prediction_tokens || 0);
    if (drafted) parts.push(`${Math.round(100 * details.accepted_prediction_tokens / drafted)} % of drafts accepted`);
    const cached = (used.prompt_tokens_details || {}).cached_tokens;
    if (cached) parts.push(`${cached} of ${used.prompt_tokens} prompt tokens cached`);
    return parts.join(" · ");
  }
  end(note) {
    this.draw();
    this.node.classList.remove("live");
    this.node.removeAttribute("aria-busy");
    this.note.textContent = note;
    const button = (text, label, act) => {
      const made = el("button", "quiet", text);
      made.type = "button"; made.title = label;
      made.onclick = () => act(made);
      this.acts.append(made);
    };
    if (this.text) button("Copy", "Copy the answer", made => copy(this.text, made));
    button("Again", "Regenerate the answer", () => again(this.node, this.turn));
  }
}

/* ---- the conversation ---- */
const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
const toEnd = () => { low = true; $("log").scrollTop = $("log").scrollHeight; };
const jumpable = () => { $("jump").hidden = atEnd(); };
// As long as somebody reads at the end, that stays in sight, whatever becomes of the window.
let low = true, tall = 0;
$("log").addEventListener("scroll", () => {
  if ($("log").clientHeight === tall) low = atEnd();
  jumpable();
});
new ResizeObserver(() => {
  tall = $("log").clientHeight;
  if (low) toEnd();
  jumpable();
}).observe($("log"));
$("jump").onclick = () => { toEnd(); $("text").focus(); };
function asked() {
  const system = $("system").value.trim();
  return {
    model: state.info ? state.info.model : undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...state.turns],
    stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"),
    max_tokens: number("max_tokens"), seed: number("seed"),
    ...($("logprobs").checked ? { logprobs: true, top_logprobs: 5 } : {}),
  };
}
async function answer() {
  const made = new Answer(), abort = new AbortController(), turns = state.turns;
  busy(abort);
  show(made.node);
  let note = "", trouble = null;
  try {
    const got = await fetch("v1/chat/completions", {
      method: "POST", signal: abort.signal, body: JSON.stringify(asked()),
      headers: { "content-type": "application/json", ...headers() },
    });
    if (!got.ok) throw await told(got);
    for await (const chunk of events(got.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      made.take(chunk);
    }
    if (!made.finish) throw new Error("The answer broke off.");
    if (made.finish === "length") note = "cut off at max tokens";
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else trouble = error;
  }
  made.end(note);
  if (made.text) turns.push({ role: "assistant", content: made.text });
  if (state.busy === abort) busy(null);
  if (trouble && turns === state.turns) fail(made, trouble);
}
function busy(abort) {
  state.busy = abort;
  $("send").hidden = abort !== null;
  $("stop").hidden = abort === null;
}
function show(node) {
  $("log").append(node);
  toEnd();
}
function fail(made, error) {
  const network = error instanceof TypeError ? "The gateway cannot be reached." : error.message;
  const retry = el("button", "", "Try again"), box = el("div", "error", el("span", "", network), retry);
  box.setAttribute("role", "alert");
  retry.type = "button";
  retry.onclick = () => again(made.text || made.node.querySelector("details") ? made.node : box, made.turn);
  if (!made.text && !made.node.querySelector("details")) made.node.remove();
  show(box);
  if (error.status === 401) { side(true); $("key").focus(); }
}
/* Forget everything from a node on, and answer anew. */
function again(node, turn) {
  if (state.busy) return;
  while (node.nextSibling) node.nextSibling.remove();
  node.remove();
  state.turns.length = turn;
  answer();
  $("text").focus();
}
/* ---- pictures: dropped, pasted or picked, sent with the next turn ---- */
const picture = (url, video) => {
  const made = el(video ? "video" : "img", "picture");
  made.src = url;
  if (video) made.muted = true; else made.alt = "a picture of yours";
  return made;
};
function attach(files) {
  if ($("attach").hidden) { hint("This model takes text alone."); return; }
  for (const file of files) {
    if (!/^(image|video)\//.test(file.type)) continue;
    const reader = new FileReader();
    reader.onload = () => {
      const video = file.type.startsWith("video/") || file.type === "image/gif";
      const one = { url: reader.result, video };
      const drop = el("button", "", picture(one.url, file.type.startsWith("video/")));
      drop.type = "button"; drop.title = `Leave ${file.name || "it"} out`;
      drop.onclick = () => { state.attached = state.attached.filter(other => other !== one); drop.remove(); };
      state.attached.push(one);
      $("attached").append(drop);
    };
    reader.readAsDataURL(file);
  }
}
$("attach").onclick = () => $("files").click();
$("files").onchange = () => { attach($("files").files); $("files").value = ""; $("text").focus(); };
$("text").addEventListener("paste", event => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); attach(files); }
});
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach(event.dataTransfer.files);
});
function say(text) {
  if ((!text && !state.attached.length) || state.busy) return;
  const empty = document.querySelector(".empty");
  if (empty) empty.remove();
  const shown = state.attached.map(one => picture(one.url, one.url.startsWith("data:video/")));
  const parts = state.attached.map(one => one.video
    ? { type: "video_url", video_url: { url: one.url } } : { type: "image_url", image_url: { url: one.url } });
  state.turns.push({ role: "user", content: parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text });
  state.attached = [];
  $("attached").replaceChildren();
  show(el("div", "turn user", el("div", "", ...shown, text)));
  answer();
}
function fresh() {
  if (state.busy) state.busy.abort();
  busy(null);
  state.turns = [];
  const starts = ["Tell me a story about a fox.", "Write a short poem about rain.", "Explain how a rainbow forms."];
  const buttons = starts.map(text => {
    const made = el("button", "", text);
    made.type = "button";
    made.onclick = () => { say(text); $("text").focus(); };
    return made;
  });
  $("log").replaceChildren(el("div", "empty", el("h2", "", "What should it say?"),
    el("p", "", "Answers stream as the engine makes them."), el("div", "", ...buttons)));
  jumpable();
}
function grow() {
  const box = $("text");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}
$("ask").addEventListener("submit", event => {
  event.preventDefault();
  if (state.busy) return;
  say($("text").value.trim());
  $("text").value = "";
  grow();
});
$("stop").onclick = () => { if (state.busy) state.busy.abort(); $("text").focus(); };
$("clear").onclick = () => { fresh(); $("text").focus(); };
$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
document.addEventListener("keydown", event => {
  const typing = /^(INPUT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape") {
    if (document.body.classList.contains("side")) { side(false); $("side").focus(); }
    else if (state.busy) state.busy.abort();
  } else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    $("text").focus();
  }
});
fresh();
hint("");
