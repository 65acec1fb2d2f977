"use strict";
const $ = id => document.getElementById(id);
const el = (tag, className, ...children) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
};
const state = { turns: [], attached: [], info: null, busy: null };

/* ---- settings: of this browser; the key of this tab alone ---- */
function kept(name, value) {
  try {
    const store = name === "key" ? sessionStorage : localStorage;
    if (value === undefined) return store.getItem(`actorium.${name}`);
    store.setItem(`actorium.${name}`, value);
  } catch { /* no storage: settings last as long as the page */ }
  return null;
}
for (const id of ["key", "temperature", "top_p", "top_k", "max_tokens", "seed", "system"]) {
  const old = kept(id);
  if (old !== null) $(id).value = old;
  $(id).addEventListener("change", () => kept(id, $(id).value));
}
$("logprobs").checked = kept("logprobs") === "yes";
$("logprobs").addEventListener("change", () => kept("logprobs", $("logprobs").checked ? "yes" : "no"));
$("theme").onclick = () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  kept("theme", document.documentElement.dataset.theme);
};
function side(open) {
  document.body.classList.add("slides"); // not when the window's width changes
  document.body.classList.toggle("side", open);
  $("side").setAttribute("aria-expanded", String(open));
  if (open) $("panel").focus();
}
$("side").onclick = () => side(!document.body.classList.contains("side"));
$("scrim").onclick = () => side(false);
const headers = () => $("key").value ? { authorization: `Bearer ${$("key").value}` } : {};
const number = id => $(id).value.trim() === "" || !$(id).validity.valid ? undefined : Number($(id).value);

/* ---- talking to the gateway ---- */
async function told(answer) {
  let text = `${answer.status} ${answer.statusText}`;
  try { text = (await answer.json()).error.message; } catch { /* somebody else's answer */ }
  if (answer.status === 401) text = $("key").value ? "This API key is not valid here." : "This engine needs an API key.";
  return Object.assign(new Error(text), { status: answer.status });
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
async function meet() {
  try {
    const answer = await fetch("model_info", { headers: headers() });
    if (!answer.ok) throw await told(answer);
    state.info = await answer.json();
    $("model").textContent = `${state.info.model} · ${state.info.max_model_len.toLocaleString("en")} tokens of context`;
    $("model").title = $("model").textContent;
    $("attach").hidden = !state.info.has_image_understanding;
    for (const [name, value] of Object.entries(state.info.generation_defaults || {})) {
      const field = document.querySelector(`.fields input#${CSS.escape(name)}`);
      if (field && typeof value === "number") field.placeholder = String(value);
    }
  } catch (error) { $("model").textContent = ""; hint(error.message); }
}
function hint(trouble) {
  const keys = matchMedia("(pointer: coarse), (max-width: 560px)").matches;
  $("hint").textContent = trouble || (keys ? "" : "Enter sends · Shift+Enter for a new line · Esc stops");
  $("hint").classList.toggle("warm", Boolean(trouble));
}
async function copy(text, button) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else byHand(text);
    button.textContent = "Copied";
  } catch { button.textContent = "Not copied"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}
function byHand(text) { // over plain HTTP from elsewhere there is no clipboard
  const box = document.body.appendChild(el("textarea"));
  box.value = text;
  box.select();
  document.execCommand("copy");
  box.remove();
}
