"""Where a completion is in a thought, token by token, and what its budget has it write next. Pure.

The marks of thoughts are found in the tokens' text: many models write them in several tokens, whose
ends may be merged with what stands beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actorium.actors.config.reasoning_formats import ReasoningFormat

BEFORE, INSIDE, AFTER = range(3)
"""Phases: the model may begin a thought, is in one, or has left it."""
SPACE = b" \t\r\n"


class ThoughtMarks(NamedTuple):
    """The marks of a format, as bytes."""

    begin: tuple[bytes, ...]
    end: tuple[bytes, ...]
    repeats: bool
    """There may be several thoughts, which begin anywhere."""

    @classmethod
    def of(cls, row: ReasoningFormat) -> ThoughtMarks:
        return cls(tuple(mark.encode() for mark in row.begin),
                   tuple(mark.encode() for mark in row.ends), row.repeats)


class ThoughtState(NamedTuple):
    """The state of a completion's text."""

    phase: int = BEFORE
    held: bytes = b""
    """The end of the text, as far as a mark may have begun in it."""
    tokens: int = 0
    """Tokens of thoughts so far."""

    def after(self, text: bytes, marks: ThoughtMarks) -> tuple[ThoughtState, bytes]:
        """Returns the state behind another token with this text, and what of the text is neither
        thought nor mark."""
        state = self._replace(tokens=self.tokens + (self.phase == INSIDE))
        while text or state.phase == AFTER:
            if state.phase == AFTER:
                return state, text
            if state.phase == BEFORE and not marks.repeats:
                state, text = state._at_beginning(text, marks.begin)
                continue
            looked_for = marks.end if state.phase == INSIDE else marks.begin
            whole = state.held + text
            at, mark = _first(whole, looked_for)
            if at < 0:
                longest = max(map(len, looked_for))
                return state._replace(held=whole[max(0, len(whole) - longest + 1):]), b""
            inside = state.phase == BEFORE
            phase = INSIDE if inside else BEFORE if marks.repeats else AFTER
            state, text = state._replace(phase=phase, held=b""), whole[at + len(mark):]
        return state, b""

    def _at_beginning(self, text: bytes, begin: Sequence[bytes]) -> tuple[ThoughtState, bytes]:
        """Returns the state behind the first text, in which a thought begins or does not."""
        whole = self.held + text
        words = whole.lstrip(SPACE)
        if any(mark.startswith(words) and mark != words for mark in begin):
            return self._replace(held=whole), b""
        mark = max((mark for mark in begin if words.startswith(mark)), key=len, default=b"")
        if mark:
            return self._replace(phase=INSIDE, held=b""), words[len(mark):]
        return self._replace(phase=AFTER, held=b""), whole

    def unwritten(self, mark: bytes) -> bytes:
        """Returns what of a mark the text has not begun to write."""
        written = next(size for size in range(min(len(mark) - 1, len(self.held)), -1, -1)
                       if self.held.endswith(mark[:size]))
        return mark[written:]


def _first(text: bytes, marks: Sequence[bytes]) -> tuple[int, bytes]:
    """Returns the first of the marks in a text, and its place; -1 if there is none."""
    places = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(places, default=(-1, b""))


class BudgetState(NamedTuple):
    """The state of a completion whose thought has a budget."""

    thought: ThoughtState
    part: int = 0
    """Of the closing texts, the one that is due; 0 = none, or the first where the thought has all
    its tokens."""
    written: bytes = b""
    """What of that text has been written."""


class ThoughtBudget:
    """A limit on the tokens of a completion's thoughts: behind the last one the texts that end a
    thought are written, then the model goes on freely."""

    def __init__(self, row: ReasoningFormat, budget: int, opened: bool) -> None:
        """row: the format; budget: tokens between the marks; opened: the prompt has begun a
        thought."""
        self.start = BudgetState(ThoughtState(INSIDE if opened else BEFORE))
        self._marks, self._budget = ThoughtMarks.of(row), budget
        self._closing = tuple(text.encode() for text in row.closing)
        self._barred = row.barred.encode()

    def after(self, state: BudgetState, text: bytes) -> BudgetState:
        """Returns the state behind another token with this text."""
        forced = self._is_full(state.thought)
        thought, _ = state.thought.after(text, self._marks)
        part, written = 0, b""
        if forced and thought.phase != INSIDE:
            part = 1
        elif 0 < state.part < len(self._closing):
            written = state.written + text
            part = state.part if self._closing[state.part].startswith(written) else 0
            if part and written == self._closing[part]:
                part, written = part + 1, b""
        if part == len(self._closing) and not self._barred:
            part = 0
        return BudgetState(thought, part, written)

    def due(self, state: BudgetState) -> bytes:
        """Returns the text that must be written next; empty = the model is free."""
        if self._is_full(state.thought):
            return state.thought.unwritten(self._closing[0])
        if 0 < state.part < len(self._closing):
            return self._closing[state.part][len(state.written):]
        return b""

    def barred(self, state: BudgetState) -> bytes:
        """Returns the text that must not be written next; empty = none."""
        return self._barred if state.part == len(self._closing) else b""

    def may_act(self, state: BudgetState, tokens: int) -> bool:
        """Returns whether it may decide what is written behind so many more tokens, or fewer."""
        return state.part > 0 or (state.thought.phase != AFTER
                                  and state.thought.tokens + tokens >= self._budget)

    def _is_full(self, thought: ThoughtState) -> bool:
        return thought.phase == INSIDE and thought.tokens >= self._budget
