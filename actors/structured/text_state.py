"""What is known of an answer's text while it arrives: how many digits of a number stand at its end,
where it is JSON, and how long its thought is. Pure.

Beside the JSON there may be marks, as of tools' calls, and free text between some of them.
"""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.params import WRITTEN

MOST = 20
"""Digits of a number in a row, from which on no token that begins with one follows: a model may go
on with them until its context is full. 19 make an int64, 17 a float64."""
QUOTE, BACKSLASH, ZERO, NINE, OPEN, CLOSE = b'"\\09<>'
THOUGHTS = ((b"<think>", b"</think>"), (b"<|channel>", b"<channel|>"))
"""Marks of thoughts: how they begin, and what ends them. The second ones are Gemma 4's."""
THOUGHT_ENDS = tuple(end for _, end in THOUGHTS)
FREE = (*THOUGHTS, (b"<function=", b"</function>"))
"""Marks (how they begin) behind which text is free, and what ends it: of thoughts, and of calls in
Qwen3-Coder's form."""
KEPT = max(len(mark) for pair in FREE for mark in pair)


class TextState(NamedTuple):
    """The state of the text."""

    digits: int = 0
    """At its end, outside of strings, marks and free text."""
    in_string: bool = False
    escaped: bool = False
    mark: bytes = b""
    """The beginning of the mark at the text's end."""
    free: bytes = b""
    """Where text is free, the mark that ends it."""
    tail: bytes = b""
    """The end of the free text."""
    thought: int = 0
    """Tokens of the thought so far."""

    def after(self, text: bytes) -> TextState:
        """Returns the state behind another token with this text."""
        state = self._replace(thought=self.thought + (self.free in THOUGHT_ENDS))
        while text:
            state, text = state._in_free_text(text) if state.free else state._in_json(text)
        return state

    def left_of_thought(self) -> bytes:
        """Returns what of the mark that ends a thought has not been written; empty outside of one.
        """
        end = self.free
        if end not in THOUGHT_ENDS:
            return b""
        written = next(size for size in range(len(end) - 1, -1, -1)
                       if self.tail.endswith(end[:size]))
        return end[written:]

    def _in_free_text(self, text: bytes) -> tuple[TextState, bytes]:
        """Returns the state behind free text, and what follows it."""
        whole = self.tail + text
        at = whole.find(self.free)
        if at < 0:
            return self._replace(tail=whole[1 - len(self.free):]), b""
        return TextState(thought=self.thought), whole[at + len(self.free):]

    def _in_json(self, text: bytes) -> tuple[TextState, bytes]:
        """Returns the state behind JSON, and what follows it where that is free text."""
        digits, in_string, escaped, mark, *_ = self
        for at, byte in enumerate(text):
            if mark:
                mark += text[at:at + 1] if len(mark) < KEPT else b""
                if byte == CLOSE:
                    free = next((end for begin, end in FREE if mark.startswith(begin)), b"")
                    if free:
                        return TextState(free=free, thought=self.thought), text[at + 1:]
                    mark = b""
            elif escaped:
                escaped = False
            elif byte == QUOTE:
                in_string, digits = not in_string, 0
            elif in_string:
                escaped = byte == BACKSLASH
            elif byte == OPEN:
                mark, digits = b"<", 0
            else:
                digits = digits + 1 if ZERO <= byte <= NINE else 0
        return TextState(digits, in_string, escaped, mark, thought=self.thought), b""


NAMED = '{"grammars":[{"name":"'
"""How llguidance writes a grammar that has a name."""
UNLIMITED, LIMITED = "any", "text"


class TextLimits(NamedTuple):
    """Limits of a text that its grammar does not express. They travel as the grammar's name."""

    json: bool = False
    """Numbers end at `MOST` digits."""
    thought: int = 0
    """Which of `THOUGHTS` the text begins within, counted from 1; 0 = none."""
    budget: int | None = None
    """The most tokens of the thought."""
    free: bool = False
    """Beside that, any token may follow at any place, special ones and the end among them."""

    @property
    def name(self) -> str:
        """The name of a grammar with these limits."""
        if self == TextLimits(thought=self.thought):
            return UNLIMITED
        budget = -1 if self.budget is None else self.budget
        return f"{LIMITED} {self.json:d} {self.thought:d} {budget} {self.free:d}"

    def start(self) -> TextState:
        """Returns the state of the empty text."""
        return TextState(free=THOUGHT_ENDS[self.thought - 1]) if self.thought else TextState()

    def ends_thought(self, state: TextState) -> bool:
        """Returns whether the thought has all its tokens, so that the mark that ends it follows."""
        return self.budget is not None and state.free in THOUGHT_ENDS \
            and state.thought >= self.budget


def limits_of(grammar: str) -> TextLimits | None:
    """Returns the limits of a grammar's texts; None where it has none."""
    text = grammar.lstrip(WRITTEN)
    if not text.startswith(NAMED):
        return None
    kind, *limits = text[len(NAMED):].partition('"')[0].split()
    if kind == "json_schema":
        return TextLimits(json=True)
    if kind != LIMITED:
        return None
    json, thought, budget, free = map(int, limits)
    return TextLimits(bool(json), thought, None if budget < 0 else budget, bool(free))
