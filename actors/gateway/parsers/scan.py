"""Finding marks and JSON values in a text that is still coming. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SPACE = " \t\r\n"


def held(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of the marks."""
    longest = max(map(len, marks))
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


class Found(NamedTuple):
    """The first of some marks in a text."""

    at: int
    mark: str


def first_of(text: str, marks: Sequence[str]) -> Found | None:
    """None if none of them is there."""
    places = [Found(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(places, default=None)


class Value:
    """One JSON value, taken from a text as it comes: where does it end?

    Strings and brackets are followed, nothing else is checked. A value without either (a number, a
    word) ends before a comma, a closing bracket or a space.
    """

    def __init__(self) -> None:
        self.over = False
        self._depth = 0
        self._string = self._escaped = self._begun = False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to it; sets `over` at its end."""
        for at, letter in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._string = False
                    if self._depth == 0:
                        return self._end(at + 1)
                continue
            if self._depth == 0 and self._begun and letter in ",]}" + SPACE:
                return self._end(at)
            self._begun = True
            if letter == '"':
                self._string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self._end(at + 1)
        return len(text)

    def _end(self, size: int) -> int:
        self.over = True
        return size
