"""Calls of custom tools, whose input is text: the model is shown a function with one argument, and
its calls are converted to those of the tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, TypeAlias

from actorium.actors.gateway.parsers.parts import MessagePart, ToolCallArguments, ToolCallBegin

INPUT: dict[str, Any] = {
    "type": "object", "properties": {"input": {
        "type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": ["input"], "additionalProperties": False}
"""The parameters of the function that stands for a custom tool."""
_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)')
"""Arguments that may be cut off: the text of the string, without half an escape."""


class CustomToolCall(NamedTuple):
    """A whole call of a custom tool."""

    call: int
    name: str
    text: str
    """Its input."""
    id: str = ""
    """As in `ToolCallBegin`."""


AnswerPart: TypeAlias = MessagePart | CustomToolCall


class CustomCallReader:
    """Puts one choice's calls of custom tools together. They are held back until they are whole:
    only then it is certain what their arguments are."""

    def __init__(self, names: Collection[str]) -> None:
        """names: of the custom tools."""
        self._names = names
        self._open: ToolCallBegin | None = None
        self._arguments: list[str] = []

    def add(self, parts: Iterable[MessagePart], last: bool) -> list[AnswerPart]:
        """Returns the parts with whole calls in the place of theirs; last: no more will come."""
        out: list[AnswerPart] = []
        for part in parts:
            if self._open is not None and isinstance(part, ToolCallArguments):
                self._arguments.append(part.text)
                continue
            out += self._closed()
            if isinstance(part, ToolCallBegin) and part.name in self._names:
                self._open = part
            else:
                out.append(part)
        return out + self._closed() if last else out

    def _closed(self) -> list[AnswerPart]:
        begun, text = self._open, "".join(self._arguments)
        self._open, self._arguments = None, []
        if begun is None:
            return []
        return [CustomToolCall(begun.call, begun.name, input_of(text), begun.id)]


def input_of(arguments: str) -> str:
    """Returns the input that a call's arguments hold; of some that are cut off, what there is of
    it. Arguments of another form are the input themselves."""
    try:
        found = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        begun = _BEGUN.match(arguments)
        found = None if begun is None else json.loads(f'"{begun[1]}"', strict=False)
    if isinstance(found, dict):
        found = found.get("input")
    # A cut can leave half a character.
    return found.encode(errors="ignore").decode() if isinstance(found, str) else arguments


def arguments_for(text: str) -> str:
    """Returns the arguments of the function for a custom tool's input."""
    return json.dumps({"input": text}, ensure_ascii=False)
