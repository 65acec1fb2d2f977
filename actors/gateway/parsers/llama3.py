"""A message that is `{"name": ..., "parameters": {...}}`: Llama 3.1 and later.

`<|python_tag|>` may stand before it, and several calls are parted by `;`. A message that begins
otherwise is text to its end.
"""

from __future__ import annotations

from actorium.actors.gateway.parsers.call_json import JsonCall
from actorium.actors.gateway.parsers.pieces import Piece, Text
from actorium.actors.gateway.parsers.scan import SPACE

TAG = "<|python_tag|>"


class Llama3:
    """See the module."""

    def __init__(self) -> None:
        self._text = ""
        """Not looked at yet."""
        self._before = ""
        """Since the last call's end."""
        self._call: JsonCall | None = None
        self._calls = 0
        self._plain = False

    def feed(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        self._text += text
        while self._text and self._step(out):
            pass
        return out

    def end(self) -> list[Piece]:
        left = self._before + (self._call.raw if self._call is not None else "") + self._text
        self._text = self._before = ""
        if self._call is None and self._calls and not left.strip(SPACE + ";"):
            return []
        return [Text(left)] if left else []

    def _step(self, out: list[Piece]) -> bool:
        if self._plain:
            out.append(Text(self._text))
            self._text = ""
            return False
        if self._call is not None:
            return self._in_call(self._call, out)
        whole = self._before + self._text
        rest = whole.lstrip(SPACE + ";" if self._calls else SPACE)
        after = rest.removeprefix(TAG).lstrip(SPACE)
        if after.startswith("{"):
            self._before, self._text = whole[:len(whole) - len(after)], after
            self._call = JsonCall(self._calls)
            return True
        if not after or TAG.startswith(rest):
            self._before, self._text = whole, ""
            return False
        return self._give_up(whole)

    def _in_call(self, call: JsonCall, out: list[Piece]) -> bool:
        pieces, rest = call.feed(self._text)
        out += pieces
        self._text = ""
        if call.failed:
            return self._give_up(self._before + call.raw)
        if call.over:
            self._text, self._before, self._call = rest, "", None
            self._calls += 1
        return call.over

    def _give_up(self, text: str) -> bool:
        """No call, nor will there be one."""
        self._plain, self._call = True, None
        self._text, self._before = text, ""
        return True
