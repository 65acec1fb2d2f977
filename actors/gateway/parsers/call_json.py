"""A call written as a JSON object, `{"name": ..., "arguments": {...}}`, read as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable

from actorium.actors.gateway.parsers.pieces import CallArguments, CallBegin, Piece
from actorium.actors.gateway.parsers.scan import SPACE, Value

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "type", "id", "function", *ARGUMENTS)
"""What a call's object may hold; any other first key says that it is something else."""


class JsonCall:
    """One object. The name and the arguments are told as soon as they are known, the arguments as
    they are written (a string that holds them is unpacked)."""

    def __init__(self, index: int) -> None:
        self.over = False
        """The object has ended."""
        self.failed = False
        """It is no call; nothing of it was told."""
        self.raw = ""
        """All that was taken of it, while nothing was told."""
        self._index = index
        self._state: Callable[[list[Piece]], bool] = self._open
        self._text = ""
        self._key = ""
        self._value = Value()
        self._kept = ""
        """The value so far, where it is wanted as a whole."""
        self._name: str | None = None
        self._told = self._has_arguments = False
        self._waiting = ""
        """Arguments that came before the name."""
        self._inside = False
        """Of an object within, which is the call."""

    def feed(self, text: str) -> tuple[list[Piece], str]:
        """The pieces, and what of `text` lies behind the object's end."""
        out: list[Piece] = []
        if not self._told:
            self.raw += text
        self._text += text
        while not self.over and not self.failed and self._state(out):
            pass
        rest = ""
        if self.over:
            rest, self._text = self._text, ""
        if self.over and not self._told:
            self.failed = True
        return out, rest

    # --- states: each takes from the text, and says whether there may be more to do ---

    def _skip(self) -> bool:
        self._text = self._text.lstrip(SPACE)
        return bool(self._text)

    def _open(self, _out: list[Piece]) -> bool:
        return self._skip() and self._expect("{", self._key_or_end)

    def _expect(self, letter: str, then: Callable[[list[Piece]], bool]) -> bool:
        if self._text[0] != letter:
            return self._fail()
        self._text, self._state = self._text[1:], then
        return True

    def _fail(self) -> bool:
        """No call after all; or, once it was told as one, as much of it as could be read."""
        self.failed, self.over = not self._told, self._told
        return False

    def _key_or_end(self, out: list[Piece]) -> bool:
        if not self._skip():
            return False
        if self._text[0] in ",}":
            return self._next_or_end(out)
        if self._text[0] != '"':
            return self._fail()
        self._value, self._kept = Value(), ""
        self._state = self._read_key
        return True

    def _next_or_end(self, out: list[Piece]) -> bool:
        letter, self._text = self._text[0], self._text[1:]
        if letter == "}":
            if not self._has_arguments:
                self._has_arguments, self._waiting = True, "{}"
                self._tell(out)
            self.over, self._inside = not self._inside, False
        return not self.over

    def _read_key(self, _out: list[Piece]) -> bool:
        if not self._keep():
            return False
        self._key = str(_loads(self._kept, ""))
        if self._key not in KEYS:
            return self._fail()
        self._state = self._colon
        return True

    def _colon(self, _out: list[Piece]) -> bool:
        return self._skip() and self._expect(":", self._begin_value)

    def _begin_value(self, _out: list[Piece]) -> bool:
        if not self._skip():
            return False
        if self._text[0] in ",:}]":
            return self._fail()
        if self._key == "function" and self._text[0] == "{" and not self._inside:
            # OpenAI's own shape: the object within is the call.
            self._text, self._state, self._inside = self._text[1:], self._key_or_end, True
            return True
        self._value, self._kept = Value(), ""
        streams = self._key in ARGUMENTS and self._text[0] != '"'
        self._state = self._stream if streams else self._whole
        return True

    def _keep(self) -> bool:
        """Take of the value; True when it is whole."""
        size = self._value.take(self._text)
        self._kept += self._text[:size]
        self._text = self._text[size:]
        return self._value.over

    def _whole(self, out: list[Piece]) -> bool:
        if not self._keep():
            return False
        value = _loads(self._kept, None)
        if self._key in ("name", "function"):
            if not isinstance(value, str) or not value:
                return self._fail()
            self._name = value
            self._tell(out)
        elif self._key in ARGUMENTS:
            self._has_arguments = True
            self._argue(out, value if isinstance(value, str) else self._kept)
        self._state = self._key_or_end
        return True

    def _stream(self, out: list[Piece]) -> bool:
        self._has_arguments = True
        size = self._value.take(self._text)
        self._argue(out, self._text[:size])
        self._text = self._text[size:]
        if self._value.over:
            self._state = self._key_or_end
        return self._value.over

    # --- telling ---

    def _argue(self, out: list[Piece], text: str) -> None:
        if self._told and text:
            out.append(CallArguments(self._index, text))
        else:
            self._waiting += text
            self._tell(out)

    def _tell(self, out: list[Piece]) -> None:
        """The call has begun once its name and the start of its arguments are there."""
        if self._name is None or not self._has_arguments or self._told:
            return
        self._told, self.raw = True, ""
        out.append(CallBegin(self._index, self._name))
        if self._waiting:
            out.append(CallArguments(self._index, self._waiting))
            self._waiting = ""


def _loads(text: str, otherwise: object) -> object:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
    return found
