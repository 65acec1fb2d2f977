/* ---- code: comments, strings, numbers and words that many languages reserve ---- */
const RESERVED = new Set(("abstract and as assert async await bool break byte case catch char class const continue def default defer del delete do double "
  + "elif else end enum except export extends extern False final finally float fn for foreach from func function global go if impl implements import in "
  + "instanceof int interface is lambda let long loop match mod module mut namespace new nil None nonlocal not null or package pass private protected pub public "
  + "raise return self short sizeof static string struct super switch template this throw True true false trait try type typedef typeof union unless unsafe "
  + "unsigned use using var virtual void volatile when where while with yield select insert update create table group order by join then fi done echo").split(" "));
const HASHED = new Set("py python sh bash zsh shell rb ruby r perl yaml yml toml make makefile dockerfile conf ini elixir nim julia".split(" "));
const PLAIN = new Set(["", "text", "txt", "plain", "output", "console", "markdown", "md", "diff", "log", "csv"]);
const PIECE = /(\/\*[^]*?(?:\*\/|$)|\/\/[^\n]*)|(#[^\n]*)|(--[^\n]*)|("""[^]*?(?:"""|$)|"(?:\\[^]|[^"\\\n])*"?|'(?:\\[^]|[^'\\\n])*'?|`(?:\\[^]|[^`\\])*`?)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g;

/* Appends a text to a node, its parts in spans. */
function highlighted(into, text, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || text.length > 50000) { into.append(text); return into; }
  let at = 0;
  for (const found of text.matchAll(PIECE)) {
    const [piece, slashed, hashed, dashed, quoted, number, word] = found;
    const kind = slashed && !HASHED.has(name) ? "comment" : hashed && HASHED.has(name) ? "comment" : dashed && /^(?:sql|lua|haskell|hs|ada)$/.test(name) ? "comment"
      : quoted ? "string" : number ? "number" : word && RESERVED.has(name === "sql" ? word.toLowerCase() : word) ? "reserved" : "";
    if (!kind) continue;
    into.append(text.slice(at, found.index), el("span", kind, piece));
    at = found.index + piece.length;
  }
  into.append(text.slice(at));
  return into;
}
