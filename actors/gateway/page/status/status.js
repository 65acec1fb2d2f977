/* ---- the engine's state, live; of an engine that does not answer, what was last known ---- */
keepFields(["key"]);
let last = null, lastAt = 0, problem = "", problemAt = 0;
const lives = new Map(); // role -> its epoch
const clock = milliseconds => new Date(milliseconds).toLocaleTimeString("en-GB");
const ago = milliseconds => { const s = Math.max(0, Math.round(milliseconds / 1000)); return s < 120 ? `${s} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`; };

function showState(kind, word) {
  $("state").className = `state ${kind}`;
  $("state").lastElementChild.textContent = word;
}
/* The line on top: what is wrong, since when, and how old the figures are. */
function showSince() {
  const answers = last && problem === "", parts = [];
  if (problem) parts.push(`${problem.replace(/\.$/, "")}, since ${clock(problemAt)} (${ago(Date.now() - problemAt)}).`);
  else if (last) parts.push(last.ready ? "The engine answers requests." : `Not ready: ${last.why}.`);
  if (problem && last) parts.push(`Below is what was last known, at ${clock(lastAt)}.`);
  const text = parts.join(" ");
  if ($("since").textContent !== text) $("since").textContent = text;
  $("since").className = problem || (last && !last.ready) ? "trouble" : "";
  document.body.classList.toggle("stale", Boolean(last) && !answers);
}
function setProblem(text) {
  if (text && !problem) problemAt = Date.now();
  problem = text;
  showSince();
}
function drawPages(one) {
  if (typeof one.pages !== "number") return;
  const parts = [["held", one.pages_used, "held by sequences"], ["cached", one.pages_cached, "cached"], ["out", one.pages_quarantined, "quarantined"]];
  const free = Math.max(0, one.pages - parts.reduce((sum, [, count]) => sum + (count || 0), 0)), all = [...parts, ["free", free, "free"]];
  $("pages").replaceChildren(...all.filter(([, count]) => count).map(([name, count]) => { const made = el("span", name); made.style.flexGrow = count; return made; }));
  const words = all.filter(([name, count]) => count || ["held", "free"].includes(name)).map(([name, count, text]) => [name, `${whole(count)} ${text}`]);
  $("pages-words").replaceChildren(...words.map(([name, text]) => el("span", `key ${name}`, text)), ` of ${whole(one.pages)}`);
  $("pages").setAttribute("aria-label", `${words.map(([, text]) => text).join(", ")} of ${whole(one.pages)}`);
}
const rows = new Map();
function drawTable(actors) {
  for (const [role, row] of rows) if (!actors.some(one => one.role === role)) { row.remove(); rows.delete(role); }
  actors.forEach((one, i) => {
    let row = rows.get(one.role);
    if (!row) { row = el("tr", "", el("th", "", one.role), ...["", "right", "right", "right", "right", "says"].map(name => el("td", name))); row.firstChild.scope = "row"; rows.set(one.role, row); }
    if ($("actors").children[i] !== row) $("actors").insertBefore(row, $("actors").children[i] || null);
    const texts = [one.phase, String(one.pid || "–"), String(one.epoch - 1), one.queue === null ? "–" : whole(one.queue), one.beat_age > 1 ? `${one.beat_age.toFixed(0)} s ago` : "now", one.detail];
    texts.forEach((text, at) => { const cell = row.children[at + 1]; if (cell.textContent !== text) cell.textContent = text; });
    const good = GOOD.includes(one.phase);
    if (row.good !== good || !row.querySelector(".dot")) { row.good = good; row.children[1].className = good ? "ok" : "wait"; row.children[1].prepend(el("span", "dot")); }
  });
}
/* The models of a server of several; such a server has no pages of its own. */
function drawModels(models) {
  $("models-part").hidden = !models.length;
  $("pages-part").hidden = Boolean(models.length);
  $("models").replaceChildren(...models.map(one => {
    const good = !["failed", "unloaded"].includes(one.state), name = el("th", "", one.name), value = el("td", good ? "ok" : "", one.state);
    name.scope = "row";
    if (good) value.prepend(el("span", "dot"));
    return el("tr", "", name, value, el("td", "right", whole(one.in_use)), el("td", "right", one.memory ? `${(one.memory / 2 ** 30).toFixed(2)} GiB` : "–"), el("td", "says", one.says));
  }));
}
/* What was started again: what this page saw, and how often since the engine's start. */
function noteRecoveries(one) {
  for (const actor of one.actors) {
    const before = lives.get(actor.role);
    if (before !== undefined && actor.epoch > before) addEvent(one.at, `${actor.role} was started again, as process ${actor.pid}`);
    lives.set(actor.role, actor.epoch);
  }
  const total = one.actors.reduce((sum, actor) => sum + actor.epoch - 1, 0), resumed = one.resumed || 0;
  $("recovered").textContent = total || resumed ? `${total} restart${total === 1 ? "" : "s"} of actors since the engine started; ${whole(resumed)} sequence${resumed === 1 ? "" : "s"} went on after one.` : "None since the engine started.";
}
function addEvent(at, text) {
  $("events").prepend(el("li", "", el("time", "", clock(1000 * at)), ` ${text}`));
  while ($("events").childElementCount > 50) $("events").lastElementChild.remove();
}
function onSample(one) {
  $("ask-key").hidden = true;
  if (!one.actors.length) { // nobody answered
    showState("bad", "No answer");
    setProblem(`The engine does not answer: ${one.why}`);
    return;
  }
  if (last && last.ready !== one.ready) addEvent(one.at, one.ready ? "ready again" : `not ready: ${one.why}`);
  last = one;
  lastAt = 1000 * one.at;
  showState(one.ready ? "ok" : "wait", one.ready ? "Ready" : "Not ready");
  setProblem("");
  drawRing(one.actors, one.running > 0);
  drawPages(one);
  drawTable(one.actors);
  drawModels(one.models || []);
  noteRecoveries(one);
  plotSample(one);
}
function onError(error) {
  showState("bad", error.status === 401 ? "Locked" : "Away");
  setProblem(error.message);
  if (error.status === 401) $("ask-key").hidden = false;
}
$("key").addEventListener("change", () => askAgain());
narrow.addEventListener("change", () => { if (last) drawRing(last.actors, last.running > 0); });
setInterval(showSince, 1000);
watch(onSample, onError);
