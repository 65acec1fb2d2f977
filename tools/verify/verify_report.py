"""What a run has found, for JSON and for the terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from actorium.tools.verify.conditions import PLAIN, Condition, described
from actorium.tools.verify.contradictions import SILENCE
from actorium.tools.verify.verify_cases import VerifyCase, length_of
from actorium.tools.verify.verify_run import EngineCounts, VerifyTally

SHOWN = 5
"""Contradictions on a terminal."""
KEPT = 200
"""In the JSON."""


def verify_result(tally: VerifyTally, plain: Condition = PLAIN,
                  counts: EngineCounts | None = None) -> dict[str, Any]:
    """For JSON."""
    kinds: dict[str, int] = {}
    for own in tally.found:
        kinds[own.difference.kind] = kinds.get(own.difference.kind, 0) + 1
    return {
        "comparisons": tally.comparisons, "contradictions": len(tally.found), "kinds": kinds,
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
                  for own in tally.found[:KEPT]],
        "shrunk": [{"condition": described(own.condition, plain), "case": _case(own.case),
                    "company": list(own.company), "seen": own.seen, "tries": own.tries,
                    "runs": own.runs, "difference": None if own.difference is None else
                    msgspec.to_builtins(own.difference)} for own in tally.shrunk]}


def _case(case: VerifyCase) -> dict[str, Any]:
    plain = VerifyCase(prompt=(), max_tokens=0)
    told = msgspec.structs.asdict(case)
    return {name: value for name, value in told.items()
            if name in ("prompt", "max_tokens") or value != getattr(plain, name)} | {
        "prompt_length": length_of(case.prompt)}


def verify_table(result: Mapping[str, Any]) -> str:
    """Aligned text: axes, then contradictions."""
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
                  *_told_of(own)]
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


def _told_of(own: Mapping[str, Any]) -> list[str]:
    case = own["case"]
    asked = ", ".join(f"{name}={value}" for name, value in case.items()
                      if name not in ("prompt", "prompt_length", "schema"))
    lines = [f"   prompt of {case['prompt_length']}, {asked}"
             + (", schema" if "schema" in case else "")]
    if own.get("company"):
        lines.append(f"   beside prompts of {', '.join(map(str, own['company']))}")
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
