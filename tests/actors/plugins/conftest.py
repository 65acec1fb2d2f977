"""Packages with plug-ins for a test, of which nothing is left behind it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorium.actors.config.reasoning_formats import REASONING_FORMATS
from actorium.actors.gateway.parsers.call_formats import FORMATS
from actorium.actors.plugins import entry_points, logits_processors, parser_plugins
from actorium.gpu.families import architectures

REMEMBERED = (entry_points.installed, logits_processors.load_processors,
              parser_plugins.load_call_formats, parser_plugins.load_reasoning_formats,
              parser_plugins.add_formats, architectures.load_plugin_families)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path`."""
    modules = set(sys.modules)
    tables = [(table, dict(table)) for table in (
        FORMATS, REASONING_FORMATS, architectures.ARCHITECTURES)]
    monkeypatch.syspath_prepend(str(tmp_path))
    _forget()
    yield tmp_path
    _forget()
    for table, rows in tables:
        table.clear()
        table.update(rows)  # type: ignore[arg-type]
    for name in set(sys.modules) - modules:
        if name.startswith(("actorium_example", "plugged")):
            del sys.modules[name]


def _forget() -> None:
    for function in REMEMBERED:
        function.cache_clear()
