"""Parsing a text however it is cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from actorium.actors.gateway.parsers.parser_factory import call_parser
from actorium.actors.gateway.parsers.parts import (
    MessagePart,
    OutputParser,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    merge_parts,
)


def hermes() -> OutputParser:
    return call_parser("hermes", {})


def call(index: int, name: str, arguments: str) -> list[MessagePart]:
    return [ToolCallBegin(index, name), ToolCallArguments(index, arguments)]


def cut_at(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def in_parts(machine: OutputParser, parts: Sequence[str], cut: bool = False) -> list[MessagePart]:
    pieces: list[MessagePart] = []
    for part in parts:
        pieces += machine.feed(part)
    return merge_parts(pieces + machine.end(cut))


def cuttings(text: str) -> Iterator[list[str]]:
    """Whole, by letters, at every place, and at several."""
    yield [text]
    yield list(text)
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]
    draw = random.Random(len(text))
    for _ in range(30):
        yield cut_at(text, [draw.randrange(1 << 16) for _ in range(draw.randrange(8))])


def check(make: Callable[[], OutputParser], text: str, want: list[MessagePart],
          cut: bool = False) -> None:
    """Every cutting gives what is wanted. cut: the model did not end the text."""
    for parts in cuttings(text):
        assert in_parts(make(), parts, cut) == want


class Told:
    """What a client makes of the parts."""

    def __init__(self, parts: Sequence[MessagePart]) -> None:
        self.text = self.reasoning = ""
        self.calls: list[tuple[str, str]] = []
        for part in parts:
            match part:
                case TextPart(text):
                    self.text += text
                case ReasoningPart(text):
                    self.reasoning += text
                case ToolCallBegin(_, name):
                    self.calls.append((name, ""))
                case ToolCallArguments(_, text):
                    name, before = self.calls[-1]
                    self.calls[-1] = (name, before + text)
