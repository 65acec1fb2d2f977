const SHOWN = 200000; // characters of an answer
let components = {};

/* ---- schemas ---- */
const named = schema => schema.$ref ? components[schema.$ref.split("/").pop()] ?? {} : schema;
function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop().split(".").pop();
  if (schema.enum) return schema.enum.map(one => JSON.stringify(one)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(kind).filter(one => one !== "null").join(" | ");
  if (schema.type === "array") return `list of ${kind(schema.items ?? {})}`;
  if (schema.additionalProperties?.type) return `object of ${kind(schema.additionalProperties)}`;
  return schema.type ?? "anything";
}
/* the objects that a field is made of */
function parts(schema) {
  if (schema.$ref) return named(schema).properties ? [schema] : parts(named(schema));
  return [...(schema.anyOf ?? []), ...(schema.items ? [schema.items] : [])].flatMap(parts);
}
function bounds(schema) {
  const one = [schema, ...(schema.anyOf ?? [])].find(each => "minimum" in each || "maximum" in each || "maxLength" in each);
  if (!one) return "";
  return [one.minimum !== undefined && `at least ${one.minimum}`, one.maximum !== undefined && `at most ${one.maximum}`,
    one.maxLength !== undefined && `at most ${one.maxLength} characters`].filter(Boolean).join(", ");
}
function fields(schema) {
  const table = el("table");
  const needed = new Set(schema.required ?? []);
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const about = el("td", "", el("span", "kind", kind(field)));
    if (needed.has(name)) about.append(el("span", "needed", " required"));
    else if (field.default !== undefined && field.default !== null) about.append(` default ${JSON.stringify(field.default)}`);
    const more = [bounds(field), field.description].filter(Boolean).join(". ");
    if (more) about.append(el("div", "about", more));
    for (const part of parts(field)) about.append(opened(kind(part), () => fields(named(part))));
    table.append(el("tr", "", el("td", "", name), about));
  }
  return table;
}
/* made when it is first opened: schemas may hold themselves */
function opened(title, make) {
  const made = el("details", "", el("summary", "", title));
  made.addEventListener("toggle", () => made.childElementCount === 1 && made.append(make()), { once: true });
  return made;
}
function example(schema) {
  const body = {};
  const usual = { messages: [{ role: "user", content: "Hello" }], prompt: "Hello", input: "Hello", max_tokens: 16, max_output_tokens: 16, text: "Hello" };
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    if (name in usual && (schema.required?.includes(name) || name !== "text")) body[name] = usual[name];
    else if (schema.required?.includes(name)) body[name] = { string: "", integer: 0, number: 0, boolean: false, array: [] }[named(field).type] ?? {};
  }
  return JSON.stringify(body, null, 2);
}

/* ---- one route ---- */
function content(title, described) {
  const found = Object.entries(described?.content ?? {});
  return found.map(([media, { schema }]) => {
    const shape = named(schema ?? {});
    const made = el("div", "", el("h3", "", `${title}: ${media}`));
    if (shape.description) made.append(el("p", "about", shape.description));
    if (shape.properties) made.append(fields(shape));
    return made;
  });
}
function route(path, method, operation) {
  const open = !operation.security;
  const made = el("details", "route", el("summary", "",
    el("span", `method ${method}`, method.toUpperCase()), el("span", "path", path),
    el("span", "about", operation.summary ?? ""), el("span", "lock", open ? "" : "key")));
  made.dataset.words = `${path} ${operation.summary ?? ""}`.toLowerCase();
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  if (body) made.dataset.words += ` ${Object.keys(named(body).properties ?? {}).join(" ")}`.toLowerCase();
  made.addEventListener("toggle", () => {
    if (made.childElementCount > 1) return;
    made.append(el("div", "", trial(path, method, body), ...content("Body", operation.requestBody),
      ...content("Answer", operation.responses?.["200"])));
  });
  return made;
}

/* ---- trying it ---- */
function trial(path, method, body) {
  const place = el("input");
  place.value = path;
  place.setAttribute("aria-label", "Path");
  const text = el("textarea");
  text.value = body ? example(named(body)) : "";
  text.setAttribute("aria-label", "Body");
  text.spellcheck = false;
  const send = el("button", "main", "Send");
  const stop = el("button", "quiet", "Stop");
  const status = el("span", "about");
  const out = el("pre");
  stop.hidden = out.hidden = true;
  let running = null;
  stop.onclick = () => running?.abort();
  send.onclick = async () => {
    running = new AbortController();
    send.disabled = true;
    stop.hidden = out.hidden = false;
    out.textContent = status.textContent = "";
    const began = performance.now();
    try {
      const answer = await fetch(place.value.replace(/^\//, ""), {
        method: method.toUpperCase(), signal: running.signal, body: body ? text.value : undefined,
        headers: { ...(body ? { "content-type": "application/json" } : {}), ...headers() },
      });
      status.className = answer.ok ? "about" : "bad";
      await show(answer, out);
      status.textContent = `${answer.status} ${answer.statusText}, ${Math.round(performance.now() - began)} ms`;
    } catch (error) {
      status.className = "bad";
      status.textContent = error.name === "AbortError" ? "Stopped" : error.message;
    }
    send.disabled = false;
    stop.hidden = true;
  };
  const made = el("div", "", el("div", "try", place, send, stop, status));
  if (body) made.prepend(text);
  made.append(out);
  return made;
}
async function show(answer, out) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let all = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done || all.length > SHOWN) break;
    all += value;
    out.textContent = all;
  }
  if (all.length > SHOWN) await reader.cancel();
  try { out.textContent = JSON.stringify(JSON.parse(all), null, 2); } catch { /* not JSON: as it came */ }
}

/* ---- the whole ---- */
const GROUPS = [["Completions and models", /^\/(v1|invocations|chat|completions|generate|inference)/],
  ["Health and metrics", /^\/(livez|readyz|startupz|ping|health|load|metrics|version)/], ["Other", /^/]];
function filter() {
  const wanted = $("filter").value.trim().toLowerCase();
  for (const one of document.querySelectorAll("details.route")) one.hidden = !one.dataset.words.includes(wanted);
  for (const group of document.querySelectorAll("section")) group.hidden = !group.querySelector("details.route:not([hidden])");
}
async function main() {
  const made = await getJson("openapi.json");
  components = made.components?.schemas ?? {};
  $("title").textContent = `${made.info.title} ${made.info.version}: HTTP API`;
  const left = new Map(Object.entries(made.paths));
  for (const [title, pattern] of GROUPS) {
    const section = el("section", "", el("h2", "", title));
    for (const [path, methods] of [...left]) {
      if (!pattern.test(path)) continue;
      left.delete(path);
      for (const [method, operation] of Object.entries(methods)) section.append(route(path, method, operation));
    }
    if (section.childElementCount > 1) $("routes").append(section);
  }
  $("state").hidden = true;
  filter();
}
$("top").addEventListener("submit", event => event.preventDefault());
$("filter").addEventListener("input", filter);
main().catch(error => {
  $("state").className = "bad";
  $("state").textContent = error.message;
});
