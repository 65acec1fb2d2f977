"""Names of modules, functions, classes and fields keep to the words of CONTRIBUTING.md: those of
its second table, from which a reader cannot guess the thing, are none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers_code_facts import PACKAGES, ROOT, files, statements

TABLE = re.search(r"^\| not \| but \|\n\|[-|]+\n((?:\|.*\n)+)",
                  (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
OF_OTHERS = {"actors.runtime.http.http_connection: connection_made"}
"""What a library calls by this name."""


def words() -> tuple[set[str], set[str]]:
    """Returns the words that are nowhere in a name, and those that are no name alone."""
    assert TABLE is not None
    cells = [row.split("|")[1] for row in TABLE[1].splitlines()]
    anywhere = {word for cell in cells for word in re.findall(r"\w+", cell.split("alone:")[0])}
    alone = {word for cell in cells for word in re.findall(r"\w+", cell.partition("alone:")[2])}
    return anywhere, alone


def names(path: Path) -> Iterator[str]:
    """Yields a module's name, and those of its functions, classes and fields."""
    yield path.stem
    for node in statements(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def is_plain(name: str, anywhere: set[str], alone: set[str]) -> bool:
    """Whether a name has one of these words."""
    parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    return bool(parts & anywhere) or name.strip("_").lower() in alone


def test_the_words_are_read() -> None:
    anywhere, alone = words()
    assert {"told", "front", "found"} <= anywhere and {"one", "own"} <= alone
    assert all(is_plain(name, anywhere, alone) for name in ("FoundEnd", "on_client_gone", "_one"))
    assert not any(is_plain(name, anywhere, alone) for name in ("one_of", "frontend", "planted"))


def test_names_say_what_a_thing_is() -> None:
    anywhere, alone = words()
    bad = [f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}: {name}"
           for package in (*PACKAGES, "benchmarks") for path in files(package)
           for name in names(path) if is_plain(name, anywhere, alone)]
    assert not sorted(set(bad) - OF_OTHERS)
