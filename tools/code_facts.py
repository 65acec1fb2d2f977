"""How the code lies in its rooms: sizes, names that stand for several things, imports in a circle.

    python tools/code_facts.py [--json]

The rules that tests hold (`tests/house/`) are asked here, so that what they count can be seen.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("actors", "gpu", "kernels", "tools")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of nodes that hold statements, or what holds them."""


def files(package: str) -> list[Path]:
    """The Python files of a package, in order."""
    return sorted((ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    """Its dotted name."""
    parts = ["actorium", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts).removesuffix(".__init__")


@cache
def statements(path: Path) -> list[ast.stmt]:
    """All statements of a file, those within others included. It is read once: every question here
    is about the files as they are when the process begins."""
    found: list[ast.stmt] = []
    below: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while below:
        node = below.pop()
        if isinstance(node, ast.stmt):
            found.append(node)
        for name in BLOCKS:
            below += getattr(node, name, ())
    return found


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file names in an import, wherever in the file, made absolute."""
    package = ["actorium", *path.relative_to(ROOT).with_suffix("").parts[:-1]]
    found: list[str] = []
    for node in statements(path):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append(module)
            if module.startswith("actorium"):
                found += (f"{module}.{alias.name}" for alias in node.names)
    return tuple(found)


def needs(*packages: str) -> dict[str, set[str]]:
    """Module -> modules of these packages that it imports, lazily or for types alone included."""
    names = {module_of(path): path for package in packages for path in files(package)}
    return {name: {found for found in imports(path) if found in names and found != name}
            for name, path in names.items()}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import each other: the strongly connected components of more than one (Tarjan,
    "Depth-first search and linear graph algorithms", 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            component = stack[stack.index(name):]
            del stack[stack.index(name):]
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def class_names() -> dict[str, list[str]]:
    """Name -> files, of classes that stand in several."""
    found = defaultdict(set)
    for package in PACKAGES:
        for path in files(package):
            for node in statements(path):
                if isinstance(node, ast.ClassDef):
                    found[node.name].add(str(path.relative_to(ROOT)))
    return {name: sorted(where) for name, where in sorted(found.items()) if len(where) > 1}


MIRRORED = {"kernels/reference", "kernels/triton"}
"""A Triton kernel has its reference's name on purpose: whoever reads one opens the other."""


def module_names() -> dict[str, list[str]]:
    """Name -> files, of modules that stand in several rooms; `core` and packages apart."""
    found = defaultdict(list)
    for package in PACKAGES:
        for path in files(package):
            if path.stem not in ("__init__", "__main__", "core"):
                found[path.stem].append(str(path.relative_to(ROOT)))
    return {name: where for name, where in sorted(found.items())
            if len(where) > 1 and {path.rpartition("/")[0] for path in where} != MIRRORED}


def sizes() -> dict[str, tuple[int, int]]:
    """Room -> (files, lines), in the order of their paths."""
    found: dict[str, tuple[int, int]] = {}
    for package in PACKAGES:
        for path in files(package):
            room = str(path.parent.relative_to(ROOT))
            count, lines = found.get(room, (0, 0))
            found[room] = count + 1, lines + len(path.read_text().splitlines())
    return found


def facts() -> dict[str, Any]:
    """All of it."""
    graph, rooms = needs(*PACKAGES), sizes()
    importers = Counter(name for found in graph.values() for name in found)
    return {
        "files": sum(count for count, _ in rooms.values()),
        "lines": sum(lines for _, lines in rooms.values()),
        "rooms": {room: {"files": count, "lines": lines} for room, (count, lines) in rooms.items()},
        "classes_of_one_name": class_names(), "modules_of_one_name": module_names(),
        "circles": circles(graph),
        "modules_with_one_importer": sum(importers[name] == 1 for name in graph),
    }


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description="How the code lies in its rooms.")
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")
    found = facts()
    if parser.parse_args().json:
        print(json.dumps(found, indent=1))
        return
    for room, own in found["rooms"].items():
        print(f"{room:32} {own['files']:4} files {own['lines']:7,} lines")
    print(f"{'together':32} {found['files']:4} files {found['lines']:7,} lines")
    for what in ("classes_of_one_name", "modules_of_one_name"):
        print(f"{what}: {len(found[what])}")
        for name, where in found[what].items():
            print(f"    {name}: {', '.join(where)}")
    print(f"circles: {len(found['circles'])}")
    for circle in found["circles"]:
        print(f"    {', '.join(circle)}")
    print(f"modules with one importer: {found['modules_with_one_importer']}")


if __name__ == "__main__":
    main()
