"""How the code lies in its rooms: names that stand for several things, imports in a circle."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
