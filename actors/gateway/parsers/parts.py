"""The parts of a message, the interface of the parsers that find them, and what these share: marks
in a text that is still arriving, and the white space around calls.

Each format is a small state machine (`OutputParser`): text in, parts of the message out, no IO.
However a text is cut, the joined parts are the same; what turns out not to be a call is text, and
nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
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
    id: str = ""
    """The id that the model wrote; empty where its form has none."""


class ToolCallArguments(NamedTuple):
    """A part of a call's arguments, of JSON text."""

    call: int
    text: str


MessagePart: TypeAlias = TextPart | ReasoningPart | ToolCallBegin | ToolCallArguments


class OutputParser(Protocol):
    """Parses a message's text as it arrives."""

    def feed(self, text: str) -> list[MessagePart]:
        """Returns the parts that are certain now."""

    def end(self, cut: bool = False) -> list[MessagePart]:
        """Returns the remaining parts at the end of the text. cut: the model did not end it."""


class PlainParser:
    """Parses a message that is text alone."""

    def feed(self, text: str) -> list[MessagePart]:
        return [TextPart(text)] if text else []

    def end(self, cut: bool = False) -> list[MessagePart]:
        return []


class StateParser:
    """Parser with a state for each part of its format: a method that takes from the text what has
    arrived, adds parts, and returns whether there may be more to do."""

    def __init__(self, state: Callable[[list[MessagePart]], bool]) -> None:
        """state: the first."""
        self._text = ""
        """That no state has taken yet."""
        self._blank: list[str] = []
        """White space that has come since."""
        self._state = state

    def feed(self, text: str) -> list[MessagePart]:
        # States wait for what follows white space: each piece of it alone would be looked at again
        # with all before it, and the time would grow with its square.
        self._blank.append(text)
        return [] if text.isspace() else self._step()

    def _step(self) -> list[MessagePart]:
        out: list[MessagePart] = []
        self._text += "".join(self._blank)
        self._blank.clear()
        while self._text and self._state(out):
            pass
        return out

    def end(self, cut: bool = False) -> list[MessagePart]:
        out = self._step() if self._blank else []
        self._finish(out, cut)
        self._text = ""
        return out

    def _finish(self, out: list[MessagePart], cut: bool) -> None:
        """Adds the remaining parts at the end of the text."""
        raise NotImplementedError


class ChainedParser:
    """Parses reasoning first; passes the rest to the second parser."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[MessagePart]:
        return self._pass_on(self._first.feed(text))

    def end(self, cut: bool = False) -> list[MessagePart]:
        return self._pass_on(self._first.end(cut)) + self._second.end(cut)

    def _pass_on(self, parts: Iterable[MessagePart]) -> list[MessagePart]:
        out: list[MessagePart] = []
        for part in parts:
            out += self._second.feed(part.text) if isinstance(part, TextPart) else [part]
        return out


class CallsAloneParser:
    """Parses a completion that is calls: the beginning of one that was cut is no text."""

    def __init__(self, calls: OutputParser) -> None:
        self._calls = calls

    def feed(self, text: str) -> list[MessagePart]:
        return [part for part in self._calls.feed(text) if not isinstance(part, TextPart)]

    def end(self, cut: bool = False) -> list[MessagePart]:
        return [part for part in self._calls.end(cut) if not isinstance(part, TextPart)]


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


def parse_all(machine: OutputParser, text: str, cut: bool = False) -> list[MessagePart]:
    """Parses a whole message at once."""
    return merge_parts(machine.feed(text) + machine.end(cut))


SPACE = " \t\r\n"
_BLANKS = re.compile(f"[{SPACE}]*")
MAX_CLOSERS = 64
"""Closing marks behind one call; more of them are text."""


def partial_mark(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of `text` may be the beginning of one of the marks."""
    firsts = {mark[0] for mark in marks}
    for at in range(max(0, len(text) - max(map(len, marks)) + 1), len(text)):
        if text[at] in firsts and any(mark.startswith(text[at:]) for mark in marks):
            return len(text) - at
    return 0


class MarkAt(NamedTuple):
    """A mark and its place in a text."""

    at: int
    mark: str


def first_of(text: str, marks: Sequence[str]) -> MarkAt | None:
    """Returns the first of the marks in a text, or None."""
    places = [MarkAt(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(places, default=None)


class TextAroundCalls:
    """Drops white space around calls; must get all text and every call, in order. Where there is
    text before and behind, the white space between them stays: what stood before the call, or else
    behind it, or else a space, since a client may put the texts together."""

    def __init__(self) -> None:
        self._spaces = ""
        """At the end of the text so far: dropped if a call follows."""
        self._gap = self._behind = ""
        """White space before the calls since the last text, and behind the last of them."""
        self._has_text = self._after_call = False
        """Text was added; a call came since."""

    def add(self, out: list[MessagePart], text: str) -> None:
        """Adds text."""
        if self._after_call:
            words = text.lstrip(SPACE)
            self._behind += text[:len(text) - len(words)]
            if not words:
                return
            self._spaces = (self._gap or self._behind or " ") if self._has_text else ""
            self._gap = self._behind = ""
            self._after_call, text = False, words
        text = self._spaces + text
        words = text.rstrip(SPACE)
        self._spaces = text[len(words):]
        if words:
            self._has_text = True
            out.append(TextPart(words))

    def add_before(self, out: list[MessagePart], text: str, marks: Sequence[str]) -> str:
        """Adds as much of the text as cannot be the beginning of a mark; returns the rest."""
        size = len(text) - partial_mark(text, marks)
        self.add(out, text[:size])
        return text[size:]

    def call_begins(self) -> None:
        """Marks the beginning of a call."""
        self._gap = self._gap or self._spaces or self._behind
        self._spaces = self._behind = ""

    def call_ended(self) -> None:
        """Marks the end of a call."""
        self._after_call = True

    def end(self, out: list[MessagePart]) -> None:
        """Ends the text."""
        if self._spaces:
            out.append(TextPart(self._spaces))
        self._spaces = ""


def after_call(text: str, closers: Sequence[str]) -> str | None:
    """Returns the text after a call without the closing marks, of which models write too few and
    too many; None = not certain yet."""
    at = 0
    for _ in range(MAX_CLOSERS):  # all of them are looked at again with each piece of text
        start = _BLANKS.match(text, at).end()  # type: ignore[union-attr]
        if any(len(text) - start < len(mark) and mark.startswith(text[start:])
               for mark in closers):
            return None
        found = next((mark for mark in closers if text.startswith(mark, start)), None)
        if found is None:
            break
        at = start + len(found)
    return text[at:]
