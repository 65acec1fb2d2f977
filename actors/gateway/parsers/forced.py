"""Calls that the request has forced: the completion is JSON of a known form (structured output)."""

from __future__ import annotations

from actorium.actors.gateway.parsers.call_json import JsonCall
from actorium.actors.gateway.parsers.pieces import CallArguments, CallBegin, Piece, Text
from actorium.actors.gateway.parsers.scan import SPACE


class NamedCall:
    """The completion is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        begin: list[Piece] = [] if self._begun else [CallBegin(0, self._name)]
        self._begun = True
        return [*begin, CallArguments(0, text)]

    def end(self) -> list[Piece]:
        return []


class CallList:
    """The completion is `[{"name": ..., "arguments": ...}, ...]`."""

    def __init__(self) -> None:
        self._text = ""
        self._call: JsonCall | None = None
        self._calls = 0

    def feed(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        self._text += text
        while self._text and self._step(out):
            pass
        return out

    def end(self) -> list[Piece]:
        left = self._call.raw if self._call is not None else self._text.strip(SPACE)
        return [Text(left)] if left else []

    def _step(self, out: list[Piece]) -> bool:
        if self._call is None:
            self._text = self._text.lstrip(SPACE + "[,]")
            if not self._text:
                return False
            self._call = JsonCall(self._calls)
        pieces, rest = self._call.feed(self._text)
        out += pieces
        self._text = rest
        if self._call.over and not self._call.failed:
            self._call = None
            self._calls += 1
            return True
        return False
