"""Parsers of tool calls whose arguments are written one by one, each between marks.

    <tool_call><function=f><parameter=p>value</parameter></function></tool_call>     Qwen3-Coder
    <minimax:tool_call><invoke name="f"><parameter name="p">value</parameter></invoke>...
    <tool_call>f<arg_key>p</arg_key><arg_value>value</arg_value></tool_call>         GLM

Values are typed by the tool's schema; what does not fit its type stays a string. Now and then
Qwen's models write `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as older ones do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from actorium.actors.gateway.parsers.argument_types import (
    ANY,
    STRING,
    ArgumentTypes,
    as_json,
)
from actorium.actors.gateway.parsers.json_call import JsonCallParser
from actorium.actors.gateway.parsers.parameter_form import (
    MAX_NAME_TEXT,
    ParameterForm,
    ParameterValue,
    ValueEnd,
    begins_function,
    expression,
    goes_on_like_call,
    parameter_name,
    present,
    without_broken_end,
)
from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    StateParser,
    TextAroundCalls,
    ToolCallArguments,
    ToolCallBegin,
    after_call,
    first_of,
    partial_mark,
)

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool -> the schema of its parameters."""


class ParameterCallsParser(StateParser):
    """Parses one choice. Each argument is returned when it is complete."""

    def __init__(self, form: ParameterForm, schemas: Schemas | None = None) -> None:
        super().__init__(self._in_text)
        self._form, self._schemas = form, schemas or {}
        self._closers = present(form.close, form.function_end, form.parameter_end,
                                    *form.closers)
        self._prose = TextAroundCalls()
        self._calls = 0
        self._types = ArgumentTypes({})
        """Types of the arguments of the call's function."""
        self._name = ""
        """Name of the parameter."""
        self._given: list[str] = []
        """The call's arguments so far."""
        self._string = ""
        """What the parameter's mark says of its type."""
        self._value = ValueEnd(form, None, marked=True)
        self._object = JsonCallParser(0)
        self._marked = False
        """The call began with its mark."""

    def _finish(self, out: list[MessagePart], cut: bool) -> None:
        """A call that its model left open is closed; of one that was cut, what is complete has
        been returned."""
        while self._state == self._in_value and self._end_value(out, cut):
            out += self.feed("")
        if not cut and self._state in (self._in_name, self._between):
            out.append(ToolCallArguments(self._calls, "}"))
        if self._state == self._in_object and not self._object.raw:
            out += [] if cut else self._object.end()
        elif self._state == self._in_object:
            self._prose.add(out, self._form.open + self._object.raw)
        elif self._state in (self._in_text, self._opened):
            opened = self._form.open if self._state == self._opened else ""
            self._prose.add(out, opened + self._text)
        self._prose.end(out)

    # --- states: each takes from the text, and says whether there may be more to do ---

    def _in_text(self, out: list[MessagePart]) -> bool:
        form = self._form
        found = first_of(self._text, form.calls)
        if found is None:
            self._text = self._prose.add_before(out, self._text, form.calls)
            return False
        self._prose.add(out, self._text[:found.at])
        self._text = self._text[found.at:]
        if found.mark == form.open:
            self._text, self._state = self._text[len(form.open):], self._opened
            return True
        begins = self._begins_unmarked(self._text)
        if begins:
            self._marked, self._state = False, self._function
        elif begins is not None:
            self._prose.add(out, form.function)
            self._text = self._text[len(form.function):]
        return begins is not None

    def _opened(self, out: list[MessagePart]) -> bool:
        text = self._text.lstrip(SPACE)
        begins = begins_function(self._form, text)
        if begins is None:
            return False
        if begins:
            self._text, self._marked, self._state = text, True, self._function
        elif text.startswith("{"):
            self._object, self._state = JsonCallParser(self._calls), self._in_object
        else:
            self._state = self._in_text
            self._prose.add(out, self._form.open)
        return True

    def _in_object(self, out: list[MessagePart]) -> bool:
        parts, self._text = self._object.feed(self._text)
        if parts:
            self._prose.call_begins()
        out += parts
        if self._object.failed:
            self._prose.add(out, self._form.open)
            self._text, self._state = self._object.raw, self._in_text
        elif self._object.over:
            self._calls += 1
            self._state = self._closing
        return self._object.over or self._object.failed

    def _begins_unmarked(self, text: str) -> bool | None:
        """Returns whether a call begins that has no `open` before it, which models forget behind a
        sentence, and which stands before the first of several calls: it names a tool, and goes on
        like a call. None = not certain yet."""
        name = expression(self._form, "head").match(text)
        if name is not None and self._schemas and name[1] not in self._schemas:
            return False
        return goes_on_like_call(self._form, text)

    def _function(self, out: list[MessagePart]) -> bool:
        name = expression(self._form, "head").match(self._text)
        assert name is not None
        self._text = self._text[name.end():]
        self._types, self._given = ArgumentTypes(self._schemas.get(name[1], {})), []
        self._prose.call_begins()
        out += [ToolCallBegin(self._calls, name[1]), ToolCallArguments(self._calls, "{")]
        self._state = self._between
        return True

    def _between(self, out: list[MessagePart]) -> bool:
        """Handles the text before a parameter or the function's end; drops anything else."""
        form = self._form
        marks = present(form.parameter, form.function_end, form.close)
        found = first_of(self._text, marks)
        if found is None:
            self._text = self._text[len(self._text) - partial_mark(self._text, marks):]
            return False
        if found.mark == form.parameter:
            self._text, self._state = self._text[found.at + len(form.parameter):], self._in_name
            return True
        out.append(ToolCallArguments(self._calls, "}"))
        self._calls += 1
        self._text, self._state = self._text[found.at:], self._closing
        return True

    def _in_name(self, _out: list[MessagePart]) -> bool:
        form = self._form
        name = parameter_name(form, self._text)
        if name is None:
            ended = first_of(self._text, present(form.parameter, form.function_end, form.close))
            if ended or len(self._text) > MAX_NAME_TEXT:
                self._state = self._between
            return self._state == self._between
        self._name, self._text = name[1].strip(), self._text[name.end():]
        self._string = name.groupdict().get("string") or ""
        self._value, self._state = ValueEnd(form, self._next_names(), self._marked), self._in_value
        return True

    def _next_names(self) -> set[str] | None:
        """Returns the parameters that may come next; None = any."""
        names = self._types.names
        return names - {*self._given, self._name} if names else None

    def _in_value(self, out: list[MessagePart]) -> bool:
        found = self._value.find(self._text)
        if found is not None:
            self._argue(out, found)
        return found is not None

    def _end_value(self, out: list[MessagePart], cut: bool) -> bool:
        """Ends a value at the end of the text."""
        for strict in (True,) if cut else (True, False):
            end = ValueEnd(self._form, self._next_names(), self._marked, last=True,
                           strict=strict)
            found = end.find(self._text)
            if found is not None:
                self._argue(out, found)
                return True
        if not cut:
            size = len(self._text) - partial_mark(self._text, self._closers)
            value = without_broken_end(self._form, self._text[:size])
            self._argue(out, ParameterValue(value, len(self._text)))
        return not cut

    def _argue(self, out: list[MessagePart], found: ParameterValue) -> None:
        """Returns an argument."""
        value, types = found.value, self._types.of(self._name)
        if self._form.lines:
            value = value.removeprefix("\n").removesuffix("\n")
        if "string" not in types:  # models begin a long list again
            value = re.sub(rf"\n{re.escape(self._form.parameter + self._name)}>", "", value)
        if self._string:
            types = STRING if self._string == "true" else types - STRING or ANY
        comma = ", " if self._given else ""
        name = json.dumps(self._name, ensure_ascii=False)
        out.append(ToolCallArguments(self._calls, f"{comma}{name}: {as_json(value, types)}"))
        self._given.append(self._name)
        self._text, self._state = self._text[found.rest:], self._between

    def _closing(self, _out: list[MessagePart]) -> bool:
        rest = after_call(self._text, self._closers)
        if rest is None:
            return False
        self._text, self._state = rest, self._in_text
        self._prose.call_ended()
        return True
