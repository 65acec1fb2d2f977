/* ---- the actors as a picture: a request goes from left to right and back ---- */
const WIDE = 148, TALL = 54, STEP_X = 190, STEP_Y = 66, STEP_DOWN = 80, EDGE = 14;
const COLUMNS = [["gateway"], ["tokenizer", "media"], ["scheduler"], ["worker", "replica"], ["detokenizer"]];
const WAYS = [["gateway", "tokenizer"], ["gateway", "media"], ["media", "scheduler"], ["tokenizer", "scheduler"], ["scheduler", "worker"], ["worker", "detokenizer"],
  ["scheduler", "replica"], ["replica", "detokenizer"]];
const QUEUES = { gateway: "open", tokenizer: "waiting", media: "waiting", scheduler: "waiting", detokenizer: "open" };
const GOOD = ["ready", "idle", "stepping", "paused", "sleeping", "waking", "released"];
const kindOf = role => role.replace(/(\.|-|@).*$/, "");
const vector = (tag, fields, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(fields)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const narrow = matchMedia("(max-width: 620px)");
/* Where each actor stands: [actor, x, y]: a column, or on a phone a row, for each part of a request's
   way, and below those outside of it. */
function places(actors, down) {
  const parts = COLUMNS.map(kinds => actors.filter(one => kinds.includes(kindOf(one.role)))).filter(list => list.length);
  const rest = actors.filter(one => !COLUMNS.flat().includes(kindOf(one.role))), most = Math.max(1, ...parts.map(list => list.length));
  const spot = (along, across) => down ? [EDGE + across * STEP_X, EDGE + along * STEP_DOWN] : [EDGE + along * STEP_X, EDGE + across * STEP_Y];
  const found = parts.flatMap((list, along) => list.map((one, i) => [one, ...spot(along, i + (most - list.length) / 2)]));
  const wide = Math.max(1, down ? most : parts.length - 2), [left, top] = down ? spot(parts.length, 0) : spot(Math.min(1, parts.length - 1), most + 0.2);
  return [...found, ...rest.map((one, i) => [one, left + (i % wide) * STEP_X, top + Math.floor(i / wide) * STEP_Y])];
}
/* The way from one box to another. */
function way(x1, y1, x2, y2, down) {
  if (down) return `M${x1 + WIDE / 2} ${y1 + TALL}C${x1 + WIDE / 2} ${(y1 + TALL + y2) / 2} ${x2 + WIDE / 2} ${(y1 + TALL + y2) / 2} ${x2 + WIDE / 2} ${y2}`;
  const from = x1 + WIDE, middle = (from + x2) / 2;
  return `M${from} ${y1 + TALL / 2}C${middle} ${y1 + TALL / 2} ${middle} ${y2 + TALL / 2} ${x2} ${y2 + TALL / 2}`;
}
/* The way of the text back to the caller, around the others. */
function wayBack(x1, y1, x2, y2, side, down) {
  return down ? `M${x1 + WIDE} ${y1 + TALL / 2}H${side - 10}Q${side} ${y1 + TALL / 2} ${side} ${y1 + TALL / 2 - 10}V${y2 + TALL / 2 + 10}Q${side} ${y2 + TALL / 2} ${side - 10} ${y2 + TALL / 2}H${x2 + WIDE}`
    : `M${x1 + WIDE / 2} ${y1 + TALL}V${side - 10}Q${x1 + WIDE / 2} ${side} ${x1 + WIDE / 2 - 10} ${side}H${x2 + WIDE / 2 + 10}Q${x2 + WIDE / 2} ${side} ${x2 + WIDE / 2} ${side - 10}V${y2 + TALL}`;
}
function drawRing(actors, running) {
  const down = narrow.matches, source = JSON.stringify([down, running, actors.map(one => [one.role, one.phase, one.queue])]);
  if ($("ring").source === source) return; // the lines go on moving
  $("ring").source = source;
  const at = places(actors, down), named = kind => at.filter(([one]) => kindOf(one.role) === kind);
  const right = Math.max(0, ...at.map(([, x]) => x)) + WIDE + EDGE, low = Math.max(0, ...at.map(([, , y]) => y)) + TALL + EDGE;
  const width = right + (down ? 26 : 0), height = low + (down ? 0 : 26), side = (down ? width : height) - 12;
  const join = (from, to, draw) => named(from).flatMap(([, x1, y1]) => named(to).map(([, x2, y2]) => vector("path", { class: "way", d: draw(x1, y1, x2, y2) })));
  const lines = WAYS.flatMap(([from, to]) => join(from, to, (...ends) => way(...ends, down)));
  const back = join("detokenizer", "gateway", (...ends) => wayBack(...ends, side, down));
  const boxes = at.map(([one, x, y]) => {
    const words = [one.phase, one.queue ? `${whole(one.queue)} ${QUEUES[kindOf(one.role)] || ""}` : ""].filter(Boolean).join(" · ");
    return vector("g", { class: `actor ${GOOD.includes(one.phase) ? "ok" : "wait"}`, transform: `translate(${x} ${y})` },
      vector("rect", { width: WIDE, height: TALL, rx: 11 }), vector("circle", { cx: 14, cy: 19, r: 4 }),
      vector("text", { x: 26, y: 24, class: "role" }, one.role), vector("text", { x: 14, y: 42 }, words));
  });
  const picture = vector("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: running ? "flows" : "",
    "aria-label": actors.map(one => `${one.role} is ${one.phase}`).join(", ") || "No actor is known" }, ...back, ...lines, ...boxes);
  picture.style.maxWidth = `${width * 1.15}px`;
  $("ring").replaceChildren(picture);
}
