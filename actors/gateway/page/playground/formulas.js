/* ---- formulas, by Temml, as MathML ---- */
const FORMULA = { maxSize: [20, 200], maxExpand: 200, trust: false, throwOnError: true, strict: false };
const LONGEST = 5000;
const formulas = new Map();

/* A formula in TeX as a node; as code if it is none that can be drawn. */
function formula(tex, display) {
  const name = `${display ? "d" : "i"}${tex}`;
  let made = formulas.get(name);
  if (!made) {
    if (formulas.size > 300) formulas.clear();
    formulas.set(name, made = drawFormula(tex, display));
  }
  return made.cloneNode(true);
}
function drawFormula(tex, display) {
  const box = el("span", display ? "math display" : "math");
  if (display) box.tabIndex = 0;
  try {
    if (tex.length > LONGEST) throw new Error("too long");
    temml.render(tex.trim(), box, { ...FORMULA, displayMode: display });
  } catch { // not TeX, or TeX that Temml refuses
    box.replaceChildren(el("code", "", tex));
  }
  return box;
}
