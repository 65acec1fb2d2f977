"""One tool call written as a JSON object, `{"name": ..., "arguments": {...}}`, as it arrives."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from actorium.actors.gateway.parsers.json_value import JsonValueScanner
from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    ToolCallArguments,
    ToolCallBegin,
)

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "type", "id", "function", *ARGUMENTS)
"""Keys that a call's object may have. Others are the arguments, where there are no arguments under
a key of their own; else they are passed over."""
_NOT_JSON = object()


class JsonCallParser:
    """Parses one object. Name and arguments are returned as soon as they are known, the arguments
    as written (a string that contains them is unpacked)."""

    def __init__(self, index: int, names: Collection[str] | None = None, name_key: str = "name"
                 ) -> None:
        """names: of all tools: an object that calls another one is no call, nor is one that has
        other keys before the name; None = the object is marked as a call, whatever it names.
        name_key: key of the name; empty = the first key is the name, its value the arguments."""
        self.over = False
        """The object has ended."""
        self.failed = False
        """The object is not a call; no part of it has been returned."""
        self.raw = ""
        """All its text so far, until its first part has been returned."""
        self._index = index
        self._state: Callable[[list[MessagePart]], bool] = self._open
        self._text = ""
        self._key = self._member = ""
        """A member's key, and how it is written, where it is none of a call's."""
        self._value = JsonValueScanner()
        self._kept = ""
        """The value so far, where it is needed as a whole."""
        self._name: str | None = None
        self._begun = self._has_arguments = False
        self._waiting = ""
        """Arguments that came before the name."""
        self._inside = False
        """Inside a nested object, which is the call."""
        self._names, self._name_key = names, name_key
        self._others: list[str] = []
        """Members with other keys, before the call has begun."""

    def feed(self, text: str) -> tuple[list[MessagePart], str]:
        """Returns the parts, and the rest of `text` after the object's end; where it is no call,
        all is in `raw`."""
        out: list[MessagePart] = []
        if not self._begun:
            self.raw += text
        self._text += text
        while not self.over and not self.failed and self._state(out):
            pass
        rest = ""
        if self.over:
            rest, self._text = self._text, ""
        if self.over and not self._begun:
            self.failed, rest = True, ""
        return out, rest

    def end(self) -> list[MessagePart]:
        """Returns what closes the arguments, where the text ended within them."""
        closing = self._value.closing() if self._state == self._stream else ""
        return [ToolCallArguments(self._index, closing)] if self._begun and closing else []

    # --- states: each takes from the text, and says whether there may be more to do ---

    def _skip(self) -> bool:
        self._text = self._text.lstrip(SPACE)
        return bool(self._text)

    def _open(self, _out: list[MessagePart]) -> bool:
        return self._skip() and self._expect("{", self._key_or_end)

    def _expect(self, letter: str, then: Callable[[list[MessagePart]], bool]) -> bool:
        if self._text[0] != letter:
            return self._fail()
        self._text, self._state = self._text[1:], then
        return True

    def _fail(self) -> bool:
        """Gives up: the object is not a call; or, once its beginning was returned, it ends here."""
        self.failed, self.over = not self._begun, self._begun
        return False

    def _key_or_end(self, out: list[MessagePart]) -> bool:
        if not self._skip():
            return False
        if self._text[0] in ",}":
            return self._next_or_end(out)
        if self._text[0] != '"':
            return self._fail()
        self._value, self._kept = JsonValueScanner(), ""
        self._state = self._read_key
        return True

    def _next_or_end(self, out: list[MessagePart]) -> bool:
        letter, self._text = self._text[0], self._text[1:]
        if letter == "}":
            if not self._has_arguments and (self._name is not None or not self._inside):
                self._has_arguments = True
                self._waiting = f"{{{', '.join(self._others)}}}"
                self._begin_call(out)
            self.over, self._inside = not self._inside, False
        return not self.over

    def _read_key(self, _out: list[MessagePart]) -> bool:
        if not self._keep():
            return False
        self._key = str(_loads(self._kept, ""))
        if not self._name_key and self._name is None:
            self._name, self._key = self._key, ARGUMENTS[0]
        elif self._key == self._name_key:
            self._key = "name"
        if self._key in ARGUMENTS and self._has_arguments:
            self._key = ""
        if self._key not in KEYS:
            if self._names is not None and self._name not in self._names and not self._begun:
                return self._fail()
            self._member = self._kept
        self._state = self._colon
        return True

    def _colon(self, _out: list[MessagePart]) -> bool:
        return self._skip() and self._expect(":", self._begin_value)

    def _begin_value(self, _out: list[MessagePart]) -> bool:
        if not self._skip():
            return False
        if self._text[0] in ",:}]":
            return self._fail()
        if self._key == "function" and self._text[0] == "{" and not self._inside:
            # OpenAI's own shape: the object within is the call.
            self._text, self._state, self._inside = self._text[1:], self._key_or_end, True
            self._others.clear()
            return True
        self._value, self._kept = JsonValueScanner(), ""
        streams = self._key in ARGUMENTS and self._text[0] in "{["
        self._state = self._stream if streams else self._whole
        return True

    def _keep(self) -> bool:
        """Adds to the value; returns True when it is complete."""
        self._text = self._text[self._value.feed(self._text):]
        self._kept += self._value.written
        return self._value.over

    def _whole(self, out: list[MessagePart]) -> bool:
        if not self._keep():
            return False
        value = _loads(self._kept, None)
        if self._key in ("name", "function"):
            if not isinstance(value, str) or not value or not self._may_be(value):
                return self._fail()
            self._name = value
            self._begin_call(out)
        elif self._key in ARGUMENTS:
            self._has_arguments = True
            self._argue(out, self._unpacked(value))
        elif self._key not in KEYS and not self._begun:
            self._others.append(f"{self._member}: {_valid(self._kept)}")
        self._state = self._key_or_end
        return True

    def _may_be(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _unpacked(self, value: object) -> str:
        """Returns arguments that are no object as written: those within a string, none for null."""
        if value is None and self._kept == "null":
            return "{}"
        if not isinstance(value, str):
            return _valid(self._kept)
        found = JsonValueScanner()
        size = found.feed(value)
        inner = found.written + value[size:] or "{}"
        return inner if _valid(inner) == inner else self._kept

    def _stream(self, out: list[MessagePart]) -> bool:
        self._has_arguments = True
        self._text = self._text[self._value.feed(self._text):]
        self._argue(out, self._value.written)
        if self._value.over:
            self._state = self._key_or_end
        return self._value.over

    # --- parts ---

    def _argue(self, out: list[MessagePart], text: str) -> None:
        if self._begun and text:
            out.append(ToolCallArguments(self._index, text))
        else:
            self._waiting += text
            self._begin_call(out)

    def _begin_call(self, out: list[MessagePart]) -> None:
        """Begins the call once its name and the start of its arguments are known."""
        if self._name is None or not self._has_arguments or self._begun:
            return
        self._begun, self.raw = True, ""
        out.append(ToolCallBegin(self._index, self._name))
        if self._waiting:
            out.append(ToolCallArguments(self._index, self._waiting))
            self._waiting = ""


class ArgumentsParser:
    """Parses the arguments of a call whose name has come before them, an object; has the interface
    of `JsonCallParser`."""

    failed, raw = False, ""

    def __init__(self, begin: ToolCallBegin) -> None:
        """begin: the call, which is returned with the first part."""
        self.over = False
        self._begin: list[MessagePart] = [begin]
        self._index = begin.call
        self._value = JsonValueScanner()

    def feed(self, text: str) -> tuple[list[MessagePart], str]:
        """Returns the parts, and the rest of `text` after the object's end."""
        out, self._begin = self._begin, []
        size = self._value.feed(text)
        self.over = self._value.over
        if self._value.written:
            out.append(ToolCallArguments(self._index, self._value.written))
        return out, text[size:]

    def end(self) -> list[MessagePart]:
        """Returns what closes the arguments, where the text ended within them."""
        closing = self._value.closing()
        return [ToolCallArguments(self._index, closing)] if closing else []


def _valid(text: str) -> str:
    """Returns a value as it is, if it is JSON, else as a string."""
    return json.dumps(text, ensure_ascii=False) if _loads(text, _NOT_JSON) is _NOT_JSON else text


def _loads(text: str, otherwise: object) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
    return value
