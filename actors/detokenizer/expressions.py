"""Stop expressions in a stream of text pieces, found the same however the text is cut. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from actorium.actors.detokenizer.stops import Match
from actorium.actors.expressions import LINE, MIDDLE, TEXT, Automaton, States, compiled

LONGEST = 1024
"""Characters of a match that is found for sure."""
MOST_HELD = LONGEST + LONGEST // 2
"""Where a match has begun so long ago, it is not waited for any more."""
MOST_KNOWN = 4096
"""Threads of all steps of an automaton that are remembered."""
Threads = tuple[States, ...]
"""Where matches may be under way: states, by where they have begun, the earliest first. A state
stands with the earliest only."""


class Move(NamedTuple):
    """What a character makes of threads."""

    threads: Threads
    kept: tuple[int, ...]
    """Which of the threads before they were, the one that begins here being the last of those."""
    ended: tuple[tuple[int, int], ...]
    """(thread, number of the expression) that match with this character."""


class Tracks:
    """The threads of an automaton: what was found out once is remembered for all streams."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._known: dict[tuple[Threads, int, str], Move] = {}
        self._size = 0

    def move(self, threads: Threads, place: int, char: str) -> Move:
        """On by `char`, which stands at a `place` (MIDDLE, LINE, TEXT) where a match may begin."""
        key = threads, place, char
        found = self._known.get(key)
        if found is None:
            if self._size >= MOST_KNOWN:
                self._known.clear()
                self._size = 0
            self._size += 1 + len(threads)
            found = self._known[key] = self._move(*key)
        return found

    def _move(self, threads: Threads, place: int, char: str) -> Move:
        automaton = self._automaton
        steps, after = automaton.steps, LINE if char == "\n" else MIDDLE
        seen: set[int] = set()
        made: list[States] = []
        kept: list[int] = []
        ended: list[tuple[int, int]] = []
        for number, states in enumerate((*threads, automaton.closure(automaton.starts, place))):
            reached = [step.next for state in sorted(states)
                       if (step := steps[state]) is not None and step.test(char)]
            fresh = automaton.closure(reached, after) - seen
            seen |= fresh
            ended += [(number, automaton.accepts[state]) for state in sorted(fresh)
                      if state in automaton.accepts]
            alive = frozenset(state for state in fresh if steps[state] is not None)
            if alive:
                made.append(alive)
                kept.append(number)
        return Move(tuple(made), tuple(kept), tuple(ended))


class ExpressionFinder:
    """Holds back the text from where a match may have begun.

    The match that is seen first if the text comes character by character wins; of those that end
    together the longest, then the one named first. `feed` and `flush` as of `StopFinder`.
    """

    def __init__(self, stops: tuple[str, ...], expressions: tuple[str, ...],
                 include: bool) -> None:
        """stops: strings that end the text as well."""
        self._named = stops + expressions
        self._include = include
        self._tracks = _tracks(stops, expressions)
        self._threads: Threads = ()
        self._begun: list[int] = []
        """Where each thread has begun: characters from the start of `_held` on."""
        self._held = ""
        self._place = TEXT
        """Of the next character."""

    def feed(self, piece: str, armed: bool = True) -> str | Match:
        """Text that may be shown after `piece`, or the match that it completed; not `armed`: what
        it completes is plain text."""
        shown, text, at = "", self._held + piece, len(self._held)
        while at < len(text):
            if self._begun and at - self._begun[0] >= MOST_HELD:
                self._forget(text[:at])
            ended = self._step(text[at], at)
            at += 1
            if ended and armed:
                begun, number = min(ended)
                return Match(shown + text[:at if self._include else begun], self._named[number])
        keep = self._begun[0] if self._begun else len(text)
        shown += text[:keep]
        self._held = text[keep:]
        self._begun = [begun - keep for begun in self._begun]
        return shown

    def _step(self, char: str, at: int) -> list[tuple[int, int]]:
        """(beginning, number) of the expressions that match with `char`, which stands at `at`."""
        move = self._tracks.move(self._threads, self._place, char)
        begun = [*self._begun, at]
        self._threads, self._begun = move.threads, [begun[number] for number in move.kept]
        self._place = LINE if char == "\n" else MIDDLE
        return [(begun[thread], number) for thread, number in move.ended]

    def _forget(self, text: str) -> None:
        """Look at the last `LONGEST` characters of `text` as if nothing had begun before them."""
        first = max(len(text) - LONGEST, 1)
        self._threads, self._begun = (), []
        self._place = LINE if text[first - 1] == "\n" else MIDDLE
        for at in range(first, len(text)):
            self._step(text[at], at)

    def flush(self) -> str:
        """What is held back: the text ends here."""
        held, self._held, self._threads, self._begun = self._held, "", (), []
        return held


@lru_cache(maxsize=64)
def _tracks(stops: tuple[str, ...], expressions: tuple[str, ...]) -> Tracks:
    return Tracks(compiled(expressions, stops))
