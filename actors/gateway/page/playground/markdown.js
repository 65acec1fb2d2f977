/* ---- markdown, made of nodes: what a model says is never markup ----
   Headings, paragraphs, lists, quotes, tables, code, rules, links, emphasis and mathematics. HTML
   stays text, and a picture becomes a link: nothing is loaded because a model names it. */
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/, HEADING = /^(#{1,6}) +(?=\S)/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +)(?=\S)/, QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}(?:-{3,}|\*{3,}|_{3,})\s*$/, DASHES = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MATHS = [["$$", "$$"], ["\\[", "\\]"]];
const DEPTH = 8, FAR = 4000;

/* [{kind, lines, from, ...}]; from: the number of its first line. */
function blocks(text) {
  const lines = text.split("\n"), list = [];
  let open = null;
  const begin = (kind, from, more) => { open = { kind, lines: [], from, ...more }; list.push(open); return open; };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i], fence = FENCE.exec(line), item = ITEM.exec(line);
    if (open && open.kind === "code") {
      if (fence && fence[1].startsWith(open.fence) && !fence[2].trim()) open = null; else open.lines.push(line.startsWith(open.indent) ? line.slice(open.indent.length) : line);
    } else if (open && open.kind === "math") {
      if (line.trimEnd().endsWith(open.end)) { open.lines.push(line.trimEnd().slice(0, -2)); open.closed = true; open = null; } else open.lines.push(line);
    } else if (open && ["ul", "ol"].includes(open.kind) && continues(open, line, item)) {
      open.lines.push(line);
    } else if (!line.trim()) {
      open = null;
    } else if (fence) {
      begin("code", i, { fence: fence[1], indent: /^ */.exec(line)[0], language: fence[2].trim().split(/\s/)[0] });
    } else if (MATHS.some(([start]) => line.trimStart().startsWith(start)) && mathBlock(line, i, begin)) {
      if (open.closed) open = null;
    } else if (HEADING.test(line)) {
      begin("heading", i, { level: HEADING.exec(line)[1].length }).lines.push(line.replace(HEADING, ""));
      open = null;
    } else if (RULE.test(line)) {
      begin("rule", i);
      open = null;
    } else if (QUOTE.test(line)) {
      if (!open || open.kind !== "quote") begin("quote", i);
      open.lines.push(line.replace(QUOTE, ""));
    } else if (item) {
      const kind = /\d/.test(item[2]) ? "ol" : "ul";
      begin(kind, i, { indent: item[1].length, start: kind === "ol" ? parseInt(item[2], 10) : 1 }).lines.push(line);
    } else if (open && open.kind === "table" && line.includes("|")) {
      open.lines.push(line);
    } else if (line.includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && DASHES.test(lines[i + 1]) && cells(line).length === cells(lines[i + 1]).length) {
      begin("table", i).lines.push(line);
    } else {
      if (!open || open.kind !== "p") begin("p", i);
      open.lines.push(line);
    }
  }
  return list;
}
/* Whether a line belongs to the list that is open. */
function continues(list, line, item) {
  if (!line.trim()) return true;
  const indent = /^ */.exec(line)[0].length, blank = !list.lines[list.lines.length - 1].trim();
  if (item) return indent > list.indent || (/\d/.test(item[2]) ? "ol" : "ul") === list.kind;
  if (indent > list.indent) return true;
  return !blank && !FENCE.test(line) && !HEADING.test(line) && !RULE.test(line) && !QUOTE.test(line);
}
function mathBlock(line, from, begin) {
  const text = line.trim(), [start, end] = MATHS.find(([one]) => text.startsWith(one));
  const rest = text.slice(start.length), at = rest.indexOf(end);
  if (at >= 0 && at < rest.length - end.length) return false; // more follows: a paragraph
  const made = begin("math", from, { end, closed: at >= 0 });
  made.lines.push(at >= 0 ? rest.slice(0, at) : rest);
  return true;
}
/* A list's items, each as lines without its indentation. */
function items(list) {
  const found = [];
  let width = 0;
  for (const line of list.lines) {
    const item = ITEM.exec(line);
    if (item && (!found.length || item[1].length < width)) {
      width = item[0].length;
      found.push([line.slice(width)]);
    } else {
      const indent = /^ */.exec(line)[0].length;
      found[found.length - 1].push(line.slice(Math.min(indent, width)));
    }
  }
  return found;
}
/* The cells of a row; a bar in code or behind a backslash parts none. */
function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, ""), found = [""];
  let code = false;
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "`") code = !code;
    if (text[i] === "\\" && text[i + 1] === "|") found[found.length - 1] += text[++i];
    else if (text[i] === "|" && !code) found.push("");
    else found[found.length - 1] += text[i];
  }
  return found.map(cell => cell.trim());
}
function table(lines) {
  const sides = lines.length > 1 ? cells(lines[1]).map(cell => cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "") : [];
  const row = (line, tag) => el("tr", "", ...cells(line).map((cell, i) => {
    const made = inline(el(tag, sides[i] || ""), cell);
    if (tag === "th") made.scope = "col";
    return made;
  }));
  const box = el("div", "grid", el("table", "", el("thead", "", row(lines[0], "th")), el("tbody", "", ...lines.slice(2).map(line => row(line, "td")))));
  box.tabIndex = 0; // a wide one is scrolled by the arrow keys
  return box;
}
function codeBlock(block, text) {
  const pre = el("pre", "", highlighted(el("code"), text, block.language));
  pre.tabIndex = 0;
  return el("div", "code", el("div", "bar", el("span", "", block.language), button("quiet", "Copy", "", made => copy(text, made))), pre);
}
/* A block as a node. */
function drawn(block, depth = 0) {
  const text = block.lines.join("\n");
  if (block.kind === "code") return codeBlock(block, text);
  if (block.kind === "math") return block.closed ? formula(text, true) : el("p", "", text);
  if (block.kind === "rule") return el("hr");
  if (block.kind === "table") return table(block.lines);
  if (block.kind === "heading") return inline(el(`h${Math.min(6, block.level + 2)}`), text);
  if (block.kind === "p" || depth >= DEPTH) return inline(el("p"), text);
  if (block.kind === "quote") return el("blockquote", "", ...blocks(text).map(one => drawn(one, depth + 1)));
  const list = el(block.kind, "", ...items(block).map(lines => listItem(lines.join("\n").trimEnd(), depth)));
  if (block.start !== 1) list.start = block.start;
  return list;
}
function listItem(text, depth) {
  const made = el("li");
  for (const one of blocks(text)) {
    if (one.kind === "p" && !made.childNodes.length) inline(made, one.lines.join("\n")); else made.append(drawn(one, depth + 1));
  }
  return made;
}
/* Draws what differs from what is there. A block is over once another one has begun, so of a text
   that has grown only the last block is read again. */
function render(said, text) {
  const grown = said.source !== undefined && text.startsWith(said.source) && said.children.length > 0;
  const from = grown ? said.lastFrom : 0, kept = grown ? said.children.length - 1 : 0, wanted = blocks(text.slice(from));
  wanted.forEach((block, i) => {
    const source = JSON.stringify({ ...block, from: 0 }), old = said.children[kept + i];
    if (old && old.source === source) return;
    const made = drawn(block);
    made.source = source;
    if (old) old.replaceWith(made); else said.append(made);
  });
  while (said.children.length > kept + wanted.length) said.lastElementChild.remove();
  said.source = text;
  const last = wanted[wanted.length - 1];
  said.lastFrom = last ? from + text.slice(from).split("\n").slice(0, last.from).reduce((sum, line) => sum + line.length + 1, 0) : from;
}
