"""The parts of a message, the interface of the parsers that find them, and what these share: marks
in a text that is still arriving, and the white space around calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias


class TextPart(NamedTuple):
    """A part of the answer."""

    text: str


class ReasoningPart(NamedTuple):
    """A part of the reasoning."""

    text: str


class ToolCallBegin(NamedTuple):
    """The beginning of a tool call; its arguments follow."""

    call: int
    """0, 1, ... in the message."""
    name: str


class ToolCallArguments(NamedTuple):
    """A part of a call's arguments, of JSON text."""

    call: int
    text: str


MessagePart: TypeAlias = TextPart | ReasoningPart | ToolCallBegin | ToolCallArguments


class OutputParser(Protocol):
    """Parses a message's text as it arrives."""

    def feed(self, text: str) -> list[MessagePart]:
        """Returns the parts that are certain now."""

    def end(self) -> list[MessagePart]:
        """Returns the remaining parts at the end of the text."""


class PlainParser:
    """Parses a message that is text alone."""

    def feed(self, text: str) -> list[MessagePart]:
        return [TextPart(text)] if text else []

    def end(self) -> list[MessagePart]:
        return []


class ChainedParser:
    """Parses reasoning first; passes the rest to the second parser."""

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
    """Merges adjacent parts of one kind: the result does not depend on how the text was cut."""
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
    """Parses a whole message at once."""
    return merge_parts(machine.feed(text) + machine.end())


SPACE = " \t\r\n"


def partial_mark(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of `text` may be the beginning of one of the marks."""
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
    """Returns the first of the marks in a text, or None."""
    places = [FoundMark(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(places, default=None)


class TextAroundCalls:
    """Drops white space around calls; must get all text and every call, in order."""

    def __init__(self) -> None:
        self._spaces = ""
        """At the end of the text so far: dropped if a call follows."""
        self._after_call = False
        """A call was last: white space is dropped."""

    def add(self, out: list[MessagePart], text: str) -> None:
        """Adds text."""
        if self._after_call:
            text = text.lstrip(SPACE)
            self._after_call = not text
        text = self._spaces + text
        words = text.rstrip(SPACE)
        self._spaces = text[len(words):]
        if words:
            out.append(TextPart(words))

    def add_before(self, out: list[MessagePart], text: str, marks: Sequence[str]) -> str:
        """Adds as much of the text as cannot be the beginning of a mark; returns the rest."""
        size = len(text) - partial_mark(text, marks)
        self.add(out, text[:size])
        return text[size:]

    def call_begins(self) -> None:
        """Marks the beginning of a call."""
        self._spaces = ""

    def call_ended(self) -> None:
        """Marks the end of a call."""
        self._after_call = True

    def end(self, out: list[MessagePart]) -> None:
        """Ends the text."""
        if self._spaces:
            out.append(TextPart(self._spaces))
        self._spaces = ""


def after_call(text: str, close: str) -> str | None:
    """Returns the text after a call, without white space and the closing mark; None = not certain
    yet."""
    text = text.lstrip(SPACE)
    if len(text) < len(close) and close.startswith(text):
        return None
    return text.removeprefix(close)
