"""`<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`: Qwen3-Coder,
Qwen3.5. Values are typed by the tool's schema; what does not fit its type stays a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    TextAroundCalls,
    ToolCallArguments,
    ToolCallBegin,
    after_call,
    first_of,
    partial_mark,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\s]{1,256}")
Schemas = Mapping[str, Mapping[str, Any]]
"""Tool -> the schema of its parameters."""


class Qwen3CoderParser:
    """Parses one choice. Each argument is returned when it is complete."""

    def __init__(self, schemas: Schemas | None = None) -> None:
        self._schemas = schemas or {}
        self._text = ""
        self._prose = TextAroundCalls()
        self._calls = 0
        self._state: Callable[[list[MessagePart]], bool] = self._in_text
        self._name = ""
        self._arguments = 0

    def feed(self, text: str) -> list[MessagePart]:
        out: list[MessagePart] = []
        self._text += text
        while self._state(out):
            pass
        return out

    def end(self) -> list[MessagePart]:
        out: list[MessagePart] = []
        if self._state in (self._in_text, self._opened):
            self._prose.add(out, (OPEN if self._state == self._opened else "") + self._text)
            self._prose.end(out)
        self._text = ""
        return out

    # --- states ---

    def _in_text(self, out: list[MessagePart]) -> bool:
        marks = (OPEN, FUNCTION)
        found = first_of(self._text, marks)
        if found is None:
            self._text = self._prose.add_before(out, self._text, marks)
            return False
        if found.mark == FUNCTION:
            if not self._is_function(self._text[found.at:]):
                return self._not_yet_function(out, found.at)
            self._prose.add(out, self._text[:found.at])
            self._text, self._state = self._text[found.at:], self._function
            return True
        self._prose.add(out, self._text[:found.at])
        self._text, self._state = self._text[found.at + len(OPEN):], self._opened
        return True

    def _not_yet_function(self, out: list[MessagePart], at: int) -> bool:
        """Handles a mark without a name: waits for it, or treats the mark as text."""
        if _may_be_name(self._text[at + len(FUNCTION):]):
            self._prose.add(out, self._text[:at])
            self._text = self._text[at:]
            return False
        self._prose.add(out, self._text[:at + len(FUNCTION)])
        self._text = self._text[at + len(FUNCTION):]
        return True

    @staticmethod
    def _is_function(text: str) -> bool:
        name, mark, _ = text.removeprefix(FUNCTION).partition(">")
        return bool(mark) and _NAME.fullmatch(name.strip()) is not None

    def _opened(self, out: list[MessagePart]) -> bool:
        text = self._text.lstrip(SPACE)
        if text.startswith(FUNCTION):
            if self._is_function(text):
                self._text, self._state = text, self._function
                return True
            if _may_be_name(text[len(FUNCTION):]):
                return False
        elif FUNCTION.startswith(text):
            return False
        self._state = self._in_text
        self._prose.add(out, OPEN)
        return True

    def _function(self, out: list[MessagePart]) -> bool:
        name, _, self._text = self._text.removeprefix(FUNCTION).partition(">")
        self._name, self._arguments = name.strip(), 0
        self._prose.call_begins()
        out += [ToolCallBegin(self._calls, self._name), ToolCallArguments(self._calls, "{")]
        self._state = self._between
        return True

    def _between(self, out: list[MessagePart]) -> bool:
        """Handles the text before a parameter or the function's end; drops anything else."""
        found = first_of(self._text, (PARAMETER, FUNCTION_END, CLOSE))
        if found is None:
            self._text = self._text[len(self._text) - partial_mark(
                self._text, (PARAMETER, FUNCTION_END, CLOSE)):]
            return False
        if found.mark == PARAMETER:
            self._text, self._state = self._text[found.at + len(PARAMETER):], self._parameter
            return True
        out.append(ToolCallArguments(self._calls, "}"))
        self._calls += 1
        keep = found.at if found.mark == CLOSE else found.at + len(FUNCTION_END)
        self._text, self._state = self._text[keep:], self._closing
        return True

    def _parameter(self, out: list[MessagePart]) -> bool:
        name, mark, rest = self._text.partition(">")
        if not mark:
            return False
        found = first_of(rest, (PARAMETER_END, FUNCTION_END, CLOSE))
        if found is None:
            return False
        value = rest[:found.at].removeprefix("\n").removesuffix("\n")
        name, comma = name.strip(), ", " if self._arguments else ""
        argument = f"{comma}{json.dumps(name, ensure_ascii=False)}: {self._typed(name, value)}"
        out.append(ToolCallArguments(self._calls, argument))
        self._arguments += 1
        skip = len(PARAMETER_END) if found.mark == PARAMETER_END else 0
        self._text, self._state = rest[found.at + skip:], self._between
        return True

    def _closing(self, _out: list[MessagePart]) -> bool:
        rest = after_call(self._text, CLOSE)
        if rest is None:
            return False
        self._text, self._state = rest, self._in_text
        self._prose.call_ended()
        return True

    # --- values ---

    def _typed(self, name: str, value: str) -> str:
        """Returns the value as JSON."""
        properties = self._schemas.get(self._name, {}).get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind != "string":
            found = _json(value)
            if found is not None and (kind is not None or not isinstance(found, str)):
                return value.strip()
        return json.dumps(value, ensure_ascii=False)


def _may_be_name(text: str) -> bool:
    """Returns whether the text after `<function=` may still become a name and its bracket."""
    return ">" not in text and len(text) <= 256 and "<" not in text


def _json(text: str) -> Any:
    """Returns the value; None if it is not JSON (or null, for a string)."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return [] if found is None else found
