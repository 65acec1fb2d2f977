"""The text around calls: white space beside a call is dropped, all other is kept."""

from __future__ import annotations

from collections.abc import Sequence

from actorium.actors.gateway.parsers.pieces import Piece, Text
from actorium.actors.gateway.parsers.scan import SPACE, held


class Prose:
    """Told of all text and of every call, in order."""

    def __init__(self) -> None:
        self._spaces = ""
        """At the end of the text so far: dropped if a call follows."""
        self._behind = False
        """A call was last: white space is dropped."""

    def say(self, out: list[Piece], text: str) -> None:
        """More text."""
        if self._behind:
            text = text.lstrip(SPACE)
            self._behind = not text
        text = self._spaces + text
        said = text.rstrip(SPACE)
        self._spaces = text[len(said):]
        if said:
            out.append(Text(said))

    def say_before(self, out: list[Piece], text: str, marks: Sequence[str]) -> str:
        """As much of the text as cannot be the beginning of a mark; the rest."""
        size = len(text) - held(text, marks)
        self.say(out, text[:size])
        return text[size:]

    def called(self) -> None:
        """A call begins here."""
        self._spaces = ""

    def call_over(self) -> None:
        """It ended."""
        self._behind = True

    def end(self, out: list[Piece]) -> None:
        """No more comes."""
        if self._spaces:
            out.append(Text(self._spaces))
        self._spaces = ""


def after_call(text: str, close: str) -> str | None:
    """The text behind a call, less white space and the closing mark; None = that cannot be told
    yet."""
    text = text.lstrip(SPACE)
    if len(text) < len(close) and close.startswith(text):
        return None
    return text.removeprefix(close)
