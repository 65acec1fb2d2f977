/* ---- text, made of nodes: what a model says is never markup ---- */
const FENCE = /^ {0,3}```/, HEADING = /^#{1,6} +(?=\S)/, ITEM = /^ {0,6}(?:[-*+]|\d{1,4}[.)]) +(?=\S)/;

const RULE = /^ {0,3}(?:-{3,}|\*{3,}|_{3,})\s*$/, ROW = /^\s*\|.*\|\s*$/, DASHES = /^[\s|:-]+$/;

/* [{kind, lines}] of the text; kinds: code, heading, rule, table, ul, ol, p. */
function blocks(text) {
  const found = [];
  let open = null;
  for (const line of text.split("\n")) {
    if (open && open.kind === "code") {
      if (FENCE.test(line)) open = null; else open.lines.push(line);
    } else if (FENCE.test(line)) {
      found.push(open = { kind: "code", lines: [] });
    } else if (!line.trim()) {
      open = null;
    } else if (HEADING.test(line) || RULE.test(line)) {
      found.push(RULE.test(line) ? { kind: "rule", lines: [] } : { kind: "heading", lines: [line.replace(HEADING, "")] });
      open = null;
    } else if (ROW.test(line)) {
      if (!open || open.kind !== "table") found.push(open = { kind: "table", lines: [] });
      open.lines.push(line);
    } else if (ITEM.test(line)) {
      const kind = /^\s*\d/.test(line) ? "ol" : "ul";
      if (!open || open.kind !== kind) found.push(open = { kind, lines: [] });
      if (kind === "ol" && !open.lines.length) open.start = parseInt(line, 10);
      open.lines.push(line.replace(ITEM, ""));
    } else if (open && ["ul", "ol"].includes(open.kind)) {
      open.lines[open.lines.length - 1] += `\n${line.trim()}`;
    } else {
      if (!open || open.kind !== "p") found.push(open = { kind: "p", lines: [] });
      open.lines.push(line);
    }
  }
  return found;
}
function inline(into, text) {
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/)) {
    if (/^`.+`$/.test(part)) into.append(el("code", "", part.slice(1, -1)));
    else if (/^\*\*.+\*\*$/.test(part)) into.append(el("strong", "", part.slice(2, -2)));
    else if (/^\*.+\*$/.test(part)) into.append(el("em", "", part.slice(1, -1)));
    else if (part) into.append(part);
  }
  return into;
}
function table(lines) {
  const rows = lines.filter(line => !DASHES.test(line)).map(line => line.trim().slice(1, -1).split("|"));
  const head = lines.length > 1 && DASHES.test(lines[1]);
  return el("div", "grid", el("table", "", ...rows.map((cells, i) => el("tr", "",
    ...cells.map(cell => inline(el(head && i === 0 ? "th" : "td"), cell.trim()))))));
}
function drawn(block) {
  const text = block.lines.join("\n");
  if (block.kind === "code") {
    const button = el("button", "quiet", "Copy");
    button.type = "button";
    button.onclick = () => copy(text, button);
    return el("div", "code", el("pre", "", el("code", "", text)), button);
  }
  if (block.kind === "rule") return el("hr");
  if (block.kind === "table") return table(block.lines);
  if (block.kind === "heading") return inline(el("h3"), text);
  if (block.kind === "p") return inline(el("p"), text);
  const list = el(block.kind, "", ...block.lines.map(line => inline(el("li"), line)));
  if (block.start > 1) list.start = block.start;
  return list;
}
/* Draw what differs from what is there: the last block, as a rule. */
function render(said, text) {
  const wanted = blocks(text);
  wanted.forEach((block, i) => {
    const source = JSON.stringify(block), old = said.children[i];
    if (old && old.source === source) return;
    const made = drawn(block);
    made.source = source;
    if (old) old.replaceWith(made); else said.append(made);
  });
  while (said.children.length > wanted.length) said.lastElementChild.remove();
}

/* ---- probabilities: a token at a time, found with the mouse, a finger or the arrow keys ---- */
const percent = one => `${(100 * Math.exp(one.logprob)).toFixed(1)} %`;
function shade(token, text, end) {
  const span = el("span", end ? "tok end" : "tok", text);
  const unsure = 1 - Math.exp(token.logprob);
  span.style.background = `color-mix(in srgb, var(--warm) ${Math.round(42 * unsure)}%, transparent)`;
  span.alternatives = [token, ...token.top_logprobs.filter(one => one.token !== token.token)];
  span.setAttribute("aria-describedby", "tip");
  span.tabIndex = -1;
  return span;
}
function explain(event) {
  const span = event.target, tip = $("tip");
  if (!span.alternatives) { tip.hidden = true; return; }
  tip.replaceChildren(...span.alternatives.map((one, i) => {
    const bar = el("b");
    bar.style.width = `${100 * Math.exp(one.logprob)}%`;
    return el("div", i ? "" : "mine", el("code", "", JSON.stringify(one.token).slice(1, -1).replaceAll(" ", "␣")),
      el("i", "", bar), el("span", "", percent(one)));
  }));
  tip.hidden = false;
  const box = span.getClientRects()[0] || span.getBoundingClientRect(), mine = tip.getBoundingClientRect();
  const above = box.top - mine.height - 8;
  tip.style.left = `${Math.max(6, Math.min(box.left, innerWidth - mine.width - 6))}px`;
  tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
}
for (const kind of ["mouseover", "focusin"]) $("log").addEventListener(kind, explain);
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
