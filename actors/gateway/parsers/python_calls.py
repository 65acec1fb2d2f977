"""Parser of tool calls written as Python: `[f(place="Riga", n=3), g()]`, Llama 4's and others'.

Marks stand around the list, or only the list tells that there are calls: then they must be of the
request's tools. Olmo 3 writes no brackets, and each call on a line of its own.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from actorium.actors.gateway.parsers.argument_types import MAX_LITERAL
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

_LIST = re.compile(r"\[\s*(?:[A-Za-z_][\w.\-]{0,255}\s*\(|[A-Za-z_]?[\w.\-]{0,255}\s*\Z)")
_CALL = re.compile(r"([A-Za-z_][\w.\-]{0,255})\s*\(\s*(?:(?=\))|(?=[A-Za-z_]\w{0,255}\s*=[^=]))")
_MAYBE_CALL = re.compile(r"(?:[A-Za-z_][\w.\-]{0,255}\s*(?:\(\s*(?:[A-Za-z_]\w{0,255}\s*=?)?)?)?")
_KEY = re.compile(r"([A-Za-z_]\w{0,255})\s*=")
_MAYBE_KEY = re.compile(r"(?:[A-Za-z_]\w{0,255}\s*)?")
_QUOTE = re.compile(r"\"\"\"|'''|[\"']")
_OUTSIDE = re.compile(r"[\"'\[\](){},]")
_WORDS = {"true": True, "false": False, "null": None}


class PythonForm(NamedTuple):
    """How such calls are marked."""

    marks: tuple[str, ...] = ()
    """Before the calls; the first is the usual one."""
    closers: tuple[str, ...] = ()
    bare: bool = False
    """The mark may be missing: a list that calls one of the tools is a list of calls by itself."""
    listed: bool = True
    """Brackets stand around the calls, and commas between them; else line ends stand there."""


class PythonCallsParser(StateParser):
    """Parses one choice. Each argument is returned when it is complete."""

    def __init__(self, form: PythonForm, names: Collection[str] = ()) -> None:
        """names: of all tools."""
        super().__init__(self._in_text)
        self._form, self._names = form, names
        self._prose = TextAroundCalls()
        self._calls = self._given = 0
        self._mark = ""
        """What stands before the first call, until that has begun."""
        self._key = ""
        self._value = _LiteralEnd()

    def _finish(self, out: list[MessagePart], cut: bool) -> None:
        """A call that its model left open is closed; of one that was cut, what is complete has
        been returned."""
        if self._state == self._in_value and not cut:
            self._argue(out, len(self._text.rstrip(SPACE + ")]") if not self._value.quote
                                 else self._text))
        if self._state in (self._in_value, self._next_key):
            out += [] if cut else [ToolCallArguments(self._calls, "}")]
        elif self._state == self._next_call:
            self._prose.add(out, self._mark + self._text)
        elif self._state == self._in_text:
            self._prose.add(out, self._text)
        self._prose.end(out)

    # --- states: each takes from the text, and says whether there may be more to do ---

    def _in_text(self, out: list[MessagePart]) -> bool:
        form = self._form
        found = first_of(self._text, (*form.marks, "[") if form.bare else form.marks)
        if found is None:
            self._text = self._prose.add_before(out, self._text, form.marks)
            return False
        self._prose.add(out, self._text[:found.at])
        self._text = self._text[found.at:]
        if found.mark == "[" and _LIST.match(self._text) is None:
            self._prose.add(out, "[")
            self._text = self._text[1:]
            return True
        rest = self._text[len(found.mark):].lstrip(SPACE)
        if found.mark != "[" and form.listed:
            if not rest:
                return False
            rest = rest[1:].lstrip(SPACE) if rest[0] == "[" else rest
        self._mark = self._text[:len(self._text) - len(rest)]
        self._text, self._state = rest, self._next_call
        return bool(rest)

    def _next_call(self, out: list[MessagePart]) -> bool:
        """Handles what stands before a call, or the end of all."""
        text = self._text if self._mark else self._text.lstrip(SPACE + ",")
        found = _CALL.match(text)
        bare = bool(self._mark) and self._mark.startswith("[") and self._form.bare
        if found is None and _MAYBE_CALL.fullmatch(text) is not None:
            return False
        if found is not None and not (bare and found[1] not in self._names):
            self._mark, self._given = "", 0
            self._text, self._state = text[found.end():], self._next_key
            self._prose.call_begins()
            out += [ToolCallBegin(self._calls, found[1]), ToolCallArguments(self._calls, "{")]
            return True
        if self._mark:  # no call at all
            size = 1 if bare else len(next(m for m in self._form.marks if self._mark.startswith(m)))
            self._text, self._mark = self._mark + self._text, ""
            self._prose.add(out, self._text[:size])
            self._text, self._state = self._text[size:], self._in_text
            return True
        self._state = self._behind
        return True

    def _next_key(self, out: list[MessagePart]) -> bool:
        text = self._text.lstrip(SPACE + ",")
        if text.startswith(")"):
            self._end_call(out, text[1:])
            return True
        key = _KEY.match(text)
        if key is None and _MAYBE_KEY.fullmatch(text) is not None:
            return False
        if key is None:  # an argument without a name, say
            self._end_call(out, text)
            self._state = self._behind
            return True
        self._key, self._text = key[1], text[key.end():]
        self._value, self._state = _LiteralEnd(), self._in_value
        return True

    def _end_call(self, out: list[MessagePart], rest: str) -> None:
        out.append(ToolCallArguments(self._calls, "}"))
        self._calls += 1
        self._prose.call_ended()
        self._text, self._state = rest, self._next_call

    def _in_value(self, out: list[MessagePart]) -> bool:
        size = self._value.find(self._text)
        if size is None:
            return False
        self._argue(out, size)
        self._state = self._next_key
        return True

    def _argue(self, out: list[MessagePart], size: int) -> None:
        """Returns an argument, whose value has this many characters."""
        comma = ", " if self._given else ""
        name = json.dumps(self._key, ensure_ascii=False)
        value = literal_as_json(self._text[:size].strip())
        out.append(ToolCallArguments(self._calls, f"{comma}{name}: {value}"))
        self._given += 1
        self._text = self._text[size:]

    def _behind(self, _out: list[MessagePart]) -> bool:
        """Handles what follows the calls."""
        rest = self._text.lstrip(SPACE)
        if not rest:
            return False
        ended = after_call(rest[1:] if self._form.listed and rest[0] == "]" else self._text,
                           self._form.closers)
        if ended is None:
            return False
        self._text, self._state = ended, self._in_text
        return bool(ended)


class _LiteralEnd:
    """Finds the end of one value in a text that is still arriving: the comma or bracket behind it.
    """

    def __init__(self) -> None:
        self.quote = ""
        """What ends the string that is open."""
        self._at = self._depth = 0

    def find(self, text: str) -> int | None:
        """Returns how many characters the value has; None = its end has not come. text: from the
        value's beginning on."""
        while self._at < len(text):
            if self.quote:
                at = min((place for mark in ("\\", self.quote)
                          if (place := text.find(mark, self._at)) >= 0), default=-1)
                if at < 0:  # the quotes may have begun
                    self._at = max(self._at, len(text) - len(self.quote) + 1)
                    return None
                if text[at] == "\\":
                    self._at = at
                    if at + 1 == len(text):
                        return None
                    self._at = at + 2
                else:
                    self._at, self.quote = at + len(self.quote), ""
                continue
            found = _OUTSIDE.search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            letter, self._at = found[0], found.start()
            if letter in "\"'":
                if text[self._at:] in (letter, letter * 2):  # perhaps three of them
                    return None
                opening = _QUOTE.match(text, self._at)
                assert opening is not None
                self._at, self.quote = opening.end(), opening[0]
                continue
            if not self._depth and letter in ",)]}":
                return self._at
            self._depth += (letter in "[({") - (letter in "])}")
            self._at += 1
        return None


def literal_as_json(text: str) -> str:
    """Returns what a Python literal is as JSON; JSON's own words may stand in it. Another text
    becomes a string."""
    try:
        if len(text) > MAX_LITERAL and text[:1] not in "\"'":
            raise ValueError
        node = ast.parse(text, mode="eval").body
        return json.dumps(_value(node), ensure_ascii=False, allow_nan=False).encode(
            errors="surrogatepass").decode()
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    try:
        json.loads(text)
        return text.encode().decode()
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _value(node: ast.expr) -> Any:
    """Raises `ValueError` where the expression is no literal."""
    match node:
        case ast.Name(word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values):
            pairs = zip(keys, values, strict=True)
            return {_key(key): _value(value) for key, value in pairs}
        case ast.Constant(str() | int() | float() | None):
            return node.value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
    raise ValueError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if node is None:
        raise ValueError
    return json.dumps(_value(node))
