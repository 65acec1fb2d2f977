"""Parsers of tool calls written as JSON objects, `{"name": ..., "arguments": {...}}`.

Forced calls (structured output) have no other text. Hermes, Qwen2.5 and Qwen3 write
`<tool_call>{...}</tool_call>`. Llama 3.1 and later write `{"name": ..., "parameters": {...}}`, with
or without `<|python_tag|>` before it, several calls separated by `;`.

Models also write several objects within one mark, or a list of them, fence them as code, add keys
of their own, and write the arguments beside the name: all that is read.

A call that was cut: its arguments come as far as they were written; what its model left open
itself is closed. Before the arguments begin there is no call to show. If it was forced
(`NamedCallParser`, `CallListParser`), it is no part of an answer and is dropped: the finish reason
says what happened. If it was the model's own choice, it is text: nobody knows whether
`<tool_call>{"na` was to become a call, and nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from string import ascii_letters
from typing import NamedTuple

from actorium.actors.gateway.parsers.json_call import ArgumentsParser, JsonCallParser
from actorium.actors.gateway.parsers.json_value import JsonValueScanner
from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    StateParser,
    TextAroundCalls,
    ToolCallArguments,
    ToolCallBegin,
    after_call,
    first_of,
)


class NamedCallParser:
    """Parses a completion that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False
        self._arguments = JsonValueScanner()

    def feed(self, text: str) -> list[MessagePart]:
        if not self._begun:
            text = text.lstrip(SPACE)
        if not text or self._arguments.over:
            return []
        begin: list[MessagePart] = [] if self._begun else [ToolCallBegin(0, self._name)]
        self._begun = True
        self._arguments.feed(text)
        written = self._arguments.written
        return [*begin, *([ToolCallArguments(0, written)] if written else [])]

    def end(self, cut: bool = False) -> list[MessagePart]:
        return []


class CallListParser:
    """Parses a completion that is `[{"name": ..., "arguments": ...}, ...]`."""

    def __init__(self) -> None:
        self._text = ""
        self._call: JsonCallParser | None = None
        self._calls = 0

    def feed(self, text: str) -> list[MessagePart]:
        out: list[MessagePart] = []
        self._text += text
        while self._text and self._step(out):
            pass
        return out

    def end(self, cut: bool = False) -> list[MessagePart]:
        return []  # what has not become a call was cut

    def _step(self, out: list[MessagePart]) -> bool:
        if self._call is None:
            self._text = self._text.lstrip(SPACE + "[,]")
            if not self._text:
                return False
            self._call = JsonCallParser(self._calls)
        parts, rest = self._call.feed(self._text)
        out += parts
        self._text = rest
        if self._call.over and not self._call.failed:
            self._call = None
            self._calls += 1
            return True
        return False


FENCE = "```"
MAX_HEADER = 512
"""Characters of a call's name and what stands around it before its arguments."""


class CallForm(NamedTuple):
    """How calls are marked whose arguments are a JSON object."""

    marks: tuple[str, ...]
    """Before an object, or several; the first is the usual one."""
    closers: tuple[str, ...] = ()
    """Behind them; the first is the usual one."""
    section: str = ""
    """May stand before the first mark."""
    section_end: str = ""
    header: str = ""
    """Expression of what stands between the mark and the arguments, with the groups `name` and
    perhaps `id`; empty = the name is a member of the object."""
    written: tuple[str, str] = ("", "")
    """What stands in that place, with the `name` and perhaps the call's `number`, and behind the
    arguments, as the model writes it."""
    arguments: str = "arguments"
    """The key of the arguments, as the model writes it."""
    name_key: str = "name"
    """The key of the name; empty = the name itself is the key of the arguments."""
    listed: bool = False
    """Calls are written as a list behind one mark."""
    separator: str = "\n"
    """Between calls, as the model writes it."""
    separators: str = ","
    """What may stand between them, beside white space."""
    bare: bool = False
    """The mark may be missing: an object that calls one of the tools is a call by itself."""
    dropped: tuple[str, ...] = ()
    """Marks around the answer's text, which are no part of it."""


HERMES = CallForm(("<tool_call>",), ("</tool_call>",))
_BARE = r'|```|\[[ \t\r\n]*(?:\{|\Z)|\{[ \t\r\n]*(?:"|\Z)'


@cache
def _beginning(form: CallForm) -> re.Pattern[str]:
    """Returns the expression of text that may begin calls, or that is dropped."""
    marks = (form.section, *form.marks, *form.dropped)
    return re.compile("|".join(re.escape(mark) for mark in marks if mark) + _BARE * form.bare)


class ObjectCallsParser(StateParser):
    """Parses calls as objects, with text around them.

    What begins like a call and is none stays text. Where the form wants no mark, so does all that
    is within such an object or list: a call in it would be an example or data.
    """

    def __init__(self, form: CallForm, names: Collection[str] = ()) -> None:
        """names: of all tools."""
        super().__init__(self._in_text)
        self._form, self._names = form, names
        self._prose = TextAroundCalls()
        self._call: JsonCallParser | ArgumentsParser = JsonCallParser(0)
        self._calls = 0
        self._mark = ""
        """Before the objects; empty = there is none."""
        self._before = ""
        """The mark and what follows it before the object, or what separates the object from the one
        before: text, where the object is no call."""
        self._list = self._fence = False
        """The objects are a list, and fenced as code."""
        self._skipped = JsonValueScanner()
        """The object or list that is no call."""
        self._closers = (*form.closers, *((form.section_end,) if form.section_end else ()))

    def _finish(self, out: list[MessagePart], cut: bool) -> None:
        if self._state == self._in_call and not self._call.raw:
            out += [] if cut else self._call.end()
        elif self._state == self._in_call:
            self._prose.add(out, self._before + self._call.raw)
        elif self._state == self._opened:
            self._prose.add(out, self._mark + self._text)
        elif self._state != self._behind or not self._may_end():
            self._prose.add(out, self._text)
        self._prose.end(out)

    # --- states: each takes from the text, and says whether there may be more to do ---

    def _in_text(self, out: list[MessagePart]) -> bool:
        form = self._form
        found = _beginning(form).search(self._text)
        if found is None:
            marks = (form.section, *form.marks, *form.dropped, FENCE if form.bare else "")
            self._text = self._prose.add_before(out, self._text, [mark for mark in marks if mark])
            return False
        self._prose.add(out, self._text[:found.start()])
        self._text, mark = self._text[found.start():], found[0]
        if mark in form.dropped:  # with the white space around it
            self._prose.call_begins()
            self._prose.call_ended()
            self._text = self._text[len(mark):]
            return True
        if mark == form.section:
            rest = self._text[len(mark):].lstrip(SPACE)
            if any(one.startswith(rest) and one != rest for one in form.marks):
                return False
            behind = next((one for one in form.marks if rest.startswith(one)), "")
            mark = self._text[:len(self._text) - len(rest) + len(behind)] if behind else mark
            if not behind:
                self._prose.add(out, mark)
                self._text = self._text[len(mark):]
                return True
        self._mark = "" if form.bare and mark not in form.marks else mark
        self._text, self._state = self._text[len(self._mark):], self._opened
        return True

    def _opened(self, out: list[MessagePart]) -> bool:
        """Handles what stands before the first object: it begins, or what was found is text."""
        rest = self._text.lstrip(SPACE)
        self._list = self._fence = False
        if self._form.header and rest[:1] not in ("", "{", "["):
            named = self._begins_named()
            if named is not False:
                return bool(named)
        if rest and FENCE.startswith(rest[:len(FENCE)]):
            if len(rest) < len(FENCE):
                return False
            self._fence, language = True, rest[len(FENCE):]
            rest = language.lstrip(ascii_letters + "_").lstrip(SPACE)
        if rest.startswith("["):
            self._list, rest = True, rest[1:].lstrip(SPACE)
        begins = self._begins(rest)
        if begins is None:
            return False
        if begins:
            return self._begin(rest, self._mark)
        # What was found was text, and what follows it is parsed again.
        passed = 0 if self._mark else len(FENCE) if self._fence else 1
        self._prose.add(out, self._mark + self._text[:passed])
        self._text, self._state = self._text[passed:], self._in_text
        return True

    def _begins_named(self) -> bool | None:
        """Begins a call whose name stands before its arguments; returns whether there is one, None
        = not certain yet."""
        end = first_of(self._text, ("{", *self._closers[:1]))
        header = self._text[:MAX_HEADER if end is None else end.at]
        found = re.fullmatch(self._form.header, header)
        if found is None or end is None:
            return None if end is None and len(header) < MAX_HEADER else False
        groups = found.groupdict("")
        self._call = ArgumentsParser(ToolCallBegin(self._calls, groups["name"],
                                                   groups.get("id", "").strip()))
        self._fence = header.rstrip(SPACE + ascii_letters).endswith(FENCE)
        rest = self._text[end.at:]
        # A call without arguments ends where they would begin.
        self._text = rest if end.mark == "{" else "{}" + rest
        self._state = self._in_call
        return True

    def _begins(self, rest: str) -> bool | None:
        """Returns whether the text begins an object that may be a call; None = not certain yet."""
        if self._mark or not self._form.bare:
            return rest[0] == "{" if rest else None
        within = rest[1:].lstrip(SPACE)  # prose has braces, too, but seldom a string behind one
        if not rest.startswith("{") or within:
            return within.startswith('"') and rest.startswith("{") if rest else None
        return None

    def _begin(self, rest: str, mark: str) -> bool:
        """Begins an object, which is the beginning of `rest`, the end of the text."""
        self._before = mark + self._text[:len(self._text) - len(rest)]
        names = self._names if self._form.bare and not self._mark else None
        self._text, self._state = rest, self._in_call
        self._call = JsonCallParser(self._calls, names, self._form.name_key)
        return True

    def _in_call(self, out: list[MessagePart]) -> bool:
        call = self._call
        parts, rest = call.feed(self._text)
        if parts:
            self._prose.call_begins()
        out += parts
        self._text = rest
        if call.failed:
            self._give_up(out, self._before + call.raw)
            return True
        if not call.over:
            return False
        self._state = self._behind
        self._calls += 1
        return True

    def _give_up(self, out: list[MessagePart], text: str) -> None:
        """Treats what begins like a call as text."""
        mark = self._mark if text.startswith(self._mark) else ""
        size = len(mark)
        self._state = self._in_text
        if self._form.bare and not mark:
            size = min(at for at in (text.find("["), text.find("{")) if at >= 0)
            self._skipped, self._state = JsonValueScanner(), self._skip
        self._prose.add(out, text[:size])
        self._text = text[size:]

    def _skip(self, out: list[MessagePart]) -> bool:
        """Handles an object or a list that is no call."""
        size = self._skipped.feed(self._text)
        self._prose.add(out, self._text[:size])
        self._text = self._text[size:]
        if self._skipped.over:
            self._state = self._in_text
        return self._skipped.over

    def _behind(self, _out: list[MessagePart]) -> bool:
        """Handles what follows an object: another one, or the end of the mark."""
        rest = self._text.lstrip(SPACE)
        after = rest[1:].lstrip(SPACE) if rest[:1] in tuple(self._form.separators) else rest
        begins = isinstance(self._call, JsonCallParser) and self._begins(after)
        if begins is None:
            return False
        if begins:
            self._prose.call_ended()
            return self._begin(after, "")
        ending = self._ending()
        found = after_call(ending, self._closers)
        if found is None or (self._fence and FENCE.startswith(ending.strip(SPACE))):
            return False
        self._text, self._state = found, self._in_text
        self._prose.call_ended()
        return True

    def _may_end(self) -> bool:
        """Returns whether the text may be the beginning of a mark's end, or separates objects."""
        ending = self._ending().strip(self._form.separators + SPACE)
        return not (after_call(ending, self._closers) or "").strip(SPACE) or (
            self._fence and FENCE.startswith(ending))

    def _ending(self) -> str:
        """Returns the text without the end of a list or a fence."""
        rest = self._text
        for mark, expected in (("]", self._list), (FENCE, self._fence)):
            if expected and rest.lstrip(SPACE).startswith(mark):
                rest = rest.lstrip(SPACE).removeprefix(mark)
        return rest

