"""Formats of tool calls and reasoning that plug-ins bring: rows for the engine's own tables."""

from __future__ import annotations

from functools import cache
from typing import Any

from actorium.actors.config import reasoning_formats
from actorium.actors.config.call_format_names import ALIASES, TOOL_PARSERS
from actorium.actors.config.reasoning_formats import REASONING_FORMATS, ReasoningFormat
from actorium.actors.gateway.parsers.call_formats import FORMATS, CallFormat
from actorium.actors.plugins.entry_points import (
    REASONING_PARSERS,
    LoadedPlugin,
    load_group,
    usable,
)
from actorium.actors.plugins.entry_points import TOOL_PARSERS as TOOL_PARSER_GROUP


@cache
def load_call_formats(plugins: str) -> list[LoadedPlugin]:
    """Imports the formats of tool calls. plugins: the value of `--plugins`."""
    return load_group(plugins, TOOL_PARSER_GROUP, lambda value: _fault(value, CallFormat),
                      lambda name: name in TOOL_PARSERS or name in ALIASES)


@cache
def load_reasoning_formats(plugins: str) -> list[LoadedPlugin]:
    """Imports the formats of reasoning."""
    own = (*reasoning_formats.NAMES, *reasoning_formats.ALIASES)
    return load_group(plugins, REASONING_PARSERS, lambda value: _fault(value, ReasoningFormat),
                      lambda name: name in own)


@cache
def add_formats(plugins: str) -> None:
    """Adds them to the tables of this process, before the engine's own rows: a template that shows
    a plug-in's marks often shows those of a more general format, too."""
    for table, loaded in ((FORMATS, load_call_formats(plugins)),
                          (REASONING_FORMATS, load_reasoning_formats(plugins))):
        _put_first(table, usable(loaded))


def _put_first(table: dict[str, Any], rows: dict[str, Any]) -> None:
    own = dict(table)
    table.clear()
    table.update(rows)
    table.update(own)


def _fault(value: Any, kind: type) -> str:
    return "" if isinstance(value, kind) else \
        f"must be a {kind.__name__}, got {type(value).__name__}"
