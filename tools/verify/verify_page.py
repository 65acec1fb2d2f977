"""A run as one HTML file, with a picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from actorium.tools.evaluation.report_pages import page, setting_table, table
from actorium.tools.verify.conditions import AXES
from actorium.tools.verify.verify_report import difference_lines, verify_table

CELL, LEFT, TOP = 34, 130, 120


def verify_page(result: Mapping[str, Any]) -> str:
    """Of `verify_report.verify_result`, with the setting's fields."""
    kind = "wrong" if result["contradictions"] else "right"
    parts = [f'<p class="{kind}">{result["contradictions"]} contradictions in '
             f"{result['comparisons']} comparisons.</p>",
             setting_table(result, ("model", "server", "logprobs", "seed", "version", "plain")),
             "<h2>Pairs of axes that were off their plain values together</h2>",
             pair_grid(result), "<h2>Axes</h2>",
             table(("axis", "value", "comparisons", "contradictions"),
                   [(own["axis"], own["value"], own["comparisons"], own["contradictions"])
                    for own in result["axes"]])]
    if result["shrunk"]:
        parts.append("<h2>The smallest pairs</h2>")
    for own in result["shrunk"]:
        told = difference_lines(own["difference"]) if own["difference"] else ["not seen again"]
        parts.append(f"<h3>{escape(result['plain'])} against {escape(own['condition'])}</h3>"
                     f"<p>seen {own['seen']} of {own['tries']} times</p>"
                     f"<pre>{escape(chr(10).join(told))}</pre>"
                     f"<details><summary>the request</summary><pre>{escape(str(own['case']))}"
                     f"</pre></details>")
    parts.append(f"<h2>In words</h2><pre>{escape(verify_table(result))}</pre>")
    return page("Does it contradict itself?", parts)


def pair_grid(result: Mapping[str, Any]) -> str:
    """A square for each pair of axes, the darker the more comparisons; red: one of the shrunk
    contradictions needs both (on the diagonal: this axis alone)."""
    counts = {tuple(own["axes"]): own["comparisons"] for own in result["pairs"]}
    for own in result["axes"]:
        alone = (own["axis"], own["axis"])
        counts[alone] = counts.get(alone, 0) + own["comparisons"]
    names = [axis for axis in AXES if (axis, axis) in counts]
    wrong = [{word.partition("=")[0] for word in own["condition"].split(", ")}
             for own in result["shrunk"] if own["difference"]]
    most = max(counts.values(), default=1)
    width, height = LEFT + CELL * len(names) + 10, TOP + CELL * len(names) + 10
    parts = [f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
             f'aria-label="comparisons by pair of axes">']
    for i, name in enumerate(names):
        x, y = LEFT + CELL * i + CELL / 2, TOP + CELL * i + 21
        parts += [f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{name}</text>',
                  f'<text transform="translate({x},{TOP - 8}) rotate(-60)">{name}</text>']
        for j, other in enumerate(names[:i + 1]):
            count = counts.get((other, name), counts.get((name, other), 0))
            fault = any({name, other} <= axes and (name != other or len(axes) == 1)
                        for axes in wrong)
            shade = 96 - 50 * (count / most) ** 0.5 if count else 98
            fill = "#d33" if fault else f"hsl(150 45% {shade:.0f}%)"
            parts.append(f'<rect x="{LEFT + CELL * j}" y="{TOP + CELL * i}" width="{CELL - 2}" '
                         f'height="{CELL - 2}" fill="{fill}"><title>{name} and {other}: {count}'
                         f"</title></rect>")
    return "".join(parts) + "</svg>"
