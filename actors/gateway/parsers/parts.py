"""The parts of a message, the interface of the parsers that find them, and what these share: marks
and JSON values in a text that is still coming, and the white space around calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias


class TextPart(NamedTuple):
    """More of the answer."""

    text: str


class ReasoningPart(NamedTuple):
    """More of the thoughts before it."""

    text: str


class ToolCallBegin(NamedTuple):
    """A call of a tool; its arguments follow."""

    call: int
    """0, 1, ... in the message."""
    name: str


class ToolCallArguments(NamedTuple):
    """More of a call's arguments: a part of JSON text."""

    call: int
    text: str


MessagePart: TypeAlias = TextPart | ReasoningPart | ToolCallBegin | ToolCallArguments


class OutputParser(Protocol):
    """Takes a message's text as it comes."""

    def feed(self, text: str) -> list[MessagePart]:
        """What is certain now."""

    def end(self) -> list[MessagePart]:
        """What is left, when no more comes."""


class PlainParser:
    """A message that is text alone."""

    def feed(self, text: str) -> list[MessagePart]:
        return [TextPart(text)] if text else []

    def end(self) -> list[MessagePart]:
        return []


class ChainedParser:
    """Reasoning first; what is no reasoning goes on to the second machine."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[MessagePart]:
        return self._pass_on(self._first.feed(text))

    def end(self) -> list[MessagePart]:
        return self._pass_on(self._first.end()) + self._second.end()

    def _pass_on(self, parts: Iterable[MessagePart]) -> list[MessagePart]:
        out: list[MessagePart] = []
        for part in parts:
            out += self._second.feed(part.text) if isinstance(part, TextPart) else [part]
        return out


def merge_parts(parts: Iterable[MessagePart]) -> list[MessagePart]:
    """The same with neighbours of one kind as one: what two cuttings of a text have in common."""
    out: list[MessagePart] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            out[-1] = TextPart(last.text + part.text)
        elif isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            out[-1] = ReasoningPart(last.text + part.text)
        elif (isinstance(part, ToolCallArguments) and isinstance(last, ToolCallArguments)
              and part.call == last.call):
            out[-1] = ToolCallArguments(last.call, last.text + part.text)
        else:
            out.append(part)
    return out


def parse_all(machine: OutputParser, text: str) -> list[MessagePart]:
    """A whole message at once."""
    return merge_parts(machine.feed(text) + machine.end())


SPACE = " \t\r\n"


def partial_mark(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of the marks."""
    longest = max(map(len, marks))
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


class FoundMark(NamedTuple):
    """The first of some marks in a text."""

    at: int
    mark: str


def first_of(text: str, marks: Sequence[str]) -> FoundMark | None:
    """None if none of them is there."""
    places = [FoundMark(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(places, default=None)


class JsonValueScanner:
    """One JSON value, taken from a text as it comes: where does it end?

    Strings and brackets are followed, nothing else is checked. A value without either (a number, a
    word) ends before a comma, a closing bracket or a space.
    """

    def __init__(self) -> None:
        self.over = False
        self._depth = 0
        self._string = self._escaped = self._begun = False

    def feed(self, text: str) -> int:
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


class TextAroundCalls:
    """Told of all text and of every call, in order."""

    def __init__(self) -> None:
        self._spaces = ""
        """At the end of the text so far: dropped if a call follows."""
        self._after_call = False
        """A call was last: white space is dropped."""

    def add(self, out: list[MessagePart], text: str) -> None:
        """More text."""
        if self._after_call:
            text = text.lstrip(SPACE)
            self._after_call = not text
        text = self._spaces + text
        words = text.rstrip(SPACE)
        self._spaces = text[len(words):]
        if words:
            out.append(TextPart(words))

    def add_before(self, out: list[MessagePart], text: str, marks: Sequence[str]) -> str:
        """As much of the text as cannot be the beginning of a mark; the rest."""
        size = len(text) - partial_mark(text, marks)
        self.add(out, text[:size])
        return text[size:]

    def call_begins(self) -> None:
        """A call begins here."""
        self._spaces = ""

    def call_ended(self) -> None:
        """It ended."""
        self._after_call = True

    def end(self, out: list[MessagePart]) -> None:
        """No more comes."""
        if self._spaces:
            out.append(TextPart(self._spaces))
        self._spaces = ""


def after_call(text: str, close: str) -> str | None:
    """The text behind a call, less white space and the closing mark; None = that is not certain
    yet."""
    text = text.lstrip(SPACE)
    if len(text) < len(close) and close.startswith(text):
        return None
    return text.removeprefix(close)
