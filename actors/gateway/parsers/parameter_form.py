"""How calls are marked whose arguments stand one by one, each between marks, and where a value that
is written without quotes ends.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import NamedTuple

from actorium.actors.gateway.parsers.parts import SPACE, partial_mark

_WORD = re.compile(r"\S")
_MAYBE_NAME = re.compile(r"\s*[\"']?[^<>\"'\s]{0,256}[\"']?\s*(?:<[^<>]{0,64})?")
"""A function's name of which the end has not come."""
_NAME_END = re.compile(r"[>\n]")
MAX_NAME_TEXT = 1024
"""Characters of a parameter's name and the marks around it; a longer one is passed over."""


def present(*marks: str) -> tuple[str, ...]:
    """Returns the marks that are not empty."""
    return tuple(mark for mark in marks if mark)


class ParameterForm(NamedTuple):
    """How calls are marked whose arguments stand one by one."""

    function: str
    """Before the name of the function."""
    name_end: str
    """Expression of what stands behind that name and its quotes."""
    function_end: str
    parameter: str
    """Before the name of a parameter."""
    parameter_name: str
    """Expression of that name (the first group) and of what stands between it and the value; the
    group `string` says that the value is text ("true") or is not ("false")."""
    parameter_end: str
    open: str = ""
    """Before a function, or several; empty = there is no such mark."""
    close: str = ""
    closers: tuple[str, ...] = ()
    """Other marks that may stand behind the function."""
    lines: bool = False
    """Line ends around a value are no part of it."""
    shared: bool = False
    """All calls stand behind one `open`."""
    typed: bool = False
    """Its `parameter_name` has the group `string`."""
    written: tuple[str, str, str, str] = ("", "", "", "")
    """The beginnings of a call and of a parameter and their ends as a model writes them, in terms
    of the fields above, with the `name`, and `string` as in `parameter_name`; where `open` is
    shared, without it."""

    @property
    def calls(self) -> tuple[str, ...]:
        """Returns the marks that begin calls."""
        return present(self.open, self.function)


@cache
def expression(form: ParameterForm, part: str) -> re.Pattern[str]:
    match part:
        case "head":  # a function's beginning
            return re.compile(re.escape(form.function)
                              + rf"""\s*["']?([^<>{{}}"'\s]{{1,256}})["']?\s*(?:{form.name_end})""")
        case "parameter":
            return re.compile(form.parameter_name)
        case "broken end":
            mark = re.escape(form.parameter_end[:-1])
            return re.compile(rf"\n[ \t]*{mark}[^\n]*\n?\Z")
    marks = present(form.parameter, form.parameter_end, form.function, form.function_end,
                        form.close)
    return re.compile("|".join(map(re.escape, marks)))


class ParameterValue(NamedTuple):
    """A parameter's value, and where the text behind its end begins."""

    value: str
    rest: int


class ValueEnd:
    """Finds the end of one parameter's value in a text that is still arriving.

    A value is written without quotes, so that it may hold what ends it: an agent that edits a
    parser writes `</parameter>`. A mark therefore counts only where the form goes on behind it
    (the marks below are Qwen3-Coder's):

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

    def __init__(self, form: ParameterForm, next_names: Collection[str] | None, marked: bool,
                 last: bool = False, strict: bool = True) -> None:
        """next_names: of parameters that may come next, None = any; marked: the call began with
        the form's `open`, so that its end is expected; last: the text is complete; strict: look
        for quotations."""
        self._form, self._next_names, self._last, self._strict = form, next_names, last, strict
        self._closing = present(form.close, *form.closers, *form.calls) \
            if marked and strict else ()
        """Marks that are expected behind the function."""
        self._at = 0
        """The text before it was looked at."""
        self._calls = self._functions = self._parameters = 0
        """Quotations that have begun."""

    def find(self, text: str) -> ParameterValue | None:
        """Returns the end; None = there is none so far. text: from the value's beginning on."""
        form = self._form
        marks = expression(form, "marks")
        while mark := marks.search(text, self._at):
            line = text.rfind("\n", 0, mark.start()) + 1
            lines = text.startswith("\n")
            begins = not (lines and self._strict) or not text[line:mark.start()].strip(" \t")
            ends = self._ends(text, mark, begins)
            if ends is None:
                self._at = mark.start()
                return None
            if ends and mark[0] == form.parameter_end:
                return ParameterValue(text[:mark.start()], mark.end())
            if ends:
                whole = lines and not text[line:mark.start()].strip(" \t")
                value = text[:line if whole else mark.start()]
                return ParameterValue(without_broken_end(form, value), mark.start())
            self._at = mark.end()
        self._at = max(self._at, len(text) - partial_mark(text, present(
            form.parameter, form.parameter_end, form.function, form.function_end, form.close)))
        return None

    def _ends(self, text: str, mark: re.Match[str], begins: bool) -> bool | None:
        """begins: the mark is at the beginning of a line, or the value is not written in lines."""
        form, kind, behind = self._form, mark[0], mark.end()
        if kind == form.function:
            quoted = begins and self._strict and goes_on_like_call(form, text[mark.start():])
            self._functions += quoted is True
            self._calls += quoted is True and bool(form.open) and \
                text[:mark.start()].rstrip(SPACE).endswith(form.open)
            return None if quoted is None and not self._last else False
        if self._functions:
            self._functions -= kind == form.function_end
            return False
        if kind == form.parameter:
            return begins and self._next_begins(text, behind)
        if kind == form.parameter_end:
            if self._parameters:
                self._parameters -= 1
                return False
            ends = self._goes_on(text, behind, (form.function_end,), self._closing)
            return self._goes_on(text, behind, present(form.parameter, form.close)) \
                if ends is False else ends
        if kind == form.close and self._calls:
            self._calls -= 1
            return False
        if kind == form.close or not form.close:
            return begins and self._goes_on(text, behind, form.calls)
        return self._goes_on(text, behind, (form.close,), form.calls if self._strict else ())

    def _next_begins(self, text: str, at: int) -> bool | None:
        """Returns whether the next parameter begins, or one that is quoted."""
        name = parameter_name(self._form, text, at)
        if name is None:
            return False if self._last or len(text) > at + MAX_NAME_TEXT else None
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
        if not found:
            return False
        return self._goes_on(text, text.index(found, at) + len(found), then) if then else True


def parameter_name(form: ParameterForm, text: str, at: int = 0) -> re.Match[str] | None:
    """Returns a parameter's name, behind its mark, and what ends it."""
    end = at + MAX_NAME_TEXT
    # Without an end, the expression would try each place for each of its parts.
    if _NAME_END.search(text, at, end) is None:
        return None
    return expression(form, "parameter").match(text, at, end)


def without_broken_end(form: ParameterForm, value: str) -> str:
    """Returns a value without a broken mark of its end."""
    found = expression(form, "broken end").search(value)
    return value if found is None else value[:found.start()]


def _next_is(text: str, at: int, marks: tuple[str, ...]) -> str | None:
    """Returns which of the marks is next, behind white space, empty = none; None = not certain yet.
    """
    word = _WORD.search(text, at)
    rest = text[word.start():word.start() + max(map(len, marks), default=0)] if word else ""
    found = next((mark for mark in marks if rest.startswith(mark)), "")
    return None if not found and any(mark.startswith(rest) for mark in marks) else found


def goes_on_like_call(form: ParameterForm, text: str) -> bool | None:
    """Returns whether a text begins with a function and its first parameter, or its end."""
    begins = begins_function(form, text)
    if not begins:
        return begins
    head = expression(form, "head").match(text)
    assert head is not None
    found = _next_is(text, head.end(), (form.parameter, form.function_end))
    return None if found is None else bool(found)


def begins_function(form: ParameterForm, text: str) -> bool | None:
    """Returns whether a text begins with a function's name; None = not certain yet."""
    if not text.startswith(form.function):
        return None if form.function.startswith(text) else False
    if expression(form, "head").match(text) is not None:
        return True
    name = text[len(form.function):len(form.function) + 400]
    return None if _MAYBE_NAME.fullmatch(name) is not None else False
