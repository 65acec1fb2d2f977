/* ---- settings, the model, and drawers beside the conversation ---- */
keepFields(["key", "temperature", "top_p", "top_k", "max_tokens", "seed", "system", "tools", "logprobs"]);
const DRAWERS = { left: ["list-open", "list"], right: ["panel-open", "panel"] };
/* Opens or closes a drawer; where there is room for it, it is always open. */
function drawer(side, open) {
  const [opener, panel] = DRAWERS[side];
  document.body.classList.add("slides"); // not when the window's width changes
  document.body.classList.toggle(side, open);
  $(opener).setAttribute("aria-expanded", String(open));
  const modal = open && getComputedStyle($(panel)).position === "fixed";
  $("chat").inert = modal;
  for (const [, other] of Object.values(DRAWERS)) $(other).inert = modal && other !== panel;
  if (modal) $(panel).focus();
}
/* Closes what is open; returns whether something was. */
function closeDrawers() {
  const side = ["left", "right"].find(one => document.body.classList.contains(one));
  if (!side) return false;
  drawer(side, false);
  $(DRAWERS[side][0]).focus();
  return true;
}
for (const side of ["left", "right"]) $(DRAWERS[side][0]).onclick = () => drawer(side, !document.body.classList.contains(side));
$("scrim").onclick = closeDrawers;
addEventListener("resize", () => { for (const side of ["left", "right"]) if (document.body.classList.contains(side) && getComputedStyle($(DRAWERS[side][1])).position !== "fixed") drawer(side, false); });

let state = ""; // of the chosen model, where the server has several
const isLoaded = one => !one.status || one.status.value === "loaded";
/* Learns what is served. */
async function meet() {
  try {
    const models = (await getJson("v1/models")).data, before = setting("model");
    $("model").replaceChildren(...models.map(one => { const made = el("option", "", isLoaded(one) ? one.id : `${one.id} (${one.status.value})`); made.value = one.id; return made; }));
    $("model").value = [before, (models.find(one => one.default) || models[0] || {}).id].find(id => models.some(one => one.id === id)) || "";
    const chosen = models.find(one => one.id === $("model").value);
    state = chosen && chosen.status ? chosen.status.value : "";
    if (!chosen || !isLoaded(chosen)) { // to ask about it would load it
      info = {};
      $("about").textContent = chosen ? `${chosen.id} · ${state}` : "No model is served.";
      $("attach").hidden = true;
      return;
    }
    info = await getJson(chosen.status ? `model_info?model=${encodeURIComponent(chosen.id)}` : "model_info");
    $("about").textContent = `${info.model} · ${info.architecture} · ${info.dtype} · ${whole(info.max_model_len)} tokens of context`;
    $("attach").hidden = !info.has_image_understanding;
    for (const [name, value] of Object.entries(info.generation_defaults || {})) {
      const field = document.querySelector(`.fields input#${CSS.escape(name)}`);
      if (field && typeof value === "number") field.placeholder = String(value);
    }
  } catch (error) { hint(error.message); }
}
$("model").addEventListener("change", () => { setting("model", $("model").value); if (state) meet(); });
$("key").addEventListener("change", () => { meet(); askAgain(); });
/* Shows whether the engine is there; the page of its state says more. */
function showState(kind, word, why) {
  const before = $("state").title;
  $("state").className = `state ${kind}`;
  $("state").title = why;
  $("state").lastElementChild.textContent = word;
  if (kind !== "ok" && why !== before) hint(why);
  else if (kind === "ok" && $("hint").classList.contains("of-state")) hint("");
  $("hint").classList.toggle("of-state", kind !== "ok");
}
function onSample(one) {
  const speed = one.tokens_per_second ? ` · ${whole(one.tokens_per_second)} tokens/s` : "";
  showState(one.ready ? "ok" : "wait", one.ready ? `Ready${speed}` : "Not ready", one.ready ? "The engine is ready. Its state" : one.why);
  const chosen = (one.models || []).find(model => model.name === $("model").value);
  if (one.ready && (!info || (chosen && chosen.state !== state))) meet();
}
