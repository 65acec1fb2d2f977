"""Stop strings and stop expressions in a stream of text pieces, found the same however the text is
cut. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from actorium.actors.detokenizer.linear_regex import (
    LINE,
    MIDDLE,
    TEXT,
    Automaton,
    States,
    compiled,
    members,
)

LONGEST = 1024
"""Characters of a match that is found for sure."""
TURN = LONGEST // 2
"""At each multiple of so many characters, what has begun more than `LONGEST` before is given up."""
MOST_HELD = LONGEST + TURN
MOST_KNOWN = 4096
"""Threads of all steps of an automaton that are remembered."""
MOST_REACHED = 1 << 14
"""The same, of threads by themselves."""
Threads = tuple[States, ...]
"""Where matches may be under way: states, by where they have begun, the earliest first. A state
stands with the earliest only."""


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
        """Returns the text that may be shown after `piece`, or the match that it completed.

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
        """Returns what is held back: the text ends here."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, old: int) -> tuple[int, str] | None:
        """Returns (end, stop) of the first match that ends beyond `old` characters."""
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
        """Returns the length of the longest suffix of `text` that is a proper prefix of a stop
        string."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < len(text) - longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest


# --- expressions ----------------------------------------------------------------------------------

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
        self._after: dict[tuple[States, int], States] = {}
        self._begin = [automaton.closure(automaton.starts, place) for place in (MIDDLE, LINE, TEXT)]

    def move(self, threads: Threads, place: int, char: str) -> Move:
        """Returns the move by `char`, which stands at a `place` (MIDDLE, LINE, TEXT) where a match
        may begin."""
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
        automaton, known = self._automaton, self._after
        reads, reading, accepting = automaton.reads(char), automaton.reading, automaton.accepting
        after = LINE if char == "\n" else MIDDLE
        new = -1
        """All that no earlier thread has come to."""
        alive: list[States] = []
        kept: list[int] = []
        ended: list[tuple[int, int]] = []
        for number, states in enumerate((*threads, self._begin[place])):
            states &= reads
            if not states:
                continue
            reached = known.get((states, after))
            if reached is None:
                reached = self._reach(states, after)
            reached &= new
            new &= ~reached
            if over := reached & accepting:
                ended += [(number, automaton.accepts[state]) for state in members(over)]
            if going := reached & reading:
                alive.append(going)
                kept.append(number)
        return Move(tuple(alive), tuple(kept), tuple(ended))

    def _reach(self, states: States, place: int) -> States:
        if len(self._after) >= MOST_REACHED:
            self._after.clear()
        found = self._after[states, place] = self._automaton.after(states, place)
        return found


class ThreadRun:
    """The threads of one stream, and where each has begun, in characters of the text."""

    __slots__ = ("begun", "born", "threads")

    def __init__(self, born: int = 0) -> None:
        """born: the first character that it sees."""
        self.threads: Threads = ()
        self.begun: list[int] = []
        self.born = born

    def step(self, tracks: Tracks, place: int, char: str, at: int) -> list[tuple[int, int]]:
        """Returns (beginning, number) of the expressions that match with `char`, the `at`-th."""
        move = tracks.move(self.threads, place, char)
        begun = self.begun
        begun.append(at)
        ended = [(begun[thread], number) for thread, number in move.ended]
        self.threads, self.begun = move.threads, [begun[number] for number in move.kept]
        return ended


class StopRegexChecker:
    """Holds back the text from where a match may have begun.

    The match that is seen first if the text comes character by character wins; of those that end
    together the longest, then the one named first. `feed` and `flush`: see `StopStringChecker`.

    What may have begun long ago is given up for what has begun since. A run of threads knows the
    earliest beginning only, so younger runs are kept ready beside one that has become old: a
    character takes three steps at the most, whenever it comes.
    """

    def __init__(self, stops: tuple[str, ...], expressions: tuple[str, ...],
                 include: bool) -> None:
        """stops: strings that end the text as well."""
        self._named = stops + expressions
        self._include = include
        self._tracks = _tracks(stops, expressions)
        self._run = ThreadRun()
        self._younger: list[ThreadRun] = []
        """The oldest first; none that would know the same as `_run`."""
        self._held = ""
        self._at = 0
        """Of the next character, from the start of the text."""
        self._place = TEXT
        """The same: what stands before it."""

    def feed(self, piece: str, armed: bool = True) -> str | StopMatch:
        """Returns the text that may be shown after `piece`, or the match that it completed; not
        `armed`: what it completes is plain text."""
        text, first = self._held + piece, self._at - len(self._held)
        for char in piece:
            if not self._at % TURN and (self._run.begun or self._younger):
                self._turn(self._at)
            ended = self._run.step(self._tracks, self._place, char, self._at)
            for run in self._younger:
                run.step(self._tracks, self._place, char, self._at)
            self._place = LINE if char == "\n" else MIDDLE
            self._at += 1
            if ended and armed:
                begun, number = min(ended)
                return StopMatch(text[:(self._at if self._include else begun) - first],
                                 self._named[number])
        keep = (self._run.begun[0] if self._run.begun else self._at) - first
        self._held = text[keep:]
        return text[:keep]

    def _turn(self, at: int) -> None:
        """Gives up what has begun more than `LONGEST` before, and keeps another one ready."""
        for run in self._younger:
            if self._run.begun and self._run.begun[0] < run.born <= at - LONGEST:
                self._run = run
        begun = self._run.begun
        self._younger = [run for run in self._younger if begun and begun[0] < run.born]
        if begun:
            self._younger.append(ThreadRun(at))

    def flush(self) -> str:
        """Returns what is held back: the text ends here."""
        held, self._held = self._held, ""
        self._run, self._younger = ThreadRun(), []
        return held


@lru_cache(maxsize=64)
def _tracks(stops: tuple[str, ...], expressions: tuple[str, ...]) -> Tracks:
    return Tracks(compiled(expressions, stops))
