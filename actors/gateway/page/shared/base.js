"use strict";
const $ = id => document.getElementById(id);
const el = (tag, className, ...children) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
};
const button = (className, text, label, act) => {
  const made = el("button", className, text);
  made.type = "button";
  if (label) made.title = label;
  if (label && !/\w/.test(text)) made.setAttribute("aria-label", label);
  made.onclick = () => act(made);
  return made;
};
const whole = value => Math.round(value).toLocaleString("en");

/* ---- settings: of this browser; the key, and what is shown, of this tab alone ---- */
const OF_TAB = ["key", "conversation", "tab"];
function setting(name, value) {
  try {
    const store = OF_TAB.includes(name) ? sessionStorage : localStorage;
    if (value === undefined) return store.getItem(`actorium.${name}`);
    store.setItem(`actorium.${name}`, value);
  } catch { /* no storage: settings last as long as the page */ }
  return null;
}
/* Keeps what is entered into fields. */
function keepFields(ids) {
  for (const id of ids) {
    const field = $(id), boolean = field.type === "checkbox", old = setting(id);
    if (old !== null && boolean) field.checked = old === "yes";
    else if (old !== null) field.value = old;
    field.addEventListener("change", () => setting(id, boolean ? (field.checked ? "yes" : "no") : field.value));
  }
}
$("theme").onclick = () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  setting("theme", document.documentElement.dataset.theme);
};

/* ---- calls of the gateway ---- */
const headers = () => $("key").value ? { authorization: `Bearer ${$("key").value}` } : {};
/* The error that an answer tells. */
async function errorOf(answer) {
  let text = `${answer.status} ${answer.statusText}`;
  try { text = (await answer.json()).error.message; } catch { /* somebody else's answer */ }
  if (answer.status === 401) text = $("key").value ? "This API key is not valid here." : "This engine needs an API key.";
  return Object.assign(new Error(text), { status: answer.status });
}
async function getJson(path) {
  const answer = await fetch(path, { headers: headers() });
  if (!answer.ok) throw await errorOf(answer);
  return answer.json();
}
/* The events of a stream: {id, value}; the value of the last one of a completion is "[DONE]". */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const field = name => part.split("\n").filter(line => line.startsWith(`${name}: `)).map(line => line.slice(name.length + 2)).join("\n");
      const data = field("data");
      if (data) yield { id: field("id"), value: data === "[DONE]" ? data : JSON.parse(data) };
    }
  }
}

/* ---- the engine's state, once a second ---- */
const visible = () => new Promise(done => document.addEventListener("visibilitychange", done, { once: true }));
let askAgain = () => {};
/* Calls `onSample` with each sample, and `onError` with an error that ends a connection; connects
   again after 2 seconds, or as soon as `askAgain` is called. Rests while the page is hidden. */
async function watch(onSample, onError) {
  for (;;) {
    while (document.hidden) await visible();
    const abort = new AbortController(), hide = () => abort.abort();
    document.addEventListener("visibilitychange", hide, { once: true });
    try {
      const answer = await fetch("dashboard/events", { headers: headers(), signal: abort.signal });
      if (!answer.ok) throw await errorOf(answer);
      for await (const { value } of events(answer.body)) {
        if (value === "[DONE]") break;
        if (value.error) throw new Error(value.error.message);
        onSample(value);
      }
    } catch (error) {
      if (error.name !== "AbortError") onError(error instanceof TypeError ? new Error("The gateway cannot be reached; trying again.") : error);
    }
    document.removeEventListener("visibilitychange", hide);
    await new Promise(done => { askAgain = done; setTimeout(done, document.hidden ? 0 : 2000); });
  }
}

async function copy(text, made) {
  const before = made.textContent;
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text);
    made.textContent = "Copied";
  } catch { made.textContent = "Not copied"; }
  setTimeout(() => { made.textContent = before; }, 1500);
}
function copySelected(text) { // over plain HTTP from elsewhere there is no clipboard
  const box = document.body.appendChild(el("textarea"));
  box.value = text;
  box.select();
  document.execCommand("copy");
  box.remove();
}
