"""What a run has found, for JSON, for the terminal, and as one HTML file with a picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from typing import Any

import msgspec

from actorium.tools.evaluation.report_pages import page, setting_table, table
from actorium.tools.verify.conditions import AXES, PLAIN, Condition, described
from actorium.tools.verify.contradictions import SILENCE
from actorium.tools.verify.verify_cases import VerifyCase, length_of
from actorium.tools.verify.verify_run import EngineCounts, VerifyTally

SHOWN = 5
"""Contradictions on a terminal."""
KEPT = 200
"""In the JSON."""


def verify_result(tally: VerifyTally, plain: Condition = PLAIN,
                  counts: EngineCounts | None = None) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    for own in tally.observed:
        kinds[own.difference.kind] = kinds.get(own.difference.kind, 0) + 1
    return {
        "comparisons": tally.comparisons, "contradictions": len(tally.observed), "kinds": kinds,
        "rounds": tally.rounds, "engines": tally.engines, "interrupted": tally.interrupted,
        "plain": described(plain), "not_started": tally.not_started,
        "unanswered": dict(tally.unanswered), "counts": asdict(counts or EngineCounts()),
        "axes": [{"axis": axis, "value": value, "comparisons": count,
                  "contradictions": tally.wrong_by_axis[axis, value]}
                 for (axis, value), count in sorted(tally.by_axis.items())],
        "pairs": [{"axes": list(pair), "comparisons": count}
                  for pair, count in sorted(tally.pairs.items())],
        "found": [{"condition": described(own.condition, plain), "case": _case(own.case),
                   "difference": msgspec.to_builtins(own.difference)}
                  for own in tally.observed[:KEPT]],
        "shrunk": [{"condition": described(own.condition, plain), "case": _case(own.case),
                    "neighbours": list(own.neighbours), "seen": own.seen, "tries": own.tries,
                    "runs": own.runs, "difference": None if own.difference is None else
                    msgspec.to_builtins(own.difference)} for own in tally.shrunk]}


def _case(case: VerifyCase) -> dict[str, Any]:
    plain = VerifyCase(prompt=(), max_tokens=0)
    told = msgspec.structs.asdict(case)
    return {name: value for name, value in told.items()
            if name in ("prompt", "max_tokens") or value != getattr(plain, name)} | {
        "prompt_length": length_of(case.prompt)}


def verify_table(result: Mapping[str, Any]) -> str:
    lines = [f"{'axis':<18}{'value':<12}{'comparisons':>12}{'contradictions':>16}"]
    lines += [f"{own['axis']:<18}{own['value']:<12}{own['comparisons']:>12}"
              f"{own['contradictions']:>16}" for own in result["axes"]]
    lines.append(f"{'together':<30}{result['comparisons']:>12}{result['contradictions']:>16}")
    lines.append(f"{len(result['engines'])} engines, {len(result['pairs'])} pairs of axes")
    lines += [f"not tried: {flags}: {why}" for flags, why in result["not_started"].items()]
    lines += [f"without an answer: {count} ({why})"
              for why, count in result["unanswered"].items()]
    lines += _meanwhile(result["counts"])
    if result["kinds"]:
        lines.append("first differences: " + ", ".join(
            f"{kind} {count}" for kind, count in sorted(result["kinds"].items())))
    shown = result["shrunk"][:SHOWN] or result["found"][:SHOWN]
    for number, own in enumerate(shown, 1):
        lines += ["", f"{number}. {result['plain']}  against  {own['condition']}",
                  *_case_lines(own)]
    if result["interrupted"]:
        lines.append("interrupted: this is what was found by then")
    return "\n".join(lines)


def _meanwhile(counts: Mapping[str, int]) -> list[str]:
    lines = []
    if counts["deaths"]:
        lines.append(f"workers killed: {counts['deaths']}, {counts['deaths_met']} of them with "
                     "answers under way")
    if counts["drafts"]:
        lines.append(f"tokens drafted: {counts['drafts']}, {counts['accepted']} of them accepted "
                     f"({counts['accepted'] / counts['drafts']:.0%})")
    return lines


def _case_lines(own: Mapping[str, Any]) -> list[str]:
    case = own["case"]
    asked = ", ".join(f"{name}={value}" for name, value in case.items()
                      if name not in ("prompt", "prompt_length", "schema"))
    lines = [f"   prompt of {case['prompt_length']}, {asked}"
             + (", schema" if "schema" in case else "")]
    if own.get("neighbours"):
        lines.append(f"   beside prompts of {', '.join(map(str, own['neighbours']))}")
    if "seen" in own:
        lines.append("   not seen again" if own["difference"] is None else
                     f"   seen {own['seen']} of {own['tries']} times"
                     + (" (it comes and goes)" if own["seen"] < own["tries"] else ""))
    if own["difference"] is not None:
        lines += difference_lines(own["difference"])
    return lines


def difference_lines(found: Mapping[str, Any]) -> list[str]:
    """The first token that differs, with both tokens' log-probabilities on both sides."""
    if found["kind"] == SILENCE:
        return [f"   {found['other']}"]
    place = "character" if found["kind"] == "text" else "token"
    head = f"   {found['kind']} differs at {place} {found['at']} of choice {found['choice']}"
    if found["kind"] == "logprob":
        return [f"{head}: {found['plain']}, {_value(found, 'plain', 'plain')} and "
                f"{_value(found, 'other', 'plain')}; {found['nats']:.3g} nats apart at the most"]
    lines = [f"{head}: {found['plain']} and {found['other']}"]
    if found["plain_logprobs"] or found["other_logprobs"]:
        lines += [f"   {side}: " + ", ".join(
            f"{found[token]} {_value(found, side, token)}" for token in ("plain", "other"))
            for side in ("plain", "other")]
    return lines


def _value(found: Mapping[str, Any], side: str, token: str) -> str:
    value = found[f"{side}_logprobs"].get(found[token])
    return "?" if value is None else f"{value:.9g}"


CELL, LEFT, TOP = 34, 130, 120


def verify_page(result: Mapping[str, Any]) -> str:
    """Returns the page of a `verify_result` with the setting's fields."""
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
