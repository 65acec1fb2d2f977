/* ---- charts of the last minute and a half ---- */
const SECONDS = 90, HEIGHT = 40, GAP = 3.5;
const CHARTS = [
  { id: "tokens", title: "Tokens per second", series: [["made", one => one.tokens_per_second], ["prompt", one => one.prompt_tokens_per_second]], write: whole },
  { id: "queue", title: "Sequences", series: [["running", one => one.running], ["waiting", one => one.waiting]], write: whole },
  { id: "pages", title: "Pages", series: [["held", one => one.pages_used], ["cached", one => one.pages_cached]], write: whole, of: one => one.pages },
  { id: "step", title: "Step", series: [["", one => one.step_ms]], write: value => `${value.toFixed(value < 10 ? 2 : 1)} ms` },
  { id: "drafts", title: "Drafts accepted", series: [["", one => one.acceptance]], write: value => `${Math.round(100 * value)} %`, most: 1 },
].map(chart => {
  const svg = (tag, className) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    made.setAttribute("class", className);
    return made;
  };
  const picture = svg("svg", "");
  picture.setAttribute("viewBox", `0 0 ${SECONDS + 1} ${HEIGHT}`);
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", chart.title);
  const paths = chart.series.map((_, i) => svg("path", "ab"[i])), fill = svg("path", "f"), cursor = svg("line", "cursor");
  const dots = chart.series.map((_, i) => svg("path", `dots ${"ab"[i]}`));
  picture.append(fill, ...dots.reverse(), ...paths.slice().reverse(), cursor);
  const values = chart.series.map(() => el("b", "", "–")), top = el("span", "most");
  const keys = chart.series.map(([name], i) => el("span", name ? "key" : "", name ? `${name} ` : "", values[i]));
  const box = el("div", "chart", el("div", "head", el("span", "", chart.title), el("span", "values", ...keys)),
    el("div", "plot", picture, top));
  box.id = `chart-${chart.id}`;
  $("charts").append(box);
  return { ...chart, picture, paths, dots: dots.reverse(), fill, cursor, values, top };
});
let seen = [], pointed = null;
/* Adds a sample to what the charts show. */
function plotSample(one) {
  if (seen.length && one.at <= seen[seen.length - 1].at) return;
  seen.push(one);
  seen = seen.filter(old => one.at - old.at <= SECONDS);
  CHARTS.forEach(plot);
}

/* A series as runs of [x, y], parted where nothing is known. */
function runs(values, x, y) {
  const found = [];
  let open = null;
  values.forEach((value, i) => {
    if (typeof value !== "number") { open = null; return; }
    if (!open || seen[i].at - seen[i - 1].at > GAP) found.push(open = []);
    open.push(`${x(i).toFixed(2)} ${y(value).toFixed(2)}`);
  });
  return found;
}
const line = run => `M${run.join("L")}`;
const ground = run => `${line(run)}L${run[run.length - 1].split(" ")[0]} ${HEIGHT}L${run[0].split(" ")[0]} ${HEIGHT}Z`;
function plot(chart) {
  const last = seen[seen.length - 1], shown = pointed === null ? last : nearest(pointed);
  const lines = chart.series.map(([, of]) => seen.map(of));
  const known = lines.flat().filter(value => typeof value === "number");
  const most = chart.most || Math.max(...known, 0), scale = most > 0 ? most : 1;
  const x = i => SECONDS - (last.at - seen[i].at), y = value => HEIGHT - 1.5 - (HEIGHT - 6) * Math.max(0, value) / scale;
  lines.map(values => runs(values, x, y)).forEach((parts, i) => {
    chart.paths[i].setAttribute("d", parts.filter(run => run.length > 1).map(line).join(""));
    chart.dots[i].setAttribute("d", parts.filter(run => run.length === 1).map(run => `M${run[0]}h.01`).join(""));
    if (i === 0) chart.fill.setAttribute("d", parts.map(ground).join(""));
  });
  chart.top.textContent = known.length && most ? `${chart.write(most)}${chart.of && last.pages ? ` of ${whole(last.pages)}` : ""}` : "";
  const at = SECONDS - (last.at - shown.at);
  for (const [name, value] of [["x1", at], ["x2", at], ["y1", 0], ["y2", pointed === null ? 0 : HEIGHT]]) chart.cursor.setAttribute(name, value);
  chart.series.forEach(([, of], i) => {
    const value = of(shown);
    chart.values[i].textContent = typeof value === "number" ? chart.write(value) : "–";
  });
  chart.picture.setAttribute("aria-label", `${chart.title}: ${chart.values.map(one => one.parentNode.textContent).join(", ")}`);
}
const nearest = ago => seen.reduce((best, one) => {
  const away = Math.abs(seen[seen.length - 1].at - one.at - ago);
  return away < best[0] ? [away, one] : best;
}, [Infinity, null])[1];
function point(event) {
  const box = event.target.closest(".plot");
  if (!seen.length) return;
  const before = pointed, shape = box && box.getBoundingClientRect();
  pointed = shape ? SECONDS - (SECONDS + 1) * (event.clientX - shape.left) / shape.width : null;
  if (before !== null || pointed !== null) CHARTS.forEach(plot);
}
$("charts").addEventListener("pointermove", point);
$("charts").addEventListener("pointerleave", () => { pointed = null; if (seen.length) CHARTS.forEach(plot); });
