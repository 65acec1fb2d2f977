"""Reports as single HTML files: tables and pictures in SVG, nothing loaded from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;
background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;
text-align:right}td:first-child,th:first-child{text-align:left}
svg{display:block;margin:1rem 0;max-width:100%}svg text{font:12px system-ui,sans-serif;fill:#222}
details{margin:.3rem 0}summary{cursor:pointer}.wrong{color:#a11}.right{color:#171}
"""
SHOWN_ITEMS = 200
"""Questions that a page shows, wrong ones first; the JSON has all."""
BAR_WIDTH, ROW, LABEL = 420, 24, 190


def page(title: str, parts: Sequence[str]) -> str:
    """A whole document of parts that are HTML already."""
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
            f"<h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return ("<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"
            + "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
                      for row in rows) + "</table>")


def setting_table(result: Mapping[str, Any], keys: Sequence[str]) -> str:
    return table(("setting", "value"), [(key.replace("_", " "), result[key]) for key in keys
                                        if result.get(key) not in (None, "", [])])


# --- multiple choice ------------------------------------------------------------------------------

def choice_page(result: Mapping[str, Any]) -> str:
    low, high = result["interval95"]
    rows = [("all", result), *result["categories"].items()]
    parts = [
        f"<p>{result['right']} of {result['count']} right: <b>{100 * result['score']:.1f} %</b>, "
        f"standard error {100 * result['standard_error']:.1f} %, 95 % interval {100 * low:.1f} to "
        f"{100 * high:.1f} %; guesses would have {100 * result['chance']:.1f} %. "
        f"{result['unanswered']} unanswered, {result['errors']} errors, "
        f"{result['seconds']:.1f} s.</p>",
        share_bars(rows, result["chance"]), "<h2>Categories and subjects</h2>",
        table(("", "right", "of", "score", "standard error"),
              [(name, row["right"], row["count"], f"{100 * row['score']:.1f} %",
                f"{100 * row['standard_error']:.1f} %")
               for name, row in [*rows, *result["subjects"].items()]]),
        "<h2>Setting</h2>",
        setting_table(result, ("model", "server", "method", "shots", "data", "split", "seed",
                               "parallel", "version")),
        "<h2>Answers</h2>", *map(_item, sorted(result["items"], key=lambda one: one["right"])
                                 [:SHOWN_ITEMS])]
    return page(f"{result['task']}: {result['model']}", parts)


def share_bars(rows: Sequence[tuple[str, Mapping[str, Any]]], chance: float) -> str:
    """A bar for each share, with its standard error to both sides, and a line where guesses are."""
    height = ROW * len(rows) + 20
    x = lambda share: LABEL + BAR_WIDTH * min(max(share, 0.0), 1.0)  # noqa: E731
    parts = [f'<svg viewBox="0 0 {LABEL + BAR_WIDTH + 70} {height}" '
             f'width="{LABEL + BAR_WIDTH + 70}" role="img" aria-label="scores by category">']
    for i, (name, row) in enumerate(rows):
        y, score, error = ROW * i + 4, row["score"], row["standard_error"]
        parts += [
            f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(name[:28])}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{x(score) - LABEL:.1f}" height="{ROW - 8}" '
            f'fill="{"#33658a" if i == 0 else "#86bbd8"}"/>',
            f'<path d="M{x(score - error):.1f} {y + 8}H{x(score + error):.1f}" stroke="#222"/>',
            f'<text x="{LABEL + BAR_WIDTH + 8}" y="{y + 13}">{100 * score:.1f} %</text>']
    parts += [f'<path d="M{x(chance):.1f} 0V{height - 18}" stroke="#b33" stroke-dasharray="4 3"/>',
              f'<text x="{x(chance):.1f}" y="{height - 4}" text-anchor="middle">chance</text>']
    return "".join(parts) + "</svg>"


def _item(one: Mapping[str, Any]) -> str:
    kind = "right" if one["right"] else "wrong"
    values = one.get("logprobs") or [None] * len(one["choices"])
    options = "".join(
        f"<li>{'<b>' if letter == one['answer'] else ''}{escape(text)}"
        f"{'</b>' if letter == one['answer'] else ''}"
        f"{' (chosen)' if letter == one['chosen'] else ''}"
        f"{'' if value is None else f' {value:.3f}'}</li>"
        for letter, text, value in zip("ABCDEFGHIJ", one["choices"], values, strict=False))
    more = one.get("error") or one.get("text") or ""
    return (f'<details><summary class="{kind}">{escape(one["id"])}: {escape(one["question"][:120])}'
            f'</summary><p>{escape(one["question"])}</p><ol type="A">{options}</ol>'
            f"{f'<pre>{escape(more)}</pre>' if more else ''}</details>")


# --- grids and lines ------------------------------------------------------------------------------

def heat_grid(columns: Sequence[str], rows: Sequence[str], values: Sequence[Sequence[float | None]],
              across: str, down: str) -> str:
    """Cells from red (0) to green (1), grey where there is nothing; values[row][column]."""
    cell, left, top = 64, 110, 46
    width, height = left + cell * len(columns) + 10, top + 34 * len(rows) + 10
    parts = [f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
             f'aria-label="score by {escape(down)} and {escape(across)}">',
             f'<text x="{left}" y="14">{escape(across)}</text>',
             f'<text x="4" y="{top - 8}">{escape(down)}</text>']
    parts += [f'<text x="{left + cell * i + cell / 2}" y="{top - 8}" text-anchor="middle">'
              f"{escape(name)}</text>" for i, name in enumerate(columns)]
    for j, (name, row) in enumerate(zip(rows, values, strict=True)):
        y = top + 34 * j
        parts.append(f'<text x="{left - 8}" y="{y + 21}" text-anchor="end">{escape(name)}</text>')
        for i, value in enumerate(row):
            shown = "" if value is None else f"{100 * value:.0f} %"
            parts += [f'<rect x="{left + cell * i}" y="{y}" width="{cell - 2}" height="32" '
                      f'fill="{_heat(value)}"/>',
                      f'<text x="{left + cell * i + cell / 2}" y="{y + 21}" text-anchor="middle">'
                      f"{shown}</text>"]
    return "".join(parts) + "</svg>"


def _heat(value: float | None) -> str:
    return "#ddd" if value is None else f"hsl({120 * min(max(value, 0.0), 1.0):.0f} 65% 70%)"


def line_chart(values: Sequence[float], across: str, down: str) -> str:
    width, height, left = 640, 200, 60
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    step = (width - left - 10) / max(len(values) - 1, 1)
    points = " ".join(f"{left + step * i:.1f},{20 + 150 * (high - value) / span:.1f}"
                      for i, value in enumerate(values))
    return (f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f'aria-label="{escape(down)} by {escape(across)}">'
            f'<polyline points="{points}" fill="none" stroke="#33658a" stroke-width="1.5"/>'
            f'<text x="{left - 8}" y="24" text-anchor="end">{high:.3g}</text>'
            f'<text x="{left - 8}" y="174" text-anchor="end">{low:.3g}</text>'
            f'<text x="{left}" y="12">{escape(down)}</text>'
            f'<text x="{width - 10}" y="194" text-anchor="end">{escape(across)}</text></svg>')
