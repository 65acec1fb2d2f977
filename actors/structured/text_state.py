"""What is known of an answer's text while it arrives: how many digits of a number stand at its end,
where it is JSON. Pure.

Beside the JSON there may be marks, as of tools' calls, and free text between some of them.
"""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.params import WRITTEN

MOST = 20
"""Digits of a number in a row, from which on no token that begins with one follows: a model may go
on with them until its context is full. 19 make an int64, 17 a float64."""
QUOTE, BACKSLASH, ZERO, NINE, OPEN, CLOSE = b'"\\09<>'
FREE = ((b"<function=", b"</function>"),)
"""Marks (how they begin) behind which text is free, and what ends it: of calls in Qwen3-Coder's
form."""
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

    def after(self, text: bytes) -> TextState:
        """Returns the state behind more text."""
        state = self
        while text:
            state, text = state._in_free_text(text) if state.free else state._in_json(text)
        return state

    def _in_free_text(self, text: bytes) -> tuple[TextState, bytes]:
        """Returns the state behind free text, and what follows it."""
        whole = self.tail + text
        at = whole.find(self.free)
        if at < 0:
            return self._replace(tail=whole[1 - len(self.free):]), b""
        return TextState(), whole[at + len(self.free):]

    def _in_json(self, text: bytes) -> tuple[TextState, bytes]:
        """Returns the state behind JSON, and what follows it where that is free text."""
        digits, in_string, escaped, mark, *_ = self
        for at, byte in enumerate(text):
            if mark:
                mark += text[at:at + 1] if len(mark) < KEPT else b""
                if byte == CLOSE:
                    free = next((end for begin, end in FREE if mark.startswith(begin)), b"")
                    if free:
                        return TextState(free=free), text[at + 1:]
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
        return TextState(digits, in_string, escaped, mark), b""


NAMED = '{"grammars":[{"name":"'
"""How llguidance writes a grammar that has a name."""
UNLIMITED, LIMITED, FREE_TEXT, NO_THOUGHT = "any", "text", "free", "0"


class TextLimits(NamedTuple):
    """Limits of a text that its grammar does not express. They travel as the grammar's name."""

    json: bool = False
    """Numbers end at `MOST` digits."""
    thought: str = ""
    """The format of the thought before the answer; empty = there is none."""
    opened: bool = False
    """The text begins within it."""
    budget: int | None = None
    """The most tokens of the thought."""
    free: bool = False
    """Behind the thought any token may follow at any place, special ones and the end among them."""

    @property
    def name(self) -> str:
        """The name of a grammar with these limits."""
        if not (self.json or self.free) and self.budget is None:
            return UNLIMITED
        kind = FREE_TEXT if self.free else LIMITED
        budget = -1 if self.budget is None else self.budget
        return f"{kind} {self.json:d} {self.thought or NO_THOUGHT} {budget} {self.opened:d}"


def limits_of(grammar: str) -> TextLimits | None:
    """Returns the limits of a grammar's texts; None where it has none."""
    text = grammar.lstrip(WRITTEN)
    if not text.startswith(NAMED):
        return None
    kind, *limits = text[len(NAMED):].partition('"')[0].split()
    if kind == "json_schema":
        return TextLimits(json=True)
    if kind not in (LIMITED, FREE_TEXT):
        return None
    json, thought, budget, opened = limits
    return TextLimits(json == "1", "" if thought == NO_THOUGHT else thought, opened == "1",
                      None if budget == "-1" else int(budget), kind == FREE_TEXT)
