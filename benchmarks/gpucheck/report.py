"""One page of Markdown of what a call has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import aims
from .record import FAILED, LEFT_OUT, WRONG

Row = Mapping[str, Any]
Column = tuple[str, str, str]
"""(key, heading, format)"""
SPEED: Sequence[Column] = (
    ("step_us", "step us", "{:,.0f}"), ("device_us", "device us", "{:,.0f}"),
    ("tokens_s", "tokens/s", "{:,.0f}"), ("tokens_a_step", "tokens a step", "{:.2f}"),
    ("floor_us", "floor us", "{:,.0f}"), ("share", "of floor", "{:.1%}"),
    ("idle_ratio", "idle", "{:.2%}"), ("cause", "mostly", "{}"), ("ratio", "x", "{:.2f}"),
    ("step_ratio", "x step time", "{:.2f}"), ("ours_x", "ours, times as fast", "{:.2f}"))
KERNELS: Sequence[Column] = (
    ("us", "us", "{:.1f}"), ("gbs", "GB/s", "{:,.0f}"), ("tflops", "TFLOP/s", "{:.1f}"),
    ("share", "of ceiling", "{:.0%}"), ("peer", "best peer", "{}"),
    ("peer_us", "its us", "{:.1f}"), ("ratio", "x", "{:.2f}"))
PROFILE: Sequence[Column] = (
    ("step_us", "step us", "{:,.0f}"), ("wall_us", "us under the profiler", "{:,.0f}"),
    ("kernels_us", "sum of kernels, us", "{:,.0f}"), ("covered_us", "any runs, us", "{:,.0f}"),
    ("idle_share", "none runs", "{:.2%}"), ("idle_ratio", "idle, as the engine counts", "{:.2%}"),
    ("long_gaps", "gaps over 10 us", "{:.2%}"), ("clock_least", "clock: least", "{:.2%}"),
    ("clock_most", "clock: most", "{:.2%}"),
    ("launches", "kernels a step", "{:,.0f}"), ("counted", "counted without a device", "{:,.0f}"))
CEILINGS: Sequence[Column] = (
    ("gbs", "GB/s", "{:,.0f}"), ("tflops", "TFLOP/s", "{:,.0f}"),
    ("us_in_a_graph", "us in a graph", "{:.2f}"), ("us_by_the_host", "us by the host", "{:.2f}"),
    ("us_of_a_second_graph", "us of a second graph", "{:.2f}"),
    ("sm_mhz", "SM MHz then", "{:.0f}"), ("watts", "W", "{:.0f}"))
TESTS: Sequence[Column] = (
    ("selected", "tests", "{}"), ("passed", "passed", "{}"), ("failed", "failed", "{}"),
    ("skipped", "skipped", "{}"), ("seconds", "seconds", "{:.0f}"))
CAPTURED: Sequence[Column] = (("seconds", "seconds", "{:.2f}"), ("graphs", "graphs", "{}"),
                              ("largest", "tokens of the largest", "{:,}"),
                              ("graph_mib", "MiB", "{:,.0f}"),
                              ("planned_mib", "planned", "{:,.0f}"))
TOKENS: Sequence[Column] = (("compared", "tokens", "{}"), ("distinct", "different ones", "{}"))
FIRST: Sequence[Column] = (("name", "row", "{}"), ("verdict", "is", "{}"),
                           ("error", "error", "{:.2g}"), ("tolerance", "allowed", "{:.2g}"))
LAST: Sequence[Column] = (("why", "slow since", "{}"),)
KINDS = {"selected": TESTS, "wall_us": PROFILE, "graphs": CAPTURED, "step_us": SPEED,
         "compared": TOKENS, "side": CEILINGS, "us_in_a_graph": CEILINGS, "us": KERNELS}
"""Columns of a row, by the first of these that it has."""
TITLES = {
    "decode": "Decode, Llama-3.1-8B shape, launch path and device alone",
    "decode, fp8 weights": "The same with --quantization fp8",
    "decode, fp8 pages": "The same with --kv-cache-dtype fp8_e4m3",
    "profile": "Steps under the profiler", "ring": "Decode, the whole engine, overlap on",
    "ring without overlap": "Decode, the whole engine, overlap off",
    "speculation": "Two drafts a step, forced acceptance 0.8/0.6, Qwen3.5-like 9B shape",
    "longer and mixed": "Longer contexts; steps that hold a piece of a prompt",
    "transformers": "transformers on the Llama shape, static batches, as its users run it",
    "tokens": "Tokens of the demo model",
    "worker": "Tests of the worker, alone", "others": "Tests"}
SHOWN = 12
"""Kernels of a profile on the page; the .json holds more."""
LABELS = ("device", "driver", "torch", "triton", "python", "transformers", "fla-core", "date")


def labels(said: Mapping[str, Any]) -> str:
    """What a call's figures depend on. said: its facts."""
    return "; ".join([*(f"{name} {said[name]}" for name in LABELS if name in said),
                      f"kernels' cache {said.get('cache', '?')} at the start"])


def page(found: Mapping[str, Any]) -> str:
    """The page. found: all of the record."""
    groups = found["groups"]
    said = found["facts"]
    title = f"# GPU figures: {found['part']}"
    lines = [title + (" (toy sizes on a CPU: they say nothing)" if found["toy"] else ""), "",
             labels(said) + "."]
    if said.get("sm_mhz_most"):
        lines.append(f"SM clock {said.get('sm_mhz')} MHz at the start, most {said['sm_mhz_most']}; "
                     f"memory {said.get('memory_mhz')} MHz; {said.get('watts_most')} W at most.")
    lines += aims.table(groups)
    for name, own in groups.items():
        lines += _group(name, own)
    for kind, heading in ((WRONG, "Wrong"), (FAILED, "Failed"), (LEFT_OUT, "Left out")):
        skipped = [f"- {name}: {each['name']}: {each['why']}" for name, own in groups.items()
                   for each in own["skipped"] if each["kind"] == kind]
        lines += ["", f"## {heading}", "", *skipped] if skipped else []
    return "\n".join(lines) + "\n"


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Markdown; columns that no row has are left out."""
    shown = [c for c in columns if any(row.get(c[0]) is not None for row in rows)]
    lines = ["| " + " | ".join(heading for _, heading, _ in shown) + " |",
             "|" + "---|" * len(shown)]
    lines += ["| " + " | ".join(_cell(form, row.get(key)) for key, form in
                                ((key, form) for key, _, form in shown)) + " |" for row in rows]
    return lines


def _cell(form: str, value: Any) -> str:
    try:
        text = "" if value is None else form.format(value)
    except ValueError:
        text = str(value)
    return text.replace("|", "\\|")


def _group(name: str, own: Mapping[str, Any]) -> list[str]:
    rows = [{**row, "cause": max(row["causes"], key=row["causes"].get)} if row.get("causes")
            else row for row in own["rows"]]
    if not rows:
        return []
    lines = ["", f"## {TITLES.get(name, name)}"]
    kinds = [next((KINDS[key] for key in KINDS if key in row), CEILINGS) for row in rows]
    for columns in dict.fromkeys(kinds):
        mine = [row for row, kind in zip(rows, kinds, strict=True) if kind is columns]
        lines += ["", *table((*FIRST, *columns, *LAST), mine)]
    for row in rows:
        if row.get("top"):
            calls = ", ".join(f"{call} {count:g}" for call, count in row["calls"].items())
            lines += ["", f"{row['name']}: calls of the host a step: {calls or 'none'}. Kernels:",
                      "", *table((("kernel", "kernel", "{}"), ("launches", "a step", "{:g}"),
                                  ("us", "us a step", "{:.1f}"), ("share", "share", "{:.1%}")),
                                 row["top"][:SHOWN])]
    return lines + _opening(own["facts"])


def _opening(facts: Mapping[str, Any]) -> list[str]:
    if "bytes" not in facts:
        return []
    seconds = ", ".join(f"{name} {spent:.1f}" for name, spent in facts["seconds"].items())
    bytes_ = ", ".join(f"{name} {facts['bytes'][name] / 2**30:.2f} ({planned / 2**30:.2f})"
                       for name, planned in facts["planned"].items() if name in facts["bytes"])
    return ["", f"Seconds: {seconds}. GiB (planned): {bytes_}."]
