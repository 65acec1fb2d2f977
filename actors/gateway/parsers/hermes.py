"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

from actorium.actors.gateway.parsers.call_json import JsonCall
from actorium.actors.gateway.parsers.pieces import Piece
from actorium.actors.gateway.parsers.prose import Prose, after_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """See the module."""

    def __init__(self) -> None:
        self._text = ""
        self._prose = Prose()
        self._call: JsonCall | None = None
        self._calls = 0
        self._closing = False
        """A call has ended; its closing mark may follow."""

    def feed(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        self._text += text
        while self._step(out):
            pass
        return out

    def end(self) -> list[Piece]:
        out: list[Piece] = []
        if self._call is not None:
            self._prose.say(out, OPEN + self._call.raw if self._call.raw else "")
        elif not self._closing:
            self._prose.say(out, self._text)
        self._prose.end(out)
        self._text, self._call = "", None
        return out

    def _step(self, out: list[Piece]) -> bool:
        if self._call is not None:
            return self._in_call(self._call, out)
        if self._closing:
            return self._after_call()
        at = self._text.find(OPEN)
        if at < 0:
            self._text = self._prose.say_before(out, self._text, (OPEN,))
            return False
        self._prose.say(out, self._text[:at])
        self._text = self._text[at + len(OPEN):]
        self._call = JsonCall(self._calls)
        return True

    def _in_call(self, call: JsonCall, out: list[Piece]) -> bool:
        pieces, rest = call.feed(self._text)
        if pieces:
            self._prose.called()
        out += pieces
        self._text = ""
        if call.failed:  # the mark was text, and what follows on it is looked at again
            self._prose.say(out, OPEN)
            self._text, self._call = call.raw, None
            return True
        if not call.over:
            return False
        self._text, self._call, self._closing = rest, None, True
        self._calls += 1
        return True

    def _after_call(self) -> bool:
        rest = after_call(self._text, CLOSE)
        if rest is None:
            return False
        self._text, self._closing = rest, False
        self._prose.call_over()
        return True
