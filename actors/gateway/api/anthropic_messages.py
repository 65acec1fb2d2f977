"""`/v1/messages` and `/v1/messages/count_tokens`, in Anthropic's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Raw, Struct, UnsetType, structs
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Request
from actorium.actors.gateway.answer_events import (
    STOP,
    TOOL_CALLS,
    AnswerEvent,
    ChoiceEvents,
    ChoiceStarted,
    item_parts,
)
from actorium.actors.gateway.api.anthropic_body import CountTokensBody, MessagesBody, prefill
from actorium.actors.gateway.api.sampling_fields import (
    format_field,
    request_for,
    sampling,
    structured_of,
)
from actorium.actors.gateway.api.turn import HttpTurn
from actorium.actors.gateway.engine_call import EngineCall, call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.replies import JsonReply, sse_event
from actorium.actors.gateway.parsers.custom_calls import AnswerPart, CustomToolCall
from actorium.actors.gateway.parsers.parts import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)
from actorium.actors.gateway.parsers.thoughts import Thought
from actorium.actors.gateway.served_model import ServedModel
from actorium.actors.messages import Usage


class TextBlock(Struct, kw_only=True):
    type: Literal["text"] = "text"
    text: str = ""


class ThinkingBlock(Struct, kw_only=True):
    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, kw_only=True):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] | Raw = {}


OutputBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class BlockDelta(Struct, kw_only=True, omit_defaults=True):
    """The new part of a block or of the message: the fields of all kinds."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | None | UnsetType = UNSET
    stop_sequence: str | None | UnsetType = UNSET


class MessageEvent(Struct, kw_only=True, omit_defaults=True):
    """One event of a stream: the fields of all kinds."""

    type: str
    index: int | UnsetType = UNSET
    message: Any = UNSET
    content_block: OutputBlock | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: Any = UNSET
    error: Any = UNSET


class BlockBuilder:
    """Builds the blocks of an answer. Every method returns the events of what it did."""

    def __init__(self, answer_id: str) -> None:
        """answer_id: ids of calls are derived from it, so that a resend gets the same ones."""
        self._answer_id = answer_id
        self.blocks: list[OutputBlock] = []
        self._parts: list[str] = []
        """Parts of the open block."""
        self._open: type | None = None
        """Kind of the open block's parts."""

    def add(self, parts: Sequence[AnswerPart]) -> list[MessageEvent]:
        """Adds parts of the answer."""
        out: list[MessageEvent] = []
        for part, kind in item_parts(parts, self._open, bool(self.blocks)):
            if kind is not None:
                out += self.close()
                out.append(self._begin(part))
                self._open, self._parts = kind, []
            if not isinstance(part, ToolCallBegin) and part.text:
                self._parts.append(part.text)
                out.append(self._event("content_block_delta", delta=_delta(part)))
        return out

    def _begin(self, part: AnswerPart) -> MessageEvent:
        block: OutputBlock
        if isinstance(part, TextPart):
            block = TextBlock()
        elif isinstance(part, ReasoningPart):
            block = ThinkingBlock()
        else:
            name = part.name if isinstance(part, ToolCallBegin) else ""
            block = ToolUseBlock(id=f"toolu_{self._answer_id}_{len(self.blocks)}", name=name)
        self.blocks.append(block)
        # A copy: the event is encoded later.
        return self._event("content_block_start", content_block=structs.replace(block))

    def close(self) -> list[MessageEvent]:
        """Ends the open block, if there is one."""
        if self._open is None:
            return []
        self._open = None
        block, text = self.blocks[-1], "".join(self._parts)
        out = []
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
            out = [self._event("content_block_delta", delta=BlockDelta(type="signature_delta",
                                                                  signature=""))]
        else:
            block.input = _object(text)
        return [*out, self._event("content_block_stop")]

    def _event(self, kind: str, **more: Any) -> MessageEvent:
        return MessageEvent(type=kind, index=len(self.blocks) - 1, **more)


def _delta(part: TextPart | ReasoningPart | ToolCallArguments | CustomToolCall) -> BlockDelta:
    if isinstance(part, TextPart):
        return BlockDelta(type="text_delta", text=part.text)
    if isinstance(part, ReasoningPart):
        return BlockDelta(type="thinking_delta", thinking=part.text)
    return BlockDelta(type="input_json_delta", partial_json=part.text)


def _object(text: str) -> dict[str, Any] | Raw:
    """Returns a call's arguments as written, where they are an object; empty where the answer broke
    off in them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return Raw(text.encode()) if isinstance(found, dict) else {}


class MessageUsage(Struct, kw_only=True):
    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class AnthropicMessage(Struct, kw_only=True):
    """The whole answer, or its beginning."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    ignored_tools: list[str] = []
    """Types of those that are not run here, and that the model was not shown."""
    ignored_input: list[str] = []
    """Types of the blocks that the model was not shown."""


class MessagesTurn(HttpTurn):
    """One message under way."""

    body_type = MessagesBody
    last_event = b""
    body: MessagesBody

    def __init__(self, call: EngineCall, model: ServedModel, body: MessagesBody) -> None:
        super().__init__(call, model, body)
        self._id = f"msg_{call.answer_id}"
        self._tools = body.choice()
        self._blocks = BlockBuilder(call.answer_id)
        self._turns = body.turns()
        self._prefill = prefill(self._turns)
        self._thought = model.parsing.thought(
            body.template_args(), bool(self._tools.shown),
            None if self._prefill is None else model.parsing.row.left_open(self._prefill))
        # A thought that the template does not let be left out is shown.
        self.answer = self.parsed_answer(
            keeps_reasoning=body.thinks or self._thought is Thought.OPEN)

    @property
    def counts_prompt(self) -> bool:
        return True

    def engine_fields(self) -> dict[str, str]:
        return {"structured": format_field(self.body, "tools")}

    def thought_limit(self, budget: int | None) -> int | None:
        """Returns the same, and None where the model does not reason: clients ask every model for
        thoughts."""
        asked = self.body.thinking_token_budget is not None
        return super().thought_limit(budget) if asked or self._thought is not Thought.NONE else None

    async def requests(self) -> list[Request]:
        body = self.body
        params = sampling(body, None, structured=self.constraint(structured_of(body)),
                          thinking_token_budget=self.thought_limit(body.thought_budget))
        goes_on = self._prefill is not None
        return [request_for(body, params, self.call.tenant, messages=self._turns,
                            template_args=body.template_args(), tools=self._tools.shown,
                            add_generation_prompt=not goes_on, continue_final_message=goes_on)]

    # --- the answer ---

    async def collect(self, requests: list[Request]) -> AnthropicMessage:
        [events] = await self.complete(requests)
        self._blocks.add(events.parts)
        self._blocks.close()
        stop_reason, stop_sequence = _end_of(events)
        return structs.replace(self._message(), content=self._blocks.blocks,
                               stop_reason=stop_reason, stop_sequence=stop_sequence)

    def encode(self, event: AnswerEvent) -> bytes:
        if isinstance(event, ChoiceStarted):
            return _written([MessageEvent(type="message_start", message=self._message()),
                             MessageEvent(type="ping")])
        out = self._blocks.add(event.parts)
        if event.finish_reason is not None:
            out += self._blocks.close()
            stop_reason, stop_sequence = _end_of(event)
            out += [MessageEvent(type="message_delta", usage=_usage(self.answer.usage()),
                                 delta=BlockDelta(stop_reason=stop_reason,
                                                  stop_sequence=stop_sequence)),
                    MessageEvent(type="message_stop")]
        return _written(out)

    async def error_events(self, error: HttpError) -> bytes:
        return _written([MessageEvent(**error.anthropic_body())])

    def _message(self) -> AnthropicMessage:
        return AnthropicMessage(
            id=self._id, model=self.model.name, usage=_usage(self.answer.usage()),
            ignored_tools=self.body.ignored_tools(), ignored_input=self.body.ignored_input())


def _end_of(events: ChoiceEvents) -> tuple[str, str | None]:
    """Returns (stop_reason, stop_sequence)."""
    if events.finish_reason == TOOL_CALLS:
        return "tool_use", None
    if events.finish_reason != STOP:
        return "max_tokens", None
    if isinstance(events.stop_reason, str):
        return "stop_sequence", events.stop_reason
    return "end_turn", None


async def count_tokens(http: HttpRequest) -> Response:
    """Handles `/v1/messages/count_tokens`: counts the tokens of the body's prompt."""
    call, body = call_of(http), await bodies.read(http, CountTokensBody)
    await call.chosen.model(body)
    turns = body.turns()
    goes_on = prefill(turns) is not None
    ids = await call.engine.client.tokenize_chat(
        turns, body.template_args(), body.choice().shown, add_generation_prompt=not goes_on,
        continue_final_message=goes_on, mm_processor_kwargs=body.mm_processor_kwargs)
    return JsonReply({"input_tokens": len(ids)})


def _usage(used: Usage) -> MessageUsage:
    cached = used.cached_tokens
    return MessageUsage(input_tokens=used.prompt_tokens - cached, cache_read_input_tokens=cached,
                        output_tokens=used.completion_tokens)


def _written(events: Iterable[MessageEvent]) -> bytes:
    return b"".join([sse_event(one, one.type) for one in events])
