"""Writes the table of docs/models.md from the results of the tests that prove its cells.

    python -m actorium.tools.models_table build/parity.xml

The arguments are pytest's JUnit XML of tests/gpu/models/test_models_table.py, of the test that
serves each architecture of GGUF, and of those of text parts and transformers' classes (`GROUPS`);
`make parity` runs all. The exit code is 1 where a cell failed; then nothing is written.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
COLUMNS = {"tokens": "tokens, prefix cache", "preempted": "preemption", "ranks": "two ranks",
           "gguf": "GGUF", "exact": "`--exact on`, CPU", "program": "program, CPU",
           "fp8": "FP8", "int8": "INT8", "int4": "INT4", "lora": "LoRA"}
"""Titles, by the tests' names for them."""
ABSENT = {"gguf": "-"}
"""What stands for a cell that no test has."""
BEGIN, END = "<!-- table: make parity -->", "<!-- end of the table -->"
GROUPS = {
    "text_part": ("<!-- table: text parts -->", "| text part run by | classes |"),
    "by_transformers": ("<!-- table: transformers' classes -->", "| by transformers' class | |"),
}
"""By the property that tests give, "CLASS VALUE": where the table begins, and its head. Classes of
one value are a row."""
TEST = re.compile(r"test_cell\[(?P<column>\w+)-(?P<architecture>\w+)\]")


def cells_in(report: Path) -> dict[str, dict[str, str]]:
    """By class and column. A cell whose test did not pass is "failed"."""
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
    return rows


def table(cells: dict[str, dict[str, str]]) -> str:
    """In Markdown. Why a cell says no is a numbered note below it."""
    notes: dict[str, int] = {}
    lines = [f"| class | {' | '.join(COLUMNS.values())} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for architecture, row in sorted(cells.items()):
        words = []
        for column in COLUMNS:
            cell, _, why = row.get(column, ABSENT.get(column, "not run")
                                       ).partition(": ")
            words.append(f"{cell} ({notes.setdefault(why, len(notes) + 1)})" if why else cell)
        lines.append(f"| `{architecture}` | {' | '.join(words)} |")
    lines += ["", *(f"{number}. {why}" for why, number in notes.items())]
    return "\n".join(lines)


def names_in(page: str, begin: str = BEGIN) -> list[str]:
    """The classes that the page's table lists, or another one that begins so."""
    found = re.findall(r"^\|.*", page.partition(begin)[2].partition(END)[0], re.MULTILINE)
    pattern = r"^\| `(\w+)`" if begin == BEGIN else r"`(\w+)`(?=,| \|$)"
    return [name for line in found for name in re.findall(pattern, line)]


def group_table(reports: list[Path], name: str) -> str:
    """In Markdown: of each value of this property the classes that have it. "" where tests of it
    were not run."""
    values = dict(str(own.get("value")).split(" ", 1) for report in reports
                  for own in ElementTree.parse(report).iter("property") if own.get("name") == name)
    rows: dict[str, set[str]] = {}
    for of_class, value in values.items():
        rows.setdefault(value, set()).add(f"`{of_class}`")
    lines = [f"| {value} | {', '.join(sorted(rows[value]))} |"
             for value in sorted(rows, key=lambda value: (-len(rows[value]), value))]
    return "\n".join([GROUPS[name][1], "|---|---|", *lines]) if lines else ""


def replaced(page: str, begin: str, rows: str) -> str:
    """The page with other rows in the table that begins so."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{rows}\n{END}{rest.partition(END)[2]}"


def main(*names: str) -> int:
    """Replaces the page's tables; a later report counts. Returns 1 where a cell failed."""
    reports: list[Path] = [Path(name) for name in names]
    cells: dict[str, dict[str, str]] = {}
    for report in reports:
        for name, row in cells_in(report).items():
            cells.setdefault(name, {}).update(row)
    failed = [f"{name}: {column}" for name, row in cells.items()
              for column, cell in row.items() if cell == "failed"]
    if failed:
        print("\n".join(["failed:", *failed]))
        return 1
    page = replaced(PAGE.read_text(), BEGIN, table(cells)) if cells else PAGE.read_text()
    for name, (begin, _) in GROUPS.items():
        if rows := group_table(reports, name):
            page = replaced(page, begin, rows)
    PAGE.write_text(page)
    print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
