/* ---- an answer as it comes ----
   Each request has an Idempotency-Key. Where its connection breaks, it is sent again with the id of
   the last event, and goes on there: also after the page was loaded again. */
const running = new Map(); // id of a conversation -> {abort, stopped, view}
const TAB = setting("tab") || newId();
setting("tab", TAB);
const TRIES = 8, SAVE_EACH = 1000, GIVE_UP = 60000;
const rest = milliseconds => new Promise(done => setTimeout(done, milliseconds));

/* The messages of a branch of turns. */
function messagesOf(turns) {
  const system = $("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...turns.map(turn => {
    if (turn.role === "tool") return { role: "tool", tool_call_id: turn.call, content: turn.content };
    const calls = (turn.calls || []).map(call => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    return { role: turn.role, content: turn.content, ...(calls.length ? { tool_calls: calls } : {}) };
  })];
}
const number = id => $(id).value.trim() === "" || !$(id).validity.valid ? undefined : Number($(id).value);
function requestOf(turns) {
  const tools = $("tools").value.trim();
  let list;
  try { list = tools ? JSON.parse(tools) : undefined; } catch (error) { throw new Error(`Tools: ${error.message}`); }
  return {
    model: $("model").value || undefined, messages: messagesOf(turns), stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"),
    max_tokens: number("max_tokens"), seed: number("seed"), tools: list,
    ...($("logprobs").checked ? { logprobs: true, top_logprobs: 5 } : {}),
  };
}
/* Adds what an event brings to a turn. */
function take(turn, chunk) {
  for (const choice of chunk.choices || []) {
    const delta = choice.delta || {}, calls = delta.tool_calls || [];
    if (turn.first === undefined && (delta.content || delta.reasoning_content || calls.length)) turn.first = performance.now() - turn.began;
    if (delta.reasoning_content) turn.reasoning = (turn.reasoning || "") + delta.reasoning_content;
    if (turn.reasoning && !turn.thought && (delta.content || calls.length)) turn.thought = (performance.now() - turn.began - turn.first) / 1000;
    if (delta.content) turn.content += delta.content;
    for (const call of calls) {
      turn.calls ??= [];
      const one = turn.calls[call.index] ??= { id: "", name: "", arguments: "" };
      one.id ||= call.id || "";
      one.name += call.function.name || "";
      one.arguments += call.function.arguments || "";
    }
    if (choice.logprobs) (turn.tokens ??= []).push(...choice.logprobs.content);
    if (choice.finish_reason) turn.finish = choice.finish_reason;
  }
  if (chunk.usage) turn.usage = chunk.usage;
}
/* Reads one connection of a turn's request to its end; returns whether the answer is whole. */
async function readOnce(turn, run) {
  const { key, body, last } = turn.pending;
  const answer = await fetch("v1/chat/completions", {
    method: "POST", signal: run.abort.signal, body,
    headers: { "content-type": "application/json", "idempotency-key": key, ...(last ? { "last-event-id": last } : {}), ...headers() },
  });
  if (!answer.ok) throw await errorOf(answer);
  for await (const { id, value } of events(answer.body)) {
    if (value === "[DONE]") return true;
    if (value.error) throw Object.assign(new Error(value.error.message), { status: 500 });
    take(turn, value);
    const first = !turn.pending.name;
    Object.assign(turn.pending, { name: value.id, at: Date.now() }, id ? { last: id } : {});
    if (run.stopped && first) { run.stopped = false; stop(run.conversation); }
    run.failed = 0;
    if (run.view) run.view.drawSoon();
    if (Date.now() - run.saved > SAVE_EACH) { run.saved = Date.now(); keep(run.conversation); }
  }
  return Boolean(turn.finish);
}
/* Reads a turn's answer, over as many connections as it takes. Throws what ends it. */
async function readAnswer(turn, run) {
  for (;;) {
    try {
      if (await readOnce(turn, run)) return;
    } catch (error) {
      if (error.name === "AbortError" || error.status || !(error instanceof TypeError)) throw error;
    }
    if (++run.failed > TRIES || Date.now() - turn.pending.at > GIVE_UP) throw new Error(turn.content ? "The answer broke off." : "The gateway cannot be reached.");
    if (!turn.pending.last) Object.assign(turn, { content: "", reasoning: undefined, calls: undefined, tokens: undefined });
    await rest(Math.min(4000, 250 * 2 ** run.failed));
    if (run.stopped) throw Object.assign(new Error("stopped"), { name: "AbortError" });
  }
}
/* Runs a turn that is pending, as far as it comes. */
async function run(conversation, turn) {
  const state = { conversation, turn, abort: new AbortController(), stopped: false, failed: 0, saved: Date.now(), view: null };
  running.set(conversation.id, state);
  turn.began = performance.now() - (turn.took || 0);
  if (shown === conversation) showConversation(conversation);
  let trouble = null;
  try {
    await readAnswer(turn, state);
    turn.note = state.stopped ? "stopped" : turn.finish === "length" ? "cut off at max tokens" : undefined;
  } catch (error) {
    if (state.stopped || error.name === "AbortError") turn.note = "stopped"; else trouble = error;
  }
  turn.took = performance.now() - turn.began;
  delete turn.began;
  delete turn.pending;
  if ($("logprobs").checked && turn.tokens) turn.shaded = true;
  running.delete(conversation.id);
  const empty = !turn.content && !turn.reasoning && !turn.calls;
  if (trouble && empty) { conversation.head = turn.parent; delete conversation.turns[turn.id]; store.removed.add(turn.id); } else if (trouble) turn.note = "broken off";
  keep(conversation);
  if (shown === conversation) {
    if (state.view && !(trouble && empty)) state.view.live(false); else showConversation(conversation);
    if (trouble) showError(conversation, trouble);
    follow();
    busy();
  }
}
/* Asks for an answer to a branch that ends in a turn. */
function answerTo(conversation, parent) {
  if (running.has(conversation.id)) return;
  conversation.head = parent.id;
  let body;
  try { body = JSON.stringify(requestOf(branchOf(conversation))); } catch (error) { showError(conversation, error); return; }
  const turn = addTurn(conversation, parent.id, { role: "assistant", content: "", pending: { key: newId(), body, tab: TAB, at: Date.now() } });
  keep(conversation);
  run(conversation, turn);
}
/* Ends a running answer, at the engine as well: that would keep it for a while in case its caller
   came back. Before its first event the answer has no name; a second call does not wait for that. */
async function stop(conversation) {
  const state = running.get(conversation.id);
  if (!state) return;
  const again = state.stopped, { name } = state.turn.pending;
  state.stopped = true;
  if (name && !again) {
    await Promise.race([rest(1000), fetch("abort_request", {
      method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify({ rid: name }),
    }).catch(() => {})]);
  }
  if (name || again) state.abort.abort();
}
/* Goes on with answers that were under way when this tab's page was loaded anew. */
function resume(conversation) {
  for (const turn of Object.values(conversation.turns)) {
    if (!turn.pending || running.has(conversation.id)) continue;
    if (turn.pending.tab === TAB && Date.now() - turn.pending.at < GIVE_UP) { conversation.head = turn.id; run(conversation, turn); }
    else if (Date.now() - turn.pending.at > GIVE_UP) { delete turn.pending; turn.note ||= "broken off"; keep(conversation); }
  }
}
addEventListener("pagehide", () => { for (const state of running.values()) keep(state.conversation); });
