/* ---- what stands within a line ---- */
const PUNCTUATION = /[!-/:-@[-`{-~]/, WORD = /[\p{L}\p{N}]/u, SAFE = /^(?:https?:\/\/|mailto:)[^\s<>"]+$/i;
const BARE = /^https?:\/\/[^\s<>"'`|\\^{}]+/i;

/* Appends a text with its code, emphasis, links and formulas to a node. */
function inline(into, text, depth = 0) {
  let plain = "", i = 0;
  const flush = () => { if (plain) into.append(plain); plain = ""; };
  const put = (node, length) => { flush(); into.append(node); i += length; };
  const never = new Set(); // ends that do not come any more
  const end = (mark, from) => {
    if (never.has(mark)) return -1;
    const at = text.indexOf(mark, from);
    if (at < 0) never.add(mark);
    return at < 0 || at - from > FAR ? -1 : at;
  };
  while (i < text.length) {
    const found = depth < DEPTH && special(text, i, end, depth);
    if (found) put(...found);
    else if (text[i] === "\\" && PUNCTUATION.test(text[i + 1] || "")) { plain += text[i + 1]; i += 2; }
    else { const run = text[i] === "`" ? /^`+/.exec(text.slice(i, i + FAR))[0] : text[i]; plain += run; i += run.length; }
  }
  flush();
  return into;
}
/* [node, length] of what begins here, or null. */
function special(text, i, end, depth) {
  const char = text[i], next = text[i + 1];
  if (char === "`") return codeSpan(text, i, end);
  if (char === "\\" && (next === "(" || next === "[")) {
    const at = end(next === "(" ? "\\)" : "\\]", i + 2);
    return at < 0 ? null : [formula(text.slice(i + 2, at), next === "["), at + 2 - i];
  }
  if (char === "$") return dollars(text, i, end);
  if (char === "[" || (char === "!" && next === "[")) return link(text, i, end, depth);
  if (char === "<" || char === "h" || char === "H") return address(text, i, end);
  if (char === "*" || char === "_" || (char === "~" && next === "~")) return emphasis(text, i, end, depth);
  return null;
}
function codeSpan(text, i, end) {
  const mark = /^`+/.exec(text.slice(i, i + FAR))[0];
  let at = end(mark, i + mark.length);
  while (at >= 0 && text[at + mark.length] === "`") { // a longer run is another mark
    while (text[at] === "`") at++;
    at = end(mark, at);
  }
  if (at < 0) return null;
  const inside = text.slice(i + mark.length, at).replaceAll("\n", " ");
  return [el("code", "", /^ .*\S.* $/.test(inside) ? inside.slice(1, -1) : inside), at + mark.length - i];
}
/* $x$ is a formula, "$5 and $6" is not: no space inside the marks, no digit behind them. */
function dollars(text, i, end) {
  if (text[i + 1] === "$") {
    const at = end("$$", i + 2);
    return at <= i + 2 ? null : [formula(text.slice(i + 2, at), true), at + 2 - i];
  }
  const at = /\S/.test(text[i + 1] || " ") ? end("$", i + 1) : -1;
  if (at < 0 || /[\s\\]/.test(text[at - 1]) || /[\p{L}\p{N}]/u.test(text[at + 1] || "")) return null;
  const inside = text.slice(i + 1, at);
  return inside.includes("\n\n") || inside.includes("`") ? null : [formula(inside, false), at + 1 - i];
}
function link(text, i, end, depth) {
  const picture = text[i] === "!", from = i + (picture ? 2 : 1), middle = end("](", from);
  if (middle < 0) return null;
  const label = text.slice(from, middle);
  if (label.includes("\n\n") || (!picture && label.includes("["))) return null;
  let at = middle + 2, open = 1;
  for (; at < text.length && at - middle < FAR && text[at] !== "\n"; at++) {
    if (text[at] === "(") open++;
    else if (text[at] === ")" && --open === 0) break;
  }
  if (text[at] !== ")") return null;
  const [target] = text.slice(middle + 2, at).trim().split(/\s/), url = target.replace(/^<|>$/g, "");
  if (!SAFE.test(url)) return null;
  return [picture ? anchor(url, `Picture: ${label || url}`) : anchor(url, label, depth), at + 1 - i];
}
function address(text, i, end) {
  if (text[i] === "<") {
    const at = end(">", i), url = at < 0 ? "" : text.slice(i + 1, at);
    return SAFE.test(url) ? [anchor(url, url), at + 1 - i] : null;
  }
  if (i > 0 && WORD.test(text[i - 1])) return null;
  const found = BARE.exec(text.slice(i, i + FAR));
  if (!found) return null;
  const url = found[0].replace(/[.,;:!?*_~\])]+$/, "");
  return [anchor(url, url), url.length];
}
/* A link that tells the other page nothing of this one. */
function anchor(url, label, depth = DEPTH) {
  const made = el("a");
  made.href = url;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  made.referrerPolicy = "no-referrer";
  made.title = url;
  return inline(made, label, depth < DEPTH ? Math.max(depth + 1, DEPTH - 2) : DEPTH);
}
function emphasis(text, i, end, depth) {
  const char = text[i], before = text[i - 1] || " ";
  if (char === "_" && WORD.test(before)) return null;
  for (const [mark, tag] of [[char.repeat(2), char === "~" ? "del" : "strong"], [char, "em"]]) {
    if (!text.startsWith(mark, i) || (char === "~" && tag === "em")) continue;
    const from = i + mark.length;
    if (!/\S/.test(text[from] || " ")) continue;
    let at = end(mark, from + 1);
    for (let tries = 0; at >= 0 && !closes(text, at, mark); tries++) at = tries < 50 ? end(mark, at + 1) : -1;
    if (at < 0) continue;
    const inside = text.slice(from, at);
    if (!inside.includes("\n\n")) return [inline(el(tag), inside, depth + 1), at + mark.length - i];
  }
  return null;
}
function closes(text, at, mark) {
  const before = text[at - 1], after = text[at + mark.length] || " ";
  if (/\s/.test(before) || before === "\\") return false;
  if (mark.length === 1 && (before === mark || after === mark)) return false;
  if (mark.length === 2 && after === mark[0]) return false;
  return mark[0] !== "_" || !WORD.test(after);
}
