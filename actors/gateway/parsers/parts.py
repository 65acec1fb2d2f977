"""What a message is made of, and the contract of the machines that find it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias


class Text(NamedTuple):
    """More of the answer."""

    text: str


class Reasoning(NamedTuple):
    """More of the thoughts before it."""

    text: str


class CallBegin(NamedTuple):
    """A call of a tool; its arguments follow."""

    call: int
    """0, 1, ... in the message."""
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: a piece of JSON text."""

    call: int
    text: str


Piece: TypeAlias = Text | Reasoning | CallBegin | CallArguments


class Machine(Protocol):
    """Takes a message's text as it comes."""

    def feed(self, text: str) -> list[Piece]:
        """What is certain now."""

    def end(self) -> list[Piece]:
        """What is left, when no more comes."""


class Plain:
    """A message that is text alone."""

    def feed(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def end(self) -> list[Piece]:
        return []


class Chain:
    """Reasoning first; what is no reasoning goes on to the second machine."""

    def __init__(self, first: Machine, second: Machine) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[Piece]:
        return self._pass_on(self._first.feed(text))

    def end(self) -> list[Piece]:
        return self._pass_on(self._first.end()) + self._second.end()

    def _pass_on(self, pieces: Iterable[Piece]) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            out += self._second.feed(piece.text) if isinstance(piece, Text) else [piece]
        return out


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one: what two cuttings of a text have in common."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + piece.text)
        elif (isinstance(piece, CallArguments) and isinstance(last, CallArguments)
              and piece.call == last.call):
            out[-1] = CallArguments(last.call, last.text + piece.text)
        else:
            out.append(piece)
    return out


def read_all(machine: Machine, text: str) -> list[Piece]:
    """A whole message at once."""
    return joined(machine.feed(text) + machine.end())


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


class Prose:
    """Told of all text and of every call, in order."""

    def __init__(self) -> None:
        self._spaces = ""
        """At the end of the text so far: dropped if a call follows."""
        self._behind = False
        """A call was last: white space is dropped."""

    def say(self, out: list[Piece], text: str) -> None:
        """More text."""
        if self._behind:
            text = text.lstrip(SPACE)
            self._behind = not text
        text = self._spaces + text
        said = text.rstrip(SPACE)
        self._spaces = text[len(said):]
        if said:
            out.append(Text(said))

    def say_before(self, out: list[Piece], text: str, marks: Sequence[str]) -> str:
        """As much of the text as cannot be the beginning of a mark; the rest."""
        size = len(text) - held(text, marks)
        self.say(out, text[:size])
        return text[size:]

    def called(self) -> None:
        """A call begins here."""
        self._spaces = ""

    def call_over(self) -> None:
        """It ended."""
        self._behind = True

    def end(self, out: list[Piece]) -> None:
        """No more comes."""
        if self._spaces:
            out.append(Text(self._spaces))
        self._spaces = ""


def after_call(text: str, close: str) -> str | None:
    """The text behind a call, less white space and the closing mark; None = that cannot be told
    yet."""
    text = text.lstrip(SPACE)
    if len(text) < len(close) and close.startswith(text):
        return None
    return text.removeprefix(close)
