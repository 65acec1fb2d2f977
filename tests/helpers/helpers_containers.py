"""How much lies in the containers of an object, and of those that it holds."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from actorium.actors.config import retention

SIZED = (dict, list, set, frozenset, deque, bytearray)
FEW = 16


def few_are_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of `retention` that are numbers of things are `FEW`, in all modules that use them."""
    names = [name for name, value in vars(retention).items()
             if name.isupper() and isinstance(value, int) and not name.endswith("BYTES")
             and not name.startswith("_")]
    for module in [module for name, module in sys.modules.items() if name.startswith("actorium.")]:
        for name in set(names) & vars(module).keys():
            monkeypatch.setattr(module, name, FEW)


def sizes_of(root: Any) -> dict[str, int]:
    """Entries of all containers that can be reached from an object by way of our own objects, by
    the names of the attributes on the way."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [(type(root).__name__, root)]
    while todo:
        path, one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, SimpleQueue):
            found[path] += one.qsize()
        elif isinstance(one, SIZED):
            found[path] += len(one)
            values = [*one, *one.values()] if isinstance(one, dict) else one
            if not isinstance(one, bytearray):
                todo += [(path, value) for value in values if not isinstance(value, str | bytes)]
        elif isinstance(one, tuple):
            todo += [(path, value) for value in one]
        elif type(one).__module__.startswith("actorium.") and not isinstance(one, type):
            todo += [(f"{path}.{name}", value) for name, value in attributes(one)]
    return dict(found)


def attributes(one: Any) -> Iterator[tuple[str, Any]]:
    yield from vars(one).items() if hasattr(one, "__dict__") else ()
    for kind in type(one).__mro__:
        for name in kind.__dict__.get("__slots__", ()):
            if hasattr(one, name):
                yield name, getattr(one, name)


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What has grown by more than a few entries."""
    return {path: (before.get(path, 0), size) for path, size in after.items()
            if size > before.get(path, 0) + FEW // 2}
