"""READING.md follows one request in twelve stops: each is a function that is there."""

from __future__ import annotations

import ast
import re

from helpers_code_facts import ROOT

STOPS = re.findall(r"^\| (\d+) \| `([\w/]+\.py)`, `([\w.]+)` \|", (ROOT / "READING.md").read_text(),
                   re.MULTILINE)


def names(path: str) -> set[str]:
    """Functions of a file, and methods behind their class and a dot."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{own.name}" for own in node.body
                      if isinstance(own, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


def test_there_are_twelve_stops_in_order() -> None:
    assert [int(number) for number, _, _ in STOPS] == list(range(1, 13))


def test_every_stop_is_there() -> None:
    gone = [f"{path}: {name}" for _, path, name in STOPS if name not in names(path)]
    assert not gone
