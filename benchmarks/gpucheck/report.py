"""What a call has measured, as one page of Markdown: the figures that are wanted of one H200 and
the rows that answer, and every row. And the figures of docs/gpu.md, made of the files that the
calls have left in benchmarks/results: `python benchmarks/gpu.py page` writes them between the marks
there; a test asks that they are there as they would be made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import shapes
from .plan import PARTS, ROOT, Group
from .record import FAILED, LEFT_OUT, RIGHT, SLOW, WRONG

Groups = Mapping[str, Any]
NOISE = 0.95
"""Share of our time below which a peer counts as faster."""


class Aim(NamedTuple):
    what: str
    group: str
    rows: tuple[str, ...]
    key: str
    least: float | None = None
    most: float | None = None
    form: str = "{:.1%}"

    def reached(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most)

    @property
    def wanted(self) -> str:
        sign, bound = (">=", self.least) if self.least is not None else ("<=", self.most)
        return f"{sign} {self.form.format(bound)}"


ONE, MANY = shapes.DECODED[0].name, shapes.DECODED[-1].name
RING = tuple(own.name for own in shapes.RING)
REPLAYS = tuple(f"replay {own.name}" for own in shapes.PROFILED)
LARGE = tuple(own.name for own in shapes.DECODES if own.bytes >= 200e6 and own.q_len == 1)
GDN = f"step, 256 x {shapes.DELTA_HEADS[0][0]}/{shapes.DELTA_HEADS[0][1]} heads of 128"
AIMS: Sequence[Aim] = (
    Aim("decode, batch 1: share of the byte floor", "decode", (ONE,), "share", 0.92),
    Aim("decode, batch 256: share of the byte floor", "decode", (MANY,), "share", 0.75),
    Aim("decode, idle by the profiler in gaps over 10 us", "profile", REPLAYS, "long_gaps", None,
        0.015),
    Aim("whole engine, idle share of the device", "ring", RING, "idle_ratio", None, 0.015),
    Aim("seconds to capture, cache of kernels warm", "profile", ("graph capture",), "seconds",
        None, 3.0, "{:.1f}"),
    Aim("seconds to capture 58 sizes of steps with prompts", "profile", ("capture of 58 sizes",),
        "seconds", None, 5.0, "{:.1f}"),
    Aim("paged decode attention, 200 MB and more: share of bandwidth", "paged decode", LARGE,
        "share", 0.85),
    Aim("paged extend, 4,096 causal: TFLOP/s", "paged extend", (shapes.EXTENDS[0].name,), "tflops",
        430.0, None, "{:.0f}"),
    Aim("paged extend, 4 of 4,096: times torch's best SDPA", "paged extend",
        (shapes.EXTENDS[1].name,), "ratio", 1.0, None, "{:.2f}"),
    Aim("GDN step, 256 sequences: share of bandwidth", "gdn", (GDN,), "share", 0.75),
    Aim("two drafts: times the tokens of none", "speculation",
        tuple(f"2 drafts, batch {n}" for n in shapes.DRAFTING), "ratio", 1.9, None, "{:.2f}"))


def too_slow(group: str, row: Mapping[str, Any]) -> str:
    """Returns why a row counts as slow (a peer is faster by more than noise, or it misses an aim),
    or an empty string."""
    if "peer" in row and row["ratio"] < NOISE:
        return f"{row['peer']} takes {row['ratio']:.0%} of its time"
    return "; ".join(f"{aim.what}: {aim.form.format(row[aim.key])}, wanted {aim.wanted}"
                     for aim in AIMS if aim.group == group and row["name"] in aim.rows
                     and aim.key in row and not aim.reached(row[aim.key]))


def aim_table(groups: Groups) -> list[str]:
    """Returns a Markdown table of the aims these groups cover; of several rows the worst counts."""
    lines = []
    for aim in AIMS:
        if aim.group not in groups:
            continue
        rows = {row["name"]: row for row in groups[aim.group]["rows"]}
        found = [rows[name][aim.key] for name in aim.rows if aim.key in rows.get(name, {})]
        if not found:
            lines.append(f"| {aim.what} | never measured | {aim.wanted} | |")
            continue
        worst = min(found) if aim.least is not None else max(found)
        some = "" if len(found) == len(aim.rows) else f" ({len(found)} of {len(aim.rows)} rows)"
        lines.append(f"| {aim.what} | {aim.form.format(worst)}{some} | {aim.wanted} | "
                     f"{'yes' if aim.reached(worst) else 'no'} |")
    head = ["", "| aim | measured | wanted | reached |", "|---|---|---|---|"]
    return [*head, *lines] if lines else []


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
    ("gbs", "GB/s", "{:,.0f}"), ("gbs_graph", "copied in a graph", "{:,.0f}"),
    ("gbs_host", "by the host", "{:,.0f}"), ("gbs_kernel", "by a kernel", "{:,.0f}"),
    ("gbs_read", "read alone", "{:,.0f}"), ("tflops", "TFLOP/s", "{:,.0f}"),
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
    """Returns what a call's figures depend on. said: its facts."""
    return "; ".join([*(f"{name} {said[name]}" for name in LABELS if name in said),
                      f"kernels' cache {said.get('cache', '?')} at the start"])


def page(found: Mapping[str, Any]) -> str:
    groups = found["groups"]
    said = found["facts"]
    title = f"# GPU figures: {found['part']}"
    lines = [title + (" (toy sizes on a CPU: they say nothing)" if found["toy"] else ""), "",
             labels(said) + "."]
    if said.get("sm_mhz_most"):
        lines.append(f"SM clock {said.get('sm_mhz')} MHz at the start, most {said['sm_mhz_most']}; "
                     f"memory {said.get('memory_mhz')} MHz; {said.get('watts_most')} W at most.")
    lines += aim_table(groups)
    for name, own in groups.items():
        lines += _group(name, own)
    for kind, heading in ((WRONG, "Wrong"), (FAILED, "Failed"), (LEFT_OUT, "Left out")):
        skipped = [f"- {name}: {each['name']}: {each['why']}" for name, own in groups.items()
                   for each in own["skipped"] if each["kind"] == kind]
        lines += ["", f"## {heading}", "", *skipped] if skipped else []
    return "\n".join(lines) + "\n"


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Returns a Markdown table without columns that no row has."""
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


PAGE = ROOT / "docs/gpu.md"
BEGIN, END = ("<!-- figures: made by benchmarks/gpu.py page -->\n", "<!-- end of figures -->\n")
UNSEEN = "never measured"
OUTCOMES = (RIGHT, SLOW, WRONG, FAILED, LEFT_OUT, UNSEEN)
Found = Mapping[str, Any]
COLUMNS: tuple[Column, ...] = (
    ("group", "what", "{}"), ("name", "row", "{}"), ("outcome", "is", "{}"),
    ("share", "of the byte floor", "{:.1%}"), ("tokens_s", "tokens/s", "{:,.0f}"),
    ("limit", "at the floor", "{:,.0f}"), ("idle_share", "idle, by the profiler", "{:.2%}"),
    ("long_gaps", "in gaps over 10 us", "{:.2%}"), ("idle_ratio", "idle, by our clock", "{:.2%}"),
    ("capture", "seconds to capture", "{:.2f}"), ("passed", "tests passed", "{}"),
    ("compared", "tokens compared", "{}"), ("reason", "since", "{}"))


def write(folder: Path, page: Path = PAGE) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + figures(folder) + END + rest.partition(END)[2])


def figures(folder: Path) -> str:
    """Returns the text between the marks. Toy runs are ignored."""
    calls = {part: found for part in PARTS if (found := _read(folder / f"gpu-{part}.json"))}
    parts = {part: [(group, calls.get(part, {}).get("groups", {}).get(group.name, {}))
                    for group in make()] for part, make in PARTS.items()}
    lines = [f"- `{part}`: {labels(calls[part]['facts']) if part in calls else UNSEEN}."
             for part in PARTS]
    if not calls:
        lines = ["No device has given results yet: nothing below was ever measured."]
    lines += aim_table({group.name: {"rows": own.get("rows", [])}
                        for part in ("kernels", "contact") for group, own in parts[part]})
    rows = [_contact_row(group, row.name, own) for group, own in parts["contact"]
            for row in group.rows]
    lines += ["", "Every row of the call `contact`:", "", *table(COLUMNS, rows)]
    lines += ["", "Of the other calls, how many rows are right, and which are not:", "",
              "| call | group | " + " | ".join(OUTCOMES) + " |", "|---" * (2 + len(OUTCOMES)) + "|"]
    for part in ("kernels", "tests"):
        for group, own in parts[part]:
            named = {kind: [row.name for row in group.rows if outcome(own, row.name)[0] == kind]
                     for kind in OUTCOMES}
            cells = [str(len(named[RIGHT])), *("; ".join(named[kind]) for kind in OUTCOMES[1:])]
            lines.append(f"| `{part}` | {group.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def outcome(own: Found, name: str) -> tuple[str, str]:
    """Returns a row's outcome and the reason. own: its group's part of a call's file, or {}."""
    skipped = [each for each in own.get("skipped", []) if each["name"] == name]
    bad = [each for each in skipped if each["kind"] != LEFT_OUT]
    row = next((row for row in own.get("rows", []) if row["name"] == name), {})
    if "verdict" in row and not bad:
        return row["verdict"], row.get("why", "") or "; ".join(each["why"] for each in skipped)
    return next(((each["kind"], each["why"]) for each in (*bad, *skipped)), (UNSEEN, ""))


def _read(path: Path) -> Found | None:
    content: Found | None = json.loads(path.read_text()) if path.exists() else None
    return None if content is None or content["toy"] else content


def _contact_row(group: Group, name: str, own: Found) -> dict[str, Any]:
    row = next((dict(row) for row in own.get("rows", []) if row["name"] == name), {})
    is_, reason = outcome(own, name)
    limit = {"limit": row["batch"] / row["floor_us"] * 1e6} if "floor_us" in row else {}
    capture = {"capture": row["seconds"]} if "graphs" in row else {}
    return row | limit | capture | {"name": name, "outcome": is_, "reason": reason or None,
                                    "group": group.name}
