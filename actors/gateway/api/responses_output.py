"""Builds a response's items from an answer's parts, with the events of each. Pure.

The whole answer is what the same builder holds when it gets everything at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, structs

from actorium.actors.gateway.answer_events import item_parts
from actorium.actors.gateway.api.answers import ContentLogprob
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.parsers.custom_calls import AnswerPart, CustomToolCall
from actorium.actors.gateway.parsers.parts import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(Struct, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class SummaryText(Struct, kw_only=True):
    """Reasoning where the request asks for a summary of it, the only form that some clients read.
    """

    type: Literal["summary_text"] = "summary_text"
    text: str = ""


class OutputMessage(Struct, kw_only=True):
    """A message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ResponseStatus = "in_progress"
    content: list[OutputText] = []


class ReasoningItem(Struct, kw_only=True):
    """Reasoning."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ResponseStatus = "in_progress"
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []


class FunctionCallItem(Struct, kw_only=True):
    """A call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ResponseStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    """Where the request's tool is in one."""
    arguments: str = ""


class CustomToolCallItem(Struct, kw_only=True):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: ResponseStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


class ResponseEvent(Struct, kw_only=True, omit_defaults=True):
    """One event of a stream: the fields of all kinds."""

    type: str
    sequence_number: int | UnsetType = UNSET
    response: Any = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | SummaryText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET


class OutputBuilder:
    """Builds the items. Every method returns the events of what it did."""

    def __init__(self, answer_id: str, namespaces: Mapping[str, tuple[str, str]],
                 summarises: bool = False) -> None:
        """answer_id: ids of the items are derived from it, so that a resend gets the same ones.
        namespaces: (namespace, name) of functions by the names that the model calls them by.
        summarises: reasoning comes as its own summary."""
        self._answer_id, self._namespaces, self._summarises = answer_id, namespaces, summarises
        self.items: list[OutputItem] = []
        self._parts: list[str] = []
        """Parts of the open item's text."""
        self._open: type | None = None
        """Kind of the open item's parts."""
        self._logprobs: list[ContentLogprob] = []
        """Those of all tokens so far: each message has a stretch of them."""
        self._ends: list[int] = []
        """Where each message's stretch ends, so far: the next one's begins there."""

    def add(self, parts: Sequence[AnswerPart],
            logprobs: list[ContentLogprob] | None) -> list[ResponseEvent]:
        """Adds parts of the answer."""
        self._logprobs += logprobs or ()
        out: list[ResponseEvent] = []
        for part, kind in item_parts(parts, self._open, bool(self.items)):
            if kind is not None:
                out += self.close("completed")
                out += self._begin(part)
                self._open, self._parts = kind, []
            out += self._extend(part)
        return out

    @property
    def ends(self) -> tuple[int, ...]:
        """Returns where each message's log-probabilities end, which depends on how the answer was
        cut; none where there are no log-probabilities."""
        return tuple(self._ends) if self._logprobs else ()

    def restore(self, ends: Sequence[int]) -> None:
        """Sets those of a stream that goes on. Raises `HttpError` 400."""
        messages = [item for item in self.items if isinstance(item, OutputMessage)]
        if len(ends) != (len(messages) if self._logprobs else 0):
            raise bad_field("Last-Event-ID", "this stream has no such event")
        if ends:
            self._ends = list(ends)
        for number, item in enumerate(messages):
            for content in item.content:
                content.logprobs = self._stretch(number)

    def _stretch(self, message: int) -> list[ContentLogprob]:
        """Returns a message's log-probabilities."""
        return self._logprobs[self._ends[message - 1] if message else 0:self._ends[message]]

    def _begin(self, part: AnswerPart) -> list[ResponseEvent]:
        item: OutputItem
        content: OutputText | UnsetType = UNSET
        own = f"{self._answer_id}_{len(self.items)}"
        if isinstance(part, TextPart):
            item, content = OutputMessage(id=f"msg_{own}"), OutputText()
            self._ends.append(self._ends[-1] if self._ends else 0)
        elif isinstance(part, ReasoningPart):
            item = ReasoningItem(id=f"rs_{own}")
        else:
            name, call_id = ("", "") if isinstance(part, ToolCallArguments) else (
                part.name, part.id)
            space, name = self._namespaces.get(name, (UNSET, name))
            kind, prefix = (CustomToolCallItem, "ctc") if isinstance(part, CustomToolCall) \
                else (FunctionCallItem, "fc")
            item = kind(id=f"{prefix}_{own}", call_id=call_id or f"call_{own}", name=name,
                        namespace=space)
        # Copies: an event is encoded at once or later.
        out = [ResponseEvent(type="response.output_item.added", output_index=len(self.items),
                     item=structs.replace(item))]
        self.items.append(item)
        if content is not UNSET:
            out.append(self._event("content_part.added", content_index=0, part=content))
        elif isinstance(item, ReasoningItem):
            out.append(self._reasoning_event("part.added", part=self._reasoning()))
        return out

    def _reasoning(self, text: str = "") -> ReasoningText | SummaryText:
        return SummaryText(text=text) if self._summarises else ReasoningText(text=text)

    def _reasoning_event(self, kind: str, **more: Any) -> ResponseEvent:
        """Returns an event of reasoning. kind: of its part or its text."""
        if self._summarises:
            return self._event(f"reasoning_summary_{kind}", summary_index=0, **more)
        begin = "content" if kind.startswith("part") else "reasoning"
        return self._event(f"{begin}_{kind}", content_index=0, **more)

    def _extend(self, part: AnswerPart) -> list[ResponseEvent]:
        if isinstance(part, ToolCallBegin):
            return []
        self._parts.append(part.text)
        if isinstance(part, ToolCallArguments):
            return [self._event("function_call_arguments.delta", delta=part.text)]
        if isinstance(part, CustomToolCall):
            return [self._event("custom_tool_call_input.delta", delta=part.text)]
        if isinstance(part, ReasoningPart):
            return [self._reasoning_event("text.delta", delta=part.text)]
        sent, self._ends[-1] = self._ends[-1], len(self._logprobs)
        return [self._event("output_text.delta", content_index=0, delta=part.text,
                            logprobs=self._logprobs[sent:])]

    def close(self, status: ResponseStatus) -> list[ResponseEvent]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        self._open = None
        item, text = self.items[-1], "".join(self._parts)
        item.status = status
        out: list[ResponseEvent] = []
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            out = [self._event("function_call_arguments.done", name=item.name, arguments=text)]
        elif isinstance(item, CustomToolCallItem):
            item.input = text
            out = [self._event("custom_tool_call_input.done", input=text)]
        elif isinstance(item, ReasoningItem):
            whole = self._reasoning(text)
            if isinstance(whole, SummaryText):
                item.summary = [whole]
            else:
                item.content = [whole]
            out = [self._reasoning_event("text.done", text=text),
                   self._reasoning_event("part.done", part=whole)]
        else:
            self._ends[-1] = len(self._logprobs)
            content = OutputText(text=text, logprobs=self._stretch(len(self._ends) - 1))
            item.content = [content]
            out = [self._event("output_text.done", content_index=0, text=text,
                               logprobs=content.logprobs),
                   self._event("content_part.done", content_index=0, part=content)]
        return [*out, ResponseEvent(type="response.output_item.done",
                                    output_index=len(self.items) - 1, item=item)]

    def _event(self, kind: str, **more: Any) -> ResponseEvent:
        return ResponseEvent(type=f"response.{kind}", item_id=self.items[-1].id,
                     output_index=len(self.items) - 1, **more)
