"""What an answer of `/v1/messages` consists of, put together from its pieces, with the events that
tell it. Pure.

The whole answer is what the same machine holds when it has been fed once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, structs

from actorium.actors.gateway.parsers.pieces import CallArguments, CallBegin, Piece, Reasoning, Text


class TextBlock(Struct, kw_only=True):
    type: Literal["text"] = "text"
    text: str = ""


class ThinkingBlock(Struct, kw_only=True):
    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUse(Struct, kw_only=True):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUse


class Delta(Struct, kw_only=True, omit_defaults=True):
    """What is new of a block or of the message: the fields of all kinds."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | None | UnsetType = UNSET
    stop_sequence: str | None | UnsetType = UNSET


class Event(Struct, kw_only=True, omit_defaults=True):
    """One event of a stream: the fields of all kinds."""

    type: str
    index: int | UnsetType = UNSET
    message: Any = UNSET
    content_block: Block | UnsetType = UNSET
    delta: Delta | UnsetType = UNSET
    usage: Any = UNSET
    error: Any = UNSET


class Blocks:
    """The blocks so far. Every method returns the events that tell what it did."""

    def __init__(self, name: str) -> None:
        """name: of the message, of which those of the calls are made: the same again when it is
        told again."""
        self._name = name
        self.found: list[Block] = []
        self._parts: list[str] = []
        """Of the open block."""
        self._open = False

    def take(self, pieces: Sequence[Piece]) -> list[Event]:
        """More of the answer."""
        out: list[Event] = []
        for piece in pieces:
            if not self._continues(piece):
                out += self.close()
                out.append(self._begin(piece))
            if not isinstance(piece, CallBegin) and piece.text:
                self._parts.append(piece.text)
                out.append(self._event("content_block_delta", delta=_delta(piece)))
        return out

    def _continues(self, piece: Piece) -> bool:
        if not self._open or isinstance(piece, CallBegin):
            return False
        kind = {Text: TextBlock, Reasoning: ThinkingBlock, CallArguments: ToolUse}[type(piece)]
        return isinstance(self.found[-1], kind)

    def _begin(self, piece: Piece) -> Event:
        block: Block
        if isinstance(piece, Text):
            block = TextBlock()
        elif isinstance(piece, Reasoning):
            block = ThinkingBlock()
        else:
            name = piece.name if isinstance(piece, CallBegin) else ""
            block = ToolUse(id=f"toolu_{self._name}_{len(self.found)}", name=name)
        self._open, self._parts = True, []
        self.found.append(block)
        # A copy: what is told is written down later.
        return self._event("content_block_start", content_block=structs.replace(block))

    def close(self) -> list[Event]:
        """The open block, if there is one, has ended."""
        if not self._open:
            return []
        self._open = False
        block, text = self.found[-1], "".join(self._parts)
        out = []
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
            out = [self._event("content_block_delta", delta=Delta(type="signature_delta",
                                                                  signature=""))]
        else:
            block.input = _object(text)
        return [*out, self._event("content_block_stop")]

    def _event(self, kind: str, **more: Any) -> Event:
        return Event(type=kind, index=len(self.found) - 1, **more)


def _delta(piece: Text | Reasoning | CallArguments) -> Delta:
    if isinstance(piece, Text):
        return Delta(type="text_delta", text=piece.text)
    if isinstance(piece, Reasoning):
        return Delta(type="thinking_delta", thinking=piece.text)
    return Delta(type="input_json_delta", partial_json=piece.text)


def _object(text: str) -> dict[str, Any]:
    """A call's arguments; empty where the answer broke off in them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
