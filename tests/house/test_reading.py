"""READING.md follows one request in twelve stops: each is a function that is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
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


@pytest.mark.slow
def test_a_streamed_chat_passes_all_stops() -> None:
    """As it is traced through every process of an engine."""
    said = subprocess.run([sys.executable, "tools/request_files.py", "--functions"], cwd=ROOT,
                          check=True, capture_output=True, text=True, timeout=300).stdout
    entered: dict[str, set[str]] = {}
    path = ""
    for line in said.splitlines()[:-1]:
        if line.startswith(" "):
            entered[path].add(line.strip())
        else:
            path = line.split()[0]
            entered[path] = set()
    missed = [f"{path}: {name}" for _, path, name in STOPS if name not in entered.get(path, ())]
    assert not missed
    assert re.fullmatch(r"\d+ files, \d+ classes, \d+ functions; .*", said.splitlines()[-1])
