"""How many digits of a number stand at the end of a JSON text that is still arriving. Pure."""

from __future__ import annotations

from typing import NamedTuple

MOST = 20
"""Digits of a number in a row, from which on no token that begins with one follows: a model may go
on with them until its context is full. 19 make an int64, 17 a float64."""
QUOTE, BACKSLASH, ZERO, NINE = b'"\\09'


class DigitRun(NamedTuple):
    """The state of the text."""

    digits: int = 0
    """At its end, outside of a string."""
    in_string: bool = False
    escaped: bool = False

    def after(self, text: bytes) -> DigitRun:
        """Returns the state behind more of the text."""
        digits, in_string, escaped = self
        for byte in text:
            if escaped:
                escaped = False
            elif byte == QUOTE:
                in_string, digits = not in_string, 0
            elif in_string:
                escaped = byte == BACKSLASH
            else:
                digits = digits + 1 if ZERO <= byte <= NINE else 0
        return DigitRun(digits, in_string, escaped)
