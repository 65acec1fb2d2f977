"""A hook that the shell does not call is a bug that no type checker sees."""

from __future__ import annotations

import ast
from functools import cache

from helpers_code_facts import ROOT, files, statements

from actorium.actors.core import Core

HOOKS = {name for name in vars(Core) if name.startswith("on_")}


@cache
def cores() -> list[tuple[str, ast.ClassDef]]:
    found = []
    for package in ("actors", "gpu", "tools"):
        for path in files(package):
            for node in statements(path):
                if isinstance(node, ast.ClassDef) and any(
                        isinstance(base, ast.Name) and base.id in ("Core", "CoreObserver")
                        for base in node.bases):
                    found.append((str(path.relative_to(ROOT)), node))
    return found


def test_every_hook_of_a_core_is_one_that_the_shell_calls() -> None:
    unknown = [f"{where}: {core.name}.{item.name}" for where, core in cores() for item in core.body
               if isinstance(item, ast.FunctionDef) and item.name.startswith("on_")
               and item.name not in HOOKS]
    assert not unknown


def test_there_are_cores() -> None:
    assert {"SchedulerCore", "TokenizerCore", "DetokenizerCore"} <= {core.name
                                                                    for _, core in cores()}
