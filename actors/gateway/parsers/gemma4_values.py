"""Keys and values in the arguments of calls of Gemma's models: where they end in a text that is
still arriving, and what they are as JSON.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import NamedTuple

from actorium.actors.gateway.parsers.argument_types import ANY, Types, as_json
from actorium.actors.gateway.parsers.parts import SPACE, partial_mark


class GemmaForm(NamedTuple):
    """How calls of Gemma's models are marked."""

    call: str
    call_end: str
    quote: str
    """Around a text."""
    others: tuple[str, ...] = ()
    """Other marks that end a call wherever they stand outside of a text."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Returns the marks that end a call wherever they stand outside of a text."""
        return self.call_end, self.call, *self.others


GEMMA4_FORM = GemmaForm("<|tool_call>", "<tool_call|>", '<|"|>', ("<|tool_response>", "<turn|>"))
FUNCTION_GEMMA_FORM = GemmaForm("<start_function_call>", "<end_function_call>", "<escape>",
                                ("<start_function_response>", "<end_of_turn>"))
MAX_KEY, MAX_DEPTH = 1024, 64
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)(?:"|\Z)', re.DOTALL)
_BARE_KEY = re.compile(r'[^:{}\[\],<"]*')
_BARE_VALUE = re.compile(r"[^,{}\[\]]*")
_IN_STRING = re.compile(r'["\\]')
_PYTHON = {"None": "null", "True": "true", "False": "false"}


@cache
def _outside(form: GemmaForm) -> re.Pattern[str]:
    """Returns the expression of what has a meaning outside of a text."""
    marks = map(re.escape, (form.quote, *form.ends))
    return re.compile("|".join(marks) + r'|["{}\[\],]')


class Beginning(NamedTuple):
    """What a text begins with, and how many characters that has."""

    name: str | None
    size: int


def key_of(text: str, form: GemmaForm) -> Beginning | None:
    """Returns the key that a text begins with; the size is that of all before its value. The name
    is None where there is no key, and so much of the text is passed over; None = not certain yet.
    """
    window = text[:MAX_KEY]
    whole = len(text) >= MAX_KEY
    quote = form.quote
    if window.startswith(quote):
        end = window.find(quote, len(quote))
        name, size = window[len(quote):max(end, 0)], end + len(quote) if end >= 0 else -1
    elif window.startswith('"'):
        string = _STRING.match(window)
        closed = string is not None and len(string[0]) > 1 and string[0].endswith('"') \
            and string.end() == string.end(1) + 1
        name = _unescaped(string[1]) if string is not None and closed else ""
        size = string.end() if string is not None and closed else -1
    else:
        bare = _BARE_KEY.match(window)
        size = bare.end() if bare is not None else 0
        name = window[:size].strip(SPACE)
        if size < len(window) and (window[size] != ":" or not name):
            return Beginning(None, size + (window[size] not in "}<" or not size))
    if size < 0:
        return Beginning(None, 1) if whole else None
    rest = window[size:].lstrip(SPACE)
    if not rest:
        return Beginning(None, size or 1) if whole else None
    at = len(window) - len(rest)
    return Beginning(name, at + 1) if rest[0] == ":" else Beginning(None, at)


class ArgumentEnd:
    """Finds the end of one value in a text that is still arriving: the comma, bracket or mark
    behind it."""

    def __init__(self, form: GemmaForm) -> None:
        self._form = form
        self._at = self._depth = 0
        self.string = ""
        """What ends the text that is open."""

    def find(self, text: str) -> int | None:
        """Returns how many characters the value has; None = its end has not come. text: from the
        value's beginning on."""
        quote, marks = self._form.quote, (self._form.quote, *self._form.ends)
        while True:
            if self.string == quote:
                at = text.find(quote, self._at)
                if at < 0:
                    self._at = max(self._at, len(text) - partial_mark(text, (quote,)))
                    return None
                self._at, self.string = at + len(quote), ""
                continue
            found = (_IN_STRING if self.string else _outside(self._form)).search(text, self._at)
            certain = len(text) - (0 if self.string else partial_mark(text, marks))
            if found is None or found.start() >= certain:
                self._at = max(self._at, certain)
                return None
            if self.string:
                if found[0] == "\\" and found.end() == len(text):
                    self._at = found.start()
                    return None
                self._at = found.end() + (found[0] == "\\")
                self.string = self.string if found[0] == "\\" else ""
            elif self._ends(text, found[0], found.start()):
                return found.start()
            else:
                self._at = found.end()

    def _ends(self, text: str, mark: str, at: int) -> bool:
        """Returns whether the value ends before a mark."""
        if mark in self._form.ends or (not self._depth and mark in (",", "}")):
            return True
        if mark in ("{", "["):
            self._depth += 1
        elif mark in ("}", "]"):
            self._depth = max(0, self._depth - 1)
        elif mark == self._form.quote or (mark == '"' and _begins_value(text, at)):
            self.string = mark
        return False

    def whole(self, text: str) -> bool:
        """Returns whether a value that was cut off here is complete."""
        last, quote = text.rstrip(SPACE), self._form.quote
        ends = last.endswith((quote, "}", "]")) or (
            last.endswith('"') and not partial_mark(last, (quote,)))
        return ends and not self.string and not self._depth


def _begins_value(text: str, at: int) -> bool:
    """Returns whether a value, or a key, may begin at a place within a value."""
    while at and text[at - 1] in SPACE:
        at -= 1
    return not at or text[at - 1] in ":{[,"


# --- values as JSON -------------------------------------------------------------------------------

def argument_of(value: str, types: Types, form: GemmaForm) -> str:
    """Returns an argument as JSON, of a type that is allowed where it can be one."""
    text = value.strip(SPACE)
    if text.startswith((form.quote, '"')):
        content = json.loads(_Writer(text, form).value())
        return _written(content) if "string" in types else as_json(content, types)
    if not text.startswith(("{", "[")):
        return as_json(_PYTHON.get(text, text) if types == ANY else text, types)
    written = _Writer(text, form).value()
    kind = "object" if text[0] == "{" else "array"
    return _written(written) if kind not in types and "string" in types else written


def _written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).encode(errors="replace").decode()


def _unescaped(text: str) -> str:
    """Returns what stands between the quotes of a JSON string; line ends may stand in it."""
    try:
        return str(json.loads(f'"{text}"', strict=False)).encode(errors="replace").decode()
    except ValueError:
        return text


class _Writer:
    """Writes a whole value as JSON; what was left open in it is closed."""

    def __init__(self, text: str, form: GemmaForm) -> None:
        self._text, self._quote, self._at = text, form.quote, 0

    def value(self, depth: int = 0) -> str:
        self._skip(SPACE)
        first = self._text[self._at:self._at + 1]
        if depth > MAX_DEPTH:
            rest, self._at = self._text[self._at:], len(self._text)
            return _written(rest)
        if (string := self._string()) is not None:
            return _written(string)
        if first == "{":
            return "{" + ", ".join(self._members(depth)) + "}"
        if first == "[":
            return "[" + ", ".join(self._items(depth)) + "]"
        word = self._taken(_BARE_VALUE).strip(SPACE)
        return as_json(_PYTHON.get(word, word), ANY)

    def _skip(self, letters: str) -> str:
        """Passes over these letters; returns the next one."""
        while self._text[self._at:self._at + 1] and self._text[self._at] in letters:
            self._at += 1
        return self._text[self._at:self._at + 1]

    def _taken(self, expression: re.Pattern[str]) -> str:
        found = expression.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found[0]

    def _string(self) -> str | None:
        """Returns the text that begins here, without its quotes; None where none does."""
        if self._text.startswith(self._quote, self._at):
            at = self._at + len(self._quote)
            end = self._text.find(self._quote, at)
            self._at = len(self._text) if end < 0 else end + len(self._quote)
            return self._text[at:] if end < 0 else self._text[at:end]
        if not self._text.startswith('"', self._at):
            return None
        found = _STRING.match(self._text, self._at)
        content = self._text[self._at + 1:] if found is None else found[1]
        self._at = len(self._text) if found is None else found.end()
        return _unescaped(content)

    def _members(self, depth: int) -> list[str]:
        out: list[str] = []
        self._at += 1
        while (letter := self._skip(SPACE + ",")) not in ("", "}", "]"):
            string = self._string()
            key = self._taken(_BARE_KEY).strip(SPACE) if string is None else string
            if self._skip(SPACE) == ":":
                self._at += 1
                out.append(f"{_written(key)}: {self.value(depth + 1)}")
            elif not key:
                self._at += 1  # no key begins like this
        self._at += letter == "}"
        return out

    def _items(self, depth: int) -> list[str]:
        out: list[str] = []
        self._at += 1
        while (letter := self._skip(SPACE + ",")) not in ("", "}", "]"):
            out.append(self.value(depth + 1))
        self._at += letter == "]"
        return out
