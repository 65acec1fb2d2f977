"""An answer's text as the parts of a chat message: whole, or a delta at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actorium.actors.gateway.parsers.parts import (
    CallArguments,
    CallBegin,
    Machine,
    Piece,
    Reasoning,
    joined,
)

STOP, TOOL_CALLS = "stop", "tool_calls"


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
