"""`<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`: Qwen3-Coder,
Qwen3.5. Values are typed by the tool's schema; what does not fit its type stays a string. Now and
then these models write `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as older ones do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from actorium.actors.gateway.parsers.argument_types import ArgumentTypes, as_json
from actorium.actors.gateway.parsers.json_call import JsonCallParser
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

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
CALLS, CLOSERS = (OPEN, FUNCTION), (CLOSE, FUNCTION_END, PARAMETER_END)
_NAME = re.compile(r"[^<>\s]{1,256}")
_PARAMETER_NAME = re.compile(r"([^>\n]*)([>\n])")
_MARKS = (PARAMETER, PARAMETER_END, FUNCTION, FUNCTION_END, CLOSE)
_ANY_MARK = re.compile("|".join(_MARKS))
_WORD = re.compile(r"\S")
_BROKEN_END = re.compile(r"\n[ \t]*</parameter[^\n]*\n?\Z")
Schemas = Mapping[str, Mapping[str, Any]]
"""Tool -> the schema of its parameters."""


class Qwen3CoderParser(StateParser):
    """Parses one choice. Each argument is returned when it is complete."""

    def __init__(self, schemas: Schemas | None = None) -> None:
        super().__init__(self._in_text)
        self._schemas = schemas or {}
        self._prose = TextAroundCalls()
        self._calls = 0
        self._types = ArgumentTypes({})
        """Types of the arguments of the call's function."""
        self._name = ""
        """Name of the parameter."""
        self._given: list[str] = []
        """The call's arguments so far."""
        self._value = ValueEnd(None, marked=True)
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
            self._prose.add(out, OPEN + self._object.raw)
        elif self._state in (self._in_text, self._opened):
            self._prose.add(out, (OPEN if self._state == self._opened else "") + self._text)
        self._prose.end(out)

    # --- states: each takes from the text, and says whether there may be more to do ---

    def _in_text(self, out: list[MessagePart]) -> bool:
        marks = (OPEN, FUNCTION)
        found = first_of(self._text, marks)
        if found is None:
            self._text = self._prose.add_before(out, self._text, marks)
            return False
        self._prose.add(out, self._text[:found.at])
        self._text = self._text[found.at:]
        if found.mark == OPEN:
            self._text, self._state = self._text[len(OPEN):], self._opened
            return True
        begins = self._begins_unmarked(self._text)
        if begins:
            self._marked, self._state = False, self._function
        elif begins is not None:
            self._prose.add(out, FUNCTION)
            self._text = self._text[len(FUNCTION):]
        return begins is not None

    def _opened(self, out: list[MessagePart]) -> bool:
        text = self._text.lstrip(SPACE)
        begins = _begins_function(text)
        if begins is None:
            return False
        if begins:
            self._text, self._marked, self._state = text, True, self._function
        elif text.startswith("{"):
            self._object, self._state = JsonCallParser(self._calls), self._in_object
        else:
            self._state = self._in_text
            self._prose.add(out, OPEN)
        return True

    def _in_object(self, out: list[MessagePart]) -> bool:
        parts, self._text = self._object.feed(self._text)
        if parts:
            self._prose.call_begins()
        out += parts
        if self._object.failed:
            self._prose.add(out, OPEN)
            self._text, self._state = self._object.raw, self._in_text
        elif self._object.over:
            self._calls += 1
            self._state = self._closing
        return self._object.over or self._object.failed

    def _begins_unmarked(self, text: str) -> bool | None:
        """Returns whether a call begins whose `<tool_call>` was forgotten, as models do behind a
        sentence: it names a tool, and goes on like a call. None = not certain yet."""
        name, mark, _ = text[len(FUNCTION):len(FUNCTION) + 260].partition(">")
        if mark and self._schemas and name.strip() not in self._schemas:
            return False
        return _goes_on_like_call(text)

    def _function(self, out: list[MessagePart]) -> bool:
        name, _, self._text = self._text.removeprefix(FUNCTION).partition(">")
        self._types, self._given = ArgumentTypes(self._schemas.get(name.strip(), {})), []
        self._prose.call_begins()
        out += [ToolCallBegin(self._calls, name.strip()), ToolCallArguments(self._calls, "{")]
        self._state = self._between
        return True

    def _between(self, out: list[MessagePart]) -> bool:
        """Handles the text before a parameter or the function's end; drops anything else."""
        marks = (PARAMETER, FUNCTION_END, CLOSE)
        found = first_of(self._text, marks)
        if found is None:
            self._text = self._text[len(self._text) - partial_mark(self._text, marks):]
            return False
        if found.mark == PARAMETER:
            self._text, self._state = self._text[found.at + len(PARAMETER):], self._in_name
            return True
        out.append(ToolCallArguments(self._calls, "}"))
        self._calls += 1
        self._text, self._state = self._text[found.at:], self._closing
        return True

    def _in_name(self, _out: list[MessagePart]) -> bool:
        name = _PARAMETER_NAME.match(self._text)
        if name is None:
            return False
        self._name, self._text = name[1].strip(), self._text[name.end(1) + (name[2] == ">"):]
        self._value, self._state = ValueEnd(self._next_names(), self._marked), self._in_value
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
            end = ValueEnd(self._next_names(), self._marked, last=True, strict=strict)
            found = end.find(self._text)
            if found is not None:
                self._argue(out, found)
                return True
        if not cut:
            size = len(self._text) - partial_mark(self._text, CLOSERS)
            value = _without_broken_end(self._text[:size])
            self._argue(out, ParameterValue(value, len(self._text)))
        return not cut

    def _argue(self, out: list[MessagePart], found: ParameterValue) -> None:
        """Returns an argument."""
        value = found.value.removeprefix("\n").removesuffix("\n")
        types = self._types.of(self._name)
        if "string" not in types:  # models begin a long list again
            value = re.sub(rf"\n<parameter={re.escape(self._name)}>", "", value)
        comma = ", " if self._given else ""
        name = json.dumps(self._name, ensure_ascii=False)
        out.append(ToolCallArguments(self._calls, f"{comma}{name}: {as_json(value, types)}"))
        self._given.append(self._name)
        self._text, self._state = self._text[found.rest:], self._between

    def _closing(self, _out: list[MessagePart]) -> bool:
        rest = after_call(self._text, CLOSERS)
        if rest is None:
            return False
        self._text, self._state = rest, self._in_text
        self._prose.call_ended()
        return True


class ParameterValue(NamedTuple):
    """A parameter's value, and where the text behind its end begins."""

    value: str
    rest: int


class ValueEnd:
    """Finds the end of one parameter's value in a text that is still arriving.

    A value is written without quotes, so that it may hold what ends it: an agent that edits a
    parser writes `</parameter>`. A mark therefore counts only where the form goes on behind it:

    - `</parameter>`, if a parameter follows, or the end of the function and of the call. A value
      whose last line is `</parameter>` keeps it.
    - A forgotten `</parameter>`: `<parameter=` at the beginning of a line, with a name that the
      tool has and that was not given yet (any name where the schema has none), or the end of the
      function or of the call with another call or nothing behind.
    - A call, or a parameter, that is quoted from the beginning of a line on is passed over to its
      own end.

    Two wishes conflict where a value quotes `<parameter=` with a name of the same tool at the
    beginning of a line, without the `<function=` around it: that is taken for a forgotten end. And
    what quotes a beginning that has no end hides the true one: at the end of the text, if the model
    came to it by itself, the value is looked through again with nothing taken for a quotation.
    """

    def __init__(self, next_names: Collection[str] | None, marked: bool, last: bool = False,
                 strict: bool = True) -> None:
        """next_names: of parameters that may come next, None = any; marked: the call began with
        `<tool_call>`, so that its end is expected; last: the text is complete; strict: look for
        quotations."""
        self._next_names, self._last, self._strict = next_names, last, strict
        self._closing = (CLOSE, *CALLS) if marked and strict else ()
        """Marks that are expected behind the function."""
        self._at = 0
        """The text before it was looked at."""
        self._calls = self._functions = self._parameters = 0
        """Quotations that have begun."""

    def find(self, text: str) -> ParameterValue | None:
        """Returns the end; None = there is none so far. text: from the value's beginning on."""
        while mark := _ANY_MARK.search(text, self._at):
            line = text.rfind("\n", 0, mark.start()) + 1
            lines = text.startswith("\n")
            begins = not (lines and self._strict) or not text[line:mark.start()].strip(" \t")
            ends = self._ends(text, mark, begins)
            if ends is None:
                self._at = mark.start()
                return None
            if ends and mark[0] == PARAMETER_END:
                return ParameterValue(text[:mark.start()], mark.end())
            if ends:
                whole = lines and not text[line:mark.start()].strip(" \t")
                value = text[:line if whole else mark.start()]
                return ParameterValue(_without_broken_end(value), mark.start())
            self._at = mark.end()
        self._at = max(self._at, len(text) - partial_mark(text, _MARKS))
        return None

    def _ends(self, text: str, mark: re.Match[str], begins: bool) -> bool | None:
        """begins: the mark is at the beginning of a line, or the value is not written in lines."""
        kind, behind = mark[0], mark.end()
        if kind == FUNCTION:
            quoted = begins and self._strict and _goes_on_like_call(text[mark.start():])
            self._functions += quoted is True
            self._calls += quoted is True and text[:mark.start()].rstrip(SPACE).endswith(OPEN)
            return None if quoted is None and not self._last else False
        if self._functions:
            self._functions -= kind == FUNCTION_END
            return False
        if kind == PARAMETER:
            return begins and self._next_begins(text, behind)
        if kind == PARAMETER_END:
            if self._parameters:
                self._parameters -= 1
                return False
            ends = self._goes_on(text, behind, (FUNCTION_END,), self._closing)
            return self._goes_on(text, behind, (PARAMETER, CLOSE)) if ends is False else ends
        if kind == CLOSE and self._calls:
            self._calls -= 1
            return False
        if kind == CLOSE:
            return begins and self._goes_on(text, behind, CALLS)
        return self._goes_on(text, behind, (CLOSE,), CALLS if self._strict else ())

    def _next_begins(self, text: str, at: int) -> bool | None:
        """Returns whether the next parameter begins, or one that is quoted."""
        name = _PARAMETER_NAME.match(text, at)
        if name is None:
            return False if self._last else None
        known = self._next_names is None or name[1].strip() in self._next_names
        if known and not self._parameters:
            return True
        self._parameters += self._strict
        return False

    def _goes_on(self, text: str, at: int, marks: tuple[str, ...],
                 then: tuple[str, ...] = ()) -> bool | None:
        """Returns whether one of the marks is next, or nothing; and one of `then` behind it."""
        found = _next_is(text, at, marks)
        if found is None:
            return self._last or None
        return self._goes_on(text, text.index(">", at) + 1, then) if found and then else found


def _without_broken_end(value: str) -> str:
    """Returns a value without `</parameter` and what else its model made of the mark."""
    found = _BROKEN_END.search(value)
    return value if found is None else value[:found.start()]


def _next_is(text: str, at: int, marks: tuple[str, ...]) -> bool | None:
    """Returns whether one of the marks is next, behind white space; None = not certain yet."""
    word = _WORD.search(text, at)
    rest = text[word.start():word.start() + len(FUNCTION_END) + 4] if word else ""
    if any(rest.startswith(mark) for mark in marks):
        return True
    return None if any(mark.startswith(rest) for mark in marks) else False


def _goes_on_like_call(text: str) -> bool | None:
    """Returns whether a text begins with a function and its first parameter, or its end."""
    begins = _begins_function(text)
    return begins and _next_is(text, text.index(">") + 1, (PARAMETER, FUNCTION_END))


def _begins_function(text: str) -> bool | None:
    """Returns whether a text begins with `<function=name>`; None = not certain yet."""
    if not text.startswith(FUNCTION):
        return None if FUNCTION.startswith(text) else False
    name, mark, _ = text[len(FUNCTION):len(FUNCTION) + 260].partition(">")
    if mark:
        return _NAME.fullmatch(name.strip()) is not None
    return None if len(name) <= 256 and "<" not in name else False
