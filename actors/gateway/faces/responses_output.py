"""What a response consists of, put together from an answer's pieces, with the events that tell it.
Pure.

The whole answer is what the same machine holds when it has been fed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, structs

from actorium.actors.gateway.faces.chat_protocol import ContentLogprob
from actorium.actors.gateway.parsers.parts import CallArguments, CallBegin, Piece, Reasoning, Text

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(Struct, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class Said(Struct, kw_only=True):
    """A message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class Thought(Struct, kw_only=True):
    """Reasoning."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class Call(Struct, kw_only=True):
    """A call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


Item: TypeAlias = Said | Thought | Call


class Event(Struct, kw_only=True, omit_defaults=True):
    """One event of a stream: the fields of all kinds."""

    type: str
    sequence_number: int | UnsetType = UNSET
    response: Any = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET


class Output:
    """The items so far. Every method returns the events that tell what it did."""

    def __init__(self, name: str) -> None:
        """name: of the response, of which those of the items are made: the same again when it is
        told again."""
        self._name = name
        self.items: list[Item] = []
        self._parts: list[str] = []
        """Of the open item's text."""
        self._open = False
        self._untold: list[ContentLogprob] = []
        """Log-probabilities for the next words."""

    def add(self, pieces: Sequence[Piece], logprobs: list[ContentLogprob] | None) -> list[Event]:
        """More of the answer."""
        self._untold += logprobs or ()
        out: list[Event] = []
        for piece in pieces:
            if not self._continues(piece):
                out += self.close("completed")
                out += self._begin(piece)
            out += self._text_of(piece)
        return out

    def _continues(self, piece: Piece) -> bool:
        """The piece belongs to the item that is open."""
        if not self._open or isinstance(piece, CallBegin):
            return False
        kind = {Text: Said, Reasoning: Thought, CallArguments: Call}[type(piece)]
        return isinstance(self.items[-1], kind)

    def _begin(self, piece: Piece) -> list[Event]:
        item: Item
        part: OutputText | ReasoningText | UnsetType = UNSET
        own = f"{self._name}_{len(self.items)}"
        if isinstance(piece, Text):
            item, part = Said(id=f"msg_{own}"), OutputText()
        elif isinstance(piece, Reasoning):
            item, part = Thought(id=f"rs_{own}"), ReasoningText()
        else:
            name = piece.name if isinstance(piece, CallBegin) else ""
            item = Call(id=f"fc_{own}", call_id=f"call_{own}", name=name)
        self._open, self._parts = True, []
        # Copies: what is told is written down at once or later.
        out = [Event(type="response.output_item.added", output_index=len(self.items),
                     item=structs.replace(item))]
        self.items.append(item)
        if part is not UNSET:
            out.append(self._event("content_part.added", content_index=0, part=part))
        return out

    def _text_of(self, piece: Piece) -> list[Event]:
        if isinstance(piece, CallBegin):
            return []
        self._parts.append(piece.text)
        if isinstance(piece, CallArguments):
            return [self._event("function_call_arguments.delta", delta=piece.text)]
        if isinstance(piece, Reasoning):
            return [self._event("reasoning_text.delta", content_index=0, delta=piece.text)]
        item, told = self.items[-1], self._untold
        assert isinstance(item, Said)
        self._untold = []
        if not item.content:
            item.content = [OutputText(logprobs=[])]
        item.content[0].logprobs += told
        return [self._event("output_text.delta", content_index=0, delta=piece.text, logprobs=told)]

    def close(self, status: Status) -> list[Event]:
        """The open item, if there is one, has ended."""
        if not self._open:
            return []
        self._open = False
        item, text = self.items[-1], "".join(self._parts)
        item.status = status
        out: list[Event] = []
        if isinstance(item, Call):
            item.arguments = text
            out = [self._event("function_call_arguments.done", name=item.name, arguments=text)]
        elif isinstance(item, Thought):
            item.content = [ReasoningText(text=text)]
            out = [self._event("reasoning_text.done", content_index=0, text=text),
                   self._event("content_part.done", content_index=0, part=item.content[0])]
        else:
            part = item.content[0]
            part.text, part.logprobs = text, part.logprobs + self._untold
            self._untold = []
            out = [self._event("output_text.done", content_index=0, text=text,
                               logprobs=part.logprobs),
                   self._event("content_part.done", content_index=0, part=part)]
        return [*out, Event(type="response.output_item.done", output_index=len(self.items) - 1,
                            item=item)]

    def _event(self, kind: str, **more: Any) -> Event:
        return Event(type=f"response.{kind}", item_id=self.items[-1].id,
                     output_index=len(self.items) - 1, **more)
