"""Writes the table of docs/models.md from the results of the tests that prove its cells.

    python -m actorium.tools.models_table build/parity.xml

The argument is pytest's JUnit XML of tests/gpu/models/test_models_table.py, and of the test that
serves each architecture of GGUF; `make parity` runs all. The exit code is 1 where a cell failed;
then nothing is written.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
COLUMNS = {"tokens": "tokens, prefix cache", "preempted": "preemption", "ranks": "two ranks",
           "gguf": "GGUF", "exact": "`--exact on`, CPU", "program": "program, CPU",
           "fp8": "FP8", "int8": "INT8", "int4": "INT4"}
"""Titles, by the tests' names for them."""
BEGIN, END = "<!-- table: make parity -->", "<!-- end of the table -->"
TEST = re.compile(r"test_cell\[(?P<column>\w+)-(?P<architecture>\w+)\]")


def cells_in(report: Path) -> dict[str, dict[str, str]]:
    """By class and column. A cell whose test did not pass is "failed"; a class that no test has in
    a GGUF file is not served from one."""
    rows: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        passed = case.find("failure") is None and case.find("error") is None
        if (of_gguf := case.find("properties/property[@name='gguf']")) is not None:
            row = rows.setdefault(str(of_gguf.get("value")), {})
            row["gguf"] = row.get("gguf", "yes") if passed else "failed"
        if (named := TEST.fullmatch(case.get("name", ""))) is None:
            continue
        said = case.find("properties/property[@name='cell']")
        rows.setdefault(named["architecture"], {})[named["column"]] = (
            str(said.get("value")) if said is not None and passed else "failed")
    for row in rows.values():
        row.setdefault("gguf", "-")
    return rows


def table(cells: dict[str, dict[str, str]]) -> str:
    """In Markdown. Why a cell says no is a numbered note below it."""
    notes: dict[str, int] = {}
    lines = [f"| class | {' | '.join(COLUMNS.values())} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for architecture, row in sorted(cells.items()):
        words = []
        for column in COLUMNS:
            cell, _, why = row.get(column, "not run").partition(": ")
            words.append(f"{cell} ({notes.setdefault(why, len(notes) + 1)})" if why else cell)
        lines.append(f"| `{architecture}` | {' | '.join(words)} |")
    lines += ["", *(f"{number}. {why}" for why, number in notes.items())]
    return "\n".join(lines)


def names_in(page: str) -> list[str]:
    """The classes that the page's table lists."""
    return re.findall(r"^\| `(\w+)`", page.partition(BEGIN)[2].partition(END)[0], re.MULTILINE)


def main(report: str) -> int:
    """Replaces the page's table. Returns 1 where a cell failed."""
    cells = cells_in(Path(report))
    failed = [f"{name}: {column}" for name, row in cells.items()
              for column, cell in row.items() if cell == "failed"]
    if failed:
        print("\n".join(["failed:", *failed]))
        return 1
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(cells)}\n{END}{rest.partition(END)[2]}")
    print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
