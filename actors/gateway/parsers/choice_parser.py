"""An answer's text as the parts of a chat message: whole, or a delta at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from actorium.actors.gateway.faces.chat_protocol import Message, Said
from actorium.actors.gateway.faces.tool_choice import Called, CalledFunction
from actorium.actors.gateway.parsers.parts import (
    CallArguments,
    CallBegin,
    Machine,
    Piece,
    Reasoning,
    Text,
    joined,
)

STOP, TOOL_CALLS, FUNCTION_CALL = "stop", "tool_calls", "function_call"


class ThoughtTokens:
    """Counts the tokens of a choice that are reasoning: those before the mark that ends it. Where
    the mark is no token sequence of its own, they are told by their share of the characters."""

    def __init__(self, mark: Sequence[int]) -> None:
        """mark: token ids of what ends the reasoning; none = the model does not reason."""
        self._mark = list(mark)
        self._ids: list[int] = []
        self._end: int | None = None
        self._tokens = self._chars = self._thought = 0
        self._answered = False

    def add(self, pieces: Iterable[Piece], text: str, ids: Sequence[int]) -> None:
        """What a text came to, and its tokens."""
        if not self._mark:
            return
        self._tokens += len(ids)
        self._chars += len(text)
        for piece in pieces:
            if isinstance(piece, Reasoning):
                self._thought += len(piece.text)
            else:
                self._answered = True
        if self._end is None:
            self._seek(ids)

    def _seek(self, ids: Sequence[int]) -> None:
        size = len(self._mark)
        start = max(0, len(self._ids) - size + 1)
        self._ids += ids
        self._end = next((i for i in range(start, len(self._ids) - size + 1)
                          if self._ids[i:i + size] == self._mark), None)

    @property
    def count(self) -> int:
        if not self._thought:
            return 0
        if self._end is not None:
            return self._end
        share = self._thought / max(1, self._chars) if self._answered else 1.0
        return round(self._tokens * share)


class Reader:
    """Reads one choice. `reasons` off: what is reasoning is left out; `most_calls`: later ones
    are left out; `mark`: as of `ThoughtTokens`."""

    def __init__(self, machine: Machine, reasons: bool, most_calls: int,
                 mark: Sequence[int] = ()) -> None:
        self._machine, self._reasons, self._most = machine, reasons, most_calls
        self.calls = 0
        self._thoughts = ThoughtTokens(mark)

    @property
    def reasoning_tokens(self) -> int:
        """Of the tokens so far."""
        return self._thoughts.count

    def read(self, text: str, last: bool, ids: Sequence[int] = ()) -> list[Piece]:
        """What is certain now, neighbours of a kind together. ids: the text's tokens, where those
        of reasoning are to be counted."""
        pieces = self._machine.feed(text)
        if last:
            pieces += self._machine.end()
        self._thoughts.add(pieces, text, ids)
        return [piece for piece in joined(pieces) if self._wanted(piece)]

    def _wanted(self, piece: Piece) -> bool:
        if isinstance(piece, Reasoning):
            return self._reasons
        if isinstance(piece, CallBegin):
            self.calls = min(self._most, piece.call + 1)
        return not isinstance(piece, CallBegin | CallArguments) or piece.call < self._most

    def reason(self, name: str | None) -> str | None:
        """The finish reason: calls are one of their own."""
        return TOOL_CALLS if name == STOP and self.calls else name


def fresh_call_id() -> str:
    return f"call_{os.urandom(12).hex()}"


def delta(piece: Piece) -> Said:
    """A piece as a stream tells it."""
    match piece:
        case Text(text):
            return Said(content=text)
        case Reasoning(text):
            return Said(reasoning_content=text)
        case CallBegin(call, name):
            return Said(tool_calls=[Called(index=call, id=fresh_call_id(), type="function",
                                           function=CalledFunction(name))])
        case CallArguments(call, text):
            return Said(tool_calls=[Called(index=call, function=CalledFunction(arguments=text))])


def message(pieces: Iterable[Piece]) -> Message:
    """A whole message."""
    content, reasoning = "", ""
    calls: list[Called] = []
    for piece in pieces:
        match piece:
            case Text(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegin(_, name):
                calls.append(Called(id=fresh_call_id(), type="function",
                                    function=CalledFunction(name)))
            case CallArguments(_, text):
                calls[-1].function.arguments += text
    return Message(content=content if content or not calls else None,
                   reasoning_content=reasoning or None, tool_calls=calls or None)


def legacy_delta(piece: Piece) -> Said:
    """A piece as a stream tells it to who asked with `functions`."""
    match piece:
        case CallBegin(_, name):
            return Said(function_call=CalledFunction(name))
        case CallArguments(_, text):
            return Said(function_call=CalledFunction(arguments=text))
        case _:
            return delta(piece)


def legacy_message(whole: Message) -> Message:
    """The same message with its call as `function_call`."""
    calls, whole.tool_calls = whole.tool_calls, None
    if calls:
        whole.function_call = calls[0].function
    return whole
