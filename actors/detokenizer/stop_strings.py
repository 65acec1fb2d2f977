"""Stop strings in a stream of text pieces, found the same however the text is cut. Pure."""

from __future__ import annotations

from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string was completed: `text` is what may still be shown."""

    text: str
    stop: str


class StopStringChecker:
    """Holds back the longest suffix that could begin a stop string.

    The match that would be seen first if the text came character by character wins; of two that
    end together, the longer.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = stops
        self._heads = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""

    def feed(self, piece: str, armed: bool = True) -> str | StopMatch:
        """Text that may be shown after `piece`, or the match that it completed.

        Not `armed` (min_tokens not reached): a stop string completed by this piece is plain text.
        """
        if not self._held and self._heads.isdisjoint(piece):
            return piece
        text = self._held + piece
        if armed and piece:
            found = self._first(text, len(self._held))
            if found is not None:
                end, stop = found
                return StopMatch(text[:end] if self._include else text[:end - len(stop)], stop)
        keep = self._suffix(text)
        self._held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def flush(self) -> str:
        """What is held back: the text ends here."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, old: int) -> tuple[int, str] | None:
        """(end, stop) of the first match that ends beyond `old` characters."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, old - len(stop) + 1))
            if at < 0:
                continue
            end = at + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
        return best

    def _suffix(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < len(text) - longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest
