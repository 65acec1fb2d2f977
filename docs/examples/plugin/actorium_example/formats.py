"""Formats of tool calls and of reasoning: two that the engine's own parsers can read once a row
describes them, and one with a parser of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorium.actors.config.reasoning_formats import ReasoningFormat
from actorium.actors.gateway.parsers.call_formats import CallFormat, ParserForm
from actorium.actors.gateway.parsers.json_calls import CallForm
from actorium.actors.gateway.parsers.parts import (
    MessagePart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)

REASONS = ReasoningFormat(("<reasons>",), ("</reasons>",), shown=("<reasons>",))
"""<reasons>...</reasons> before the answer."""

MARKED_CALLS = CallFormat("example models", CallForm(("<do>",), ("</do>",)), ("<do>",))
"""<do>{"name": "f", "arguments": {"n": 1}}</do>"""


class LineParser:
    """Reads calls that are lines of their own: `!f {"n": 1}`."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        """schemas: of the tools' parameters, by name; other names are text."""
        self._names, self._line, self._calls = set(schemas), "", 0

    def feed(self, text: str) -> list[MessagePart]:
        *lines, self._line = (self._line + text).splitlines(keepends=True) or [""]
        if self._line.endswith("\n"):
            lines, self._line = [*lines, self._line], ""
        return [part for line in lines for part in self._parts(line)]

    def end(self, cut: bool = False) -> list[MessagePart]:
        line, self._line = self._line, ""
        return self._parts(line) if line else []

    def _parts(self, line: str) -> list[MessagePart]:
        name, _, arguments = line.strip().removeprefix("!").partition(" ")
        if not line.startswith("!") or name not in self._names:
            return [TextPart(line)]
        self._calls += 1
        return [ToolCallBegin(self._calls - 1, name),
                ToolCallArguments(self._calls - 1, arguments or "{}")]


CALLS_IN_LINES = CallFormat("example models", ParserForm(LineParser, "!NAME {"))
