"""Code that tests hand to other processes, as text, imports what there is: no rename finds it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def imported(text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of everything of ours that a program imports by name; none where the text is
    no program."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("actorium."):
            yield from ((str(node.module), alias.name) for alias in node.names)


def texts(path: Path) -> Iterator[str]:
    """Strings of several lines in a file, one of which imports something of ours."""
    source = path.read_text()
    marks = ("\\nfrom actorium.", '"from actorium.', "'''")
    if not any(mark in source for mark in marks) and not any(
            "\nfrom actorium." in block for block in source.split('"""')[1::2]):
        return  # parsing all of tests/ takes seconds
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) \
                and "\nfrom actorium." in node.value:
            yield node.value


def test_imports_in_strings_exist() -> None:
    pytest.importorskip("triton")
    pairs = {(pair, path.name) for path in TESTS.rglob("*.py")
             for text in texts(path) for pair in imported(text)}
    assert len(pairs) > 20
    missing = [(file, module, name) for (module, name), file in sorted(pairs)
               if importlib.util.find_spec(module) is None
               or not hasattr(importlib.import_module(module), name)]
    assert missing == []
