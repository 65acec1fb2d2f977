"""The figures of docs/gpu.md, made of the files that the calls have left in benchmarks/results:
`python benchmarks/gpu.py page` writes them between the marks there; a test asks that they are there
as they would be made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import aims, report
from .plan import PARTS, ROOT, Group
from .record import FAILED, LEFT_OUT, RIGHT, SLOW, WRONG

PAGE = ROOT / "docs/gpu.md"
BEGIN, END = ("<!-- figures: made by benchmarks/gpu.py page -->\n", "<!-- end of figures -->\n")
UNSEEN = "never measured"
OUTCOMES = (RIGHT, SLOW, WRONG, FAILED, LEFT_OUT, UNSEEN)
Found = Mapping[str, Any]
COLUMNS: tuple[report.Column, ...] = (
    ("group", "what", "{}"), ("name", "row", "{}"), ("outcome", "is", "{}"),
    ("share", "of the byte floor", "{:.1%}"), ("tokens_s", "tokens/s", "{:,.0f}"),
    ("limit", "at the floor", "{:,.0f}"), ("idle_share", "idle, by the profiler", "{:.2%}"),
    ("long_gaps", "in gaps over 10 us", "{:.2%}"), ("idle_ratio", "idle, by our clock", "{:.2%}"),
    ("capture", "seconds to capture", "{:.2f}"), ("passed", "tests passed", "{}"),
    ("compared", "tokens compared", "{}"), ("reason", "since", "{}"))


def write(folder: Path, page: Path = PAGE) -> None:
    """Write the figures of a folder into the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + figures(folder) + END + rest.partition(END)[2])


def figures(folder: Path) -> str:
    """What stands between the marks. Toy runs are none."""
    calls = {part: found for part in PARTS if (found := _read(folder / f"gpu-{part}.json"))}
    parts = {part: [(group, calls.get(part, {}).get("groups", {}).get(group.name, {}))
                    for group in make()] for part, make in PARTS.items()}
    lines = [f"- `{part}`: {report.labels(calls[part]['facts']) if part in calls else UNSEEN}."
             for part in PARTS]
    if not calls:
        lines = ["No device has given results yet: nothing below was ever measured."]
    lines += aims.table({group.name: {"rows": own.get("rows", [])}
                         for part in ("kernels", "contact") for group, own in parts[part]})
    rows = [_row(group, row.name, own) for group, own in parts["contact"] for row in group.rows]
    lines += ["", "Every row of the call `contact`:", "", *report.table(COLUMNS, rows)]
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
    """What became of a row, and why. own: its group's part of a call's file, {} where there is
    none."""
    skipped = [each for each in own.get("skipped", []) if each["name"] == name]
    bad = [each for each in skipped if each["kind"] != LEFT_OUT]
    row = next((row for row in own.get("rows", []) if row["name"] == name), {})
    if "verdict" in row and not bad:
        return row["verdict"], row.get("why", "") or "; ".join(each["why"] for each in skipped)
    return next(((each["kind"], each["why"]) for each in (*bad, *skipped)), (UNSEEN, ""))


def _read(path: Path) -> Found | None:
    found: Found | None = json.loads(path.read_text()) if path.exists() else None
    return None if found is None or found["toy"] else found


def _row(group: Group, name: str, own: Found) -> dict[str, Any]:
    row = next((dict(row) for row in own.get("rows", []) if row["name"] == name), {})
    is_, reason = outcome(own, name)
    limit = {"limit": row["batch"] / row["floor_us"] * 1e6} if "floor_us" in row else {}
    capture = {"capture": row["seconds"]} if "graphs" in row else {}
    return row | limit | capture | {"name": name, "outcome": is_, "reason": reason or None,
                                    "group": group.name}
