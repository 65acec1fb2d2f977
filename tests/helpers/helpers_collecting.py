"""What pytest collects by several command lines, as on a machine that lacks packages.

    python helpers_collecting.py < {"absent": [MODULE], "lines": [{"command", "environment"}]}

Each line's pytest is forked off one process that has imported what takes longest. Written: for each
its exit code and the last of what it said, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("torch", "hypothesis", "anyio._backends._asyncio", "triton", "transformers",
         "actorium.actors.launcher.engine",
         "actorium.gpu.worker.core", "actorium.kernels.triton.triton_ops", "helpers_graphs",
         "helpers_kinds")
TAIL = 3000
"""Characters of what is said."""


class Absent(MetaPathFinder):
    """Modules that cannot be imported."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def plugins(self, distribution: metadata.Distribution) -> bool:
        """Whether those of pytest that it brings, if any, can be imported."""
        return self._names.isdisjoint(own.module.partition(".")[0]
                                      for own in distribution.entry_points.select(group="pytest11"))


def collected(lines: Sequence[dict[str, Any]], absent: Iterable[str], root: Path
              ) -> list[tuple[int, str]]:
    """(exit code, end of the output) of each line: its "command", whose first words are python -m
    pytest, and its "environment". absent: modules that they must not find."""
    asked = json.dumps({"lines": lines, "absent": sorted(absent)})
    done = subprocess.run([sys.executable, __file__], input=asked, cwd=root,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[tuple[int, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def modules_beside(distributions: Iterable[str]) -> set[str]:
    """Names of modules that are installed here and come with none of these, nor with what these
    require."""
    there, waiting = set[str](), [*distributions]
    while waiting:
        name = _plain(waiting.pop())
        if name in there:
            continue
        there.add(name)
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needed
                    if "extra ==" not in line]
    return {module for module, owners in metadata.packages_distributions().items()
            if there.isdisjoint(map(_plain, owners))}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _forked(each: dict[str, Any]) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            try:
                code = _pytest(each, said.fileno())
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read()[-TAIL:]


def _pytest(each: dict[str, Any], output: int) -> int:
    os.dup2(output, 1)
    os.dup2(output, 2)
    own = each["environment"]
    os.environ.update(own)
    sys.path[0] = os.getcwd()  # as of python -m
    sys.path[1:1] = own.get("PYTHONPATH", "").split(os.pathsep)
    assert each["command"][1:3] == ["-m", "pytest"]
    return int(pytest.main([*each["command"][3:], "--collect-only"]))


def main() -> None:
    """Reads, collects, writes."""
    asked = json.load(sys.stdin)
    absent = Absent(asked["absent"])
    sys.meta_path.insert(0, absent)
    # read once, where each pytest would read those of all packages
    points = {own: own.entry_points for own in metadata.distributions() if absent.plugins(own)}
    metadata.distributions = lambda: [*points]
    metadata.Distribution.entry_points = property(points.__getitem__)
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as conftest.py has it, before the import
    for name in HEAVY:
        import_module(name)
    # numbers in our sources, which it draws where tests run: none does
    providers = import_module("hypothesis.internal.conjecture.providers")
    providers._get_local_constants = lambda: None
    gc.collect()
    gc.freeze()  # each fork would look through all of it again
    print(json.dumps([_forked(each) for each in asked["lines"]]))


if __name__ == "__main__":
    main()
