"""docs/gpu.md says what the files in benchmarks/results say, and nothing that no device said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers_benchmarks import BENCHMARKS, benchmark

report, plan = benchmark("gpucheck.report"), benchmark("gpucheck.plan")
RESULTS = BENCHMARKS / "results"
FACTS = {"device": "Some GPU", "torch": "2.11.0", "date": "2026-12-01 10:00 UTC", "cache": "empty"}


def test_the_page_is_that_of_the_results() -> None:
    text = report.PAGE.read_text()
    between = text.partition(report.BEGIN)[2].partition(report.END)[0]
    assert between == report.figures(RESULTS), "python benchmarks/gpu.py page"


def left(folder: Path, part: str, toy: bool = False, **groups: Any) -> None:
    """What a call leaves behind."""
    own = {name: {"facts": {}, "rows": rows, "skipped": skipped}
           for name, (rows, skipped) in groups.items()}
    (folder / f"gpu-{part}.json").write_text(json.dumps(
        {"part": part, "toy": toy, "facts": FACTS, "groups": own}))


def rows_named(text: str, group: str, name: str) -> list[str]:
    return re.findall(rf"^\| {re.escape(group)} \| {re.escape(name)} \|(.*)$", text, re.M)


@pytest.mark.parametrize("toy", [False, True])
def test_without_a_device_nothing_was_measured(tmp_path: Path, toy: bool) -> None:
    """What a toy run leaves is no result."""
    if toy:
        left(tmp_path, "contact", True, decode=(
            [{"name": "1 x 1024", "verdict": "right", "share": 0.9, "tokens_s": 77.0}], []))
    text = report.figures(tmp_path)
    assert "No device has given results yet" in text
    for group in plan.contact():
        for row in group.rows:
            assert rows_named(text, group.name, row.name) == [" never measured |"]
    for part in ("kernels", "tests"):
        for group in plan.PARTS[part]():
            names = "; ".join(row.name for row in group.rows)
            assert f"| `{part}` | {group.name} | 0 |  |  |  |  | {names} |" in text
    wanted = [line for line in text.splitlines() if " >= " in line or " <= " in line]
    assert len(wanted) == len(report.AIMS)
    assert all("| never measured |" in line for line in wanted)


def test_every_row_says_what_it_is(tmp_path: Path) -> None:
    right, one, many = "graphs beside eager, 1 x 1024", "1 x 1024", "256 x 1024"
    left(tmp_path, "contact", decode=(
        [{"name": right, "verdict": "right", "compared": 16, "error": 0.0},
         {"name": one, "verdict": "slow", "why": "decode, batch 1: 80.0%, wanted >= 92.0%",
          "share": 0.8, "tokens_s": 160.0, "batch": 1, "floor_us": 5000.0, "idle_ratio": 0.004},
         {"name": "graphs beside eager, 256 x 1024", "verdict": "wrong", "error": 0.5,
          "compared": 4096}],
        [{"name": "graphs beside eager, 256 x 1024", "kind": "wrong", "why": "an error of 0.5"},
         {"name": many, "kind": "wrong", "why": "its tokens are wrong"}]),
        profile=([{"name": "graph capture", "verdict": "right", "graphs": 8, "seconds": 2.5},
                  {"name": f"replay {one}", "verdict": "right", "idle_share": 0.03,
                   "long_gaps": 0.001}],
                 [{"name": f"replay {many}", "kind": "failed", "why": "its process ended"},
                  {"name": "capture of 58 sizes", "kind": "left out", "why": "3 s are left"}]))
    text = report.figures(tmp_path)
    assert "`contact`: device Some GPU; torch 2.11.0; date 2026-12-01 10:00 UTC; kernels' " in text
    assert "`kernels`: never measured." in text

    def said(group: str, name: str) -> list[str]:
        row, = rows_named(text, group, name)
        return [cell for cell in map(str.strip, row.split("|")) if cell]

    assert said("decode", right) == ["right", "16"]
    assert said("decode", one) == ["slow", "80.0%", "160", "200", "0.40%",
                                   "decode, batch 1: 80.0%, wanted >= 92.0%"]
    assert said("decode", "graphs beside eager, 256 x 1024") == ["wrong", "4096",
                                                                 "an error of 0.5"]
    assert said("decode", many) == ["wrong", "its tokens are wrong"]
    assert said("profile", "graph capture") == ["right", "2.50"]
    assert said("profile", f"replay {one}") == ["right", "3.00%", "0.10%"]
    assert said("profile", f"replay {many}") == ["failed", "its process ended"]
    assert said("profile", "capture of 58 sizes") == ["left out", "3 s are left"]
    assert said("ring", one) == ["never measured"]


def test_groups_of_kernels_are_counted(tmp_path: Path) -> None:
    names = [row.name for group in plan.kernels() if group.name == "elementwise"
             for row in group.rows]
    left(tmp_path, "kernels", elementwise=(
        [{"name": name, "verdict": kind} for name, kind in zip(names, ("right", "right", "slow"),
                                                               strict=False)],
        [{"name": names[3], "kind": "left out", "why": "it needs 12 GiB, 5 are free"},
         {"name": f"{names[0]}: torch", "kind": "failed", "why": "a peer"}]))
    text = report.figures(tmp_path)
    assert f"| `kernels` | elementwise | 2 | {names[2]} |  |  | {names[3]} |  |" in text


def test_the_page_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}old\n{report.END}behind\n")
    report.write(tmp_path, page)
    report.write(tmp_path, page)
    assert page.read_text() == (f"before\n{report.BEGIN}{report.figures(tmp_path)}"
                                f"{report.END}behind\n")
