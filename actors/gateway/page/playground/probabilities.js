/* ---- probabilities: a token at a time, found with the mouse, a finger or the arrow keys ---- */
const percent = one => `${(100 * Math.exp(one.logprob)).toFixed(1)} %`;
/* The texts of tokens; a character may be parted over several of them. */
function tokenTexts(tokens) {
  const decoder = new TextDecoder();
  return tokens.map(token => token.bytes ? decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token);
}
function shaded(token, text, end) {
  const span = el("span", end ? "tok end" : "tok", text);
  span.style.background = `color-mix(in srgb, var(--warm) ${Math.round(42 * (1 - Math.exp(token.logprob)))}%, transparent)`;
  span.alternatives = [token, ...token.top_logprobs.filter(one => one.token !== token.token)];
  span.setAttribute("aria-describedby", "tip");
  span.tabIndex = -1;
  return span;
}
/* Draws a span for each token that is not there yet. What is no part of the text, as the end of the
   sequence, is told apart. */
function drawTokens(said, tokens, text, whole) {
  if (!said.classList.contains("spread") || said.children.length > tokens.length) {
    said.replaceChildren();
    said.classList.add("spread");
    said.shown = "";
  }
  tokenTexts(tokens).forEach((part, i) => {
    if (i < said.children.length) return;
    const end = whole && part && !text.startsWith(said.shown + part);
    if (!end) said.shown += part;
    said.append(shaded(tokens[i], end ? tokens[i].token : part, end));
  });
  if (said.firstElementChild && !said.querySelector('[tabindex="0"]')) said.firstElementChild.tabIndex = 0;
}
/* The tokens of an answer that was made without them: the engine reads it again, as a prompt. */
async function readAgain(messages, model, text) {
  const answer = await fetch("v1/chat/completions", {
    method: "POST", headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify({ model, messages: [...messages, { role: "assistant", content: text }], continue_final_message: true, prompt_logprobs: 5, return_token_ids: true, max_tokens: 1 }),
  });
  if (!answer.ok) throw await errorOf(answer);
  const { prompt_logprobs: each, prompt_token_ids: ids } = await answer.json(), tokens = each.map((one, i) => readToken(one, ids[i]));
  let from = tokens.length, length = 0;
  while (from > 0 && length < text.length && tokens[from - 1]) length += tokens[--from].token.length;
  const found = tokens.slice(from);
  if (found.map(token => token.token).join("").trim() !== text.trim()) throw new Error("The template changes this answer: its tokens are not to be told.");
  return found;
}
/* A token as chat completions have it, of {id: {logprob, rank, decoded_token}}. */
function readToken(alternatives, id) {
  if (!alternatives) return null;
  const name = one => ({ token: one.decoded_token, logprob: one.logprob });
  const likeliest = Object.values(alternatives).sort((a, b) => a.rank - b.rank).slice(0, 5);
  return { ...name(alternatives[id]), top_logprobs: likeliest.map(name) };
}
function showTip(event) {
  const span = event.target, tip = $("tip");
  if (!span.alternatives) { tip.hidden = true; return; }
  tip.replaceChildren(...span.alternatives.map((one, i) => {
    const bar = el("b");
    bar.style.width = `${100 * Math.exp(one.logprob)}%`;
    return el("div", i ? "" : "mine", el("code", "", JSON.stringify(one.token).slice(1, -1).replaceAll(" ", "␣")), el("i", "", bar), el("span", "", percent(one)));
  }));
  tip.hidden = false;
  const box = span.getClientRects()[0] || span.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const above = box.top - size.height - 8;
  tip.style.left = `${Math.max(6, Math.min(box.left, innerWidth - size.width - 6))}px`;
  tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
}
for (const kind of ["mouseover", "focusin"]) $("log").addEventListener(kind, showTip);
for (const kind of ["mouseleave", "focusout", "scroll"]) $("log").addEventListener(kind, () => { $("tip").hidden = true; });
$("log").addEventListener("keydown", event => {
  const at = event.target;
  if (!at.alternatives || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  const next = event.key === "ArrowLeft" ? at.previousElementSibling : at.nextElementSibling;
  if (!next) return;
  event.preventDefault();
  at.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
