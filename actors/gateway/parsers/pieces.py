"""What a message is made of, and the contract of the machines that find it."""

from __future__ import annotations

from collections.abc import Iterable
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
