"""`/v1/chat/completions`: its answers, and the encoder of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType, structs

from actorium.actors.client.requests import Request
from actorium.actors.gateway.answer_events import TOOL_CALLS, AnswerEvent, ChoiceEvents
from actorium.actors.gateway.api import answers
from actorium.actors.gateway.api.answers import (
    ApiObject,
    ChatLogprobs,
    CompletionUsage,
    ShownExperts,
)
from actorium.actors.gateway.api.chat_body import ASSISTANT, ChatBody
from actorium.actors.gateway.api.offered_tools import CustomInput, FunctionCall, FunctionToolCall
from actorium.actors.gateway.api.sampling_fields import (
    format_field,
    request_for,
    sampling,
    structured_of,
)
from actorium.actors.gateway.api.turn import HttpTurn
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.http.replies import sse_event
from actorium.actors.gateway.parsers.custom_calls import AnswerPart, CustomToolCall
from actorium.actors.gateway.parsers.parts import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)
from actorium.actors.gateway.served_model import ServedModel, TokenIdTexts


class DeltaMessage(Struct, omit_defaults=True, kw_only=True):
    """The new part of a message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[FunctionToolCall] | None = None
    function_call: FunctionCall | None = None


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(ApiObject, kw_only=True):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    """With the first event."""
    ignored_tools: list[str] | UnsetType = UNSET
    ignored_input: list[str] | UnsetType = UNSET
    """With the first event."""


class AssistantMessage(Struct, kw_only=True):
    role: str = ASSISTANT
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[FunctionToolCall] | None = None
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Where SGLang has them."""
    routed_experts: ShownExperts | UnsetType = UNSET


class ChatCompletion(ApiObject, kw_only=True):
    """The whole answer."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: answers.PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    service_tier: None = None
    system_fingerprint: None = None
    ignored_tools: list[str] | UnsetType = UNSET
    """Types of those that are not run here, and that the model was not shown, if there are any."""
    ignored_input: list[str] | UnsetType = UNSET
    """Types of the parts of messages that the model was not shown, if there are any."""


FUNCTION_CALL = "function_call"
CallIds = Callable[[ToolCallBegin | CustomToolCall], str]
"""The id of a choice's call."""


class ChatTurn(HttpTurn):
    """One chat completion under way."""

    body_type: ClassVar[Any] = ChatBody
    body: ChatBody

    def __init__(self, call: EngineCall, model: ServedModel, body: ChatBody) -> None:
        super().__init__(call, model, body)
        self._id = f"chatcmpl-{call.answer_id}"
        self._tools = body.choice()
        self._ignored = body.offer().ignored or UNSET, body.ignored_input() or UNSET
        self._thought = model.parsing.thought(
            body.template_args(), bool(self._tools.shown),
            None if body.opens_turn else model.parsing.row.left_open(body.last_text()))
        self._texts = TokenIdTexts(self.engine.token_texts) if body.return_tokens_as_token_ids \
            else self.engine.token_texts
        self._delta = legacy_delta if body.legacy else delta
        self._echoed = body.echoed()
        self._prompt_ids: list[int] | None = None
        """Where the answer has them."""
        self.answer = self.parsed_answer(body.separate_reasoning, body.shows_reasoning,
                                         body.offer().customs, body.n or 1)

    @property
    def counts_prompt(self) -> bool:
        return self.body.continuous_usage

    def engine_fields(self) -> dict[str, str]:
        return {"structured": format_field(self.body,
                                           "functions" if self.body.legacy else "tools"),
                "max_tokens": self.body.limit_field, "routed_experts": "return_routed_experts",
                "thinking_token_budget": "thinking_token_budget"
                if self.body.thinking_token_budget is not None else "reasoning.max_tokens"}

    @property
    def shows_token_texts(self) -> bool:
        return self.body.alternatives() is not None or self.body.prompt_logprobs is not None

    async def requests(self) -> list[Request]:
        body, tenant = self.body, self.call.tenant
        params = sampling(body, body.alternatives(),
                          structured=self.constraint(structured_of(body)),
                          thinking_token_budget=self.thought_limit(body.thought_budget))
        prompt: dict[str, Any] = {
            "messages": body.turns(), "template_args": body.template_args(),
            "tools": self._tools.shown, "chat_template": body.chat_template,
            "add_generation_prompt": body.opens_turn,
            "continue_final_message": body.continues}
        request = request_for(body, params, tenant, **prompt)
        if not (body.wants_prompt_ids or body.cuts_right):
            return [request]
        ids = await self.engine.client.tokenize_chat(
            **prompt, mm_processor_kwargs=body.mm_processor_kwargs)
        if any(not isinstance(turn.content, str) for turn in prompt["messages"]):
            if body.cuts_right:
                raise bad_field("truncation_side", "right is not possible with images or videos")
            self._prompt_ids = body.truncated(ids, self.model.max_model_len, params.max_tokens)
            return [request]
        # The very tokens that are shown are run.
        ids = body.truncated(ids, self.model.max_model_len, params.max_tokens)
        self._prompt_ids = ids if body.wants_prompt_ids else None
        return [request_for(body, params, tenant, prompt=ids)]

    # --- the answer ---

    async def collect(self, requests: list[Request]) -> ChatCompletion:
        choices = await self.complete(requests)
        usage = answers.completion_usage(self.answer.usage())
        return ChatCompletion(
            id=self._id, created=self.call.created, model=self.model.name,
            choices=[self._whole(choice) for choice in choices],
            usage=self._with_reasoning(usage),
            prompt_logprobs=answers.prompt_logprobs(choices[0].prompt_logprobs,
                                                    self.engine.token_texts),
            prompt_token_ids=self._prompt_ids,
            ignored_tools=self._ignored[0], ignored_input=self._ignored[1])

    def _whole(self, events: ChoiceEvents) -> ChatChoice:
        chunks = self._chunks(events)
        return ChatChoice(
            index=events.index,
            message=joined([*self._openings(), *(chunk.delta for chunk in chunks)]),
            logprobs=chunks[0].logprobs, finish_reason=chunks[-1].finish_reason,
            stop_reason=events.stop_reason,
            token_ids=events.token_ids if self.body.return_token_ids else None,
            routed_experts=answers.shown_experts(events.routed_experts),
            prompt_token_ids=self._prompt_ids or UNSET
            if self.body.return_prompt_token_ids else UNSET)

    def encode(self, event: AnswerEvent) -> bytes:
        if isinstance(event, ChoiceEvents):
            return b"".join([self._event([chunk]) for chunk in self._chunks(event)])
        return b"".join([
            self._event([ChatChunkChoice(index=event.index, delta=opening)],
                        first=event.first and not number)
            for number, opening in enumerate(self._openings())])

    async def end(self) -> bytes:
        if not self.body.include_usage:
            return b""
        return self._event([], self._with_reasoning(answers.completion_usage(self.answer.usage())))

    def _event(self, choices: list[ChatChunkChoice], usage: CompletionUsage | None = None,
               first: bool = False) -> bytes:
        """first: of the stream, which has the prompt's tokens, and what the model was not shown."""
        if choices and self.body.continuous_usage:
            usage = answers.completion_usage(self.answer.usage())
        chunk = ChatChunk(id=self._id, created=self.call.created, model=self.model.name,
                          choices=choices, usage=usage)
        if first:
            chunk.prompt_token_ids = UNSET if self._prompt_ids is None else self._prompt_ids
            chunk.ignored_tools, chunk.ignored_input = self._ignored
        return sse_event(chunk)

    def _openings(self) -> list[DeltaMessage]:
        """Returns the deltas with which each choice begins."""
        # With calls and no text the content is null, which an empty string here would rule out.
        content = "" if self._tools.schemas is None else None
        opening = DeltaMessage(role=self.body.answer_role(), content=content)
        return [opening, DeltaMessage(content=self._echoed)] if self._echoed else [opening]

    def _chunks(self, events: ChoiceEvents) -> list[ChatChunkChoice]:
        """Returns what a delta of the engine comes to: nothing, or a chunk or more."""
        index, finished = events.index, events.finish_reason is not None
        out = [ChatChunkChoice(index=index, delta=self._delta(part, self._call_id(index)))
               for part in events.parts]
        if finished and self._tools.schemas is not None \
                and not (events.has_answer or self._echoed):
            out.append(ChatChunkChoice(index=index, delta=DeltaMessage(content="")))
        counted = events.token_ids and (self.body.return_token_ids or self.body.continuous_usage)
        if not out and (finished or events.logprobs or counted):
            out.append(ChatChunkChoice(index=index, delta=DeltaMessage()))
        if out:
            out[0].logprobs = answers.chat_logprobs(events.logprobs, self._texts)
            if self.body.return_token_ids:
                out[0].token_ids = events.token_ids
            calls = self.body.legacy and events.finish_reason == TOOL_CALLS
            out[-1].finish_reason = FUNCTION_CALL if calls else events.finish_reason
            out[-1].stop_reason = events.stop_reason
        return out

    def _with_reasoning(self, usage: CompletionUsage) -> CompletionUsage:
        """Adds how much of the completion is reasoning."""
        if self.model.thought_end:
            usage.completion_tokens_details["reasoning_tokens"] = self.answer.reasoning_tokens
        return usage

    def _call_id(self, choice: int) -> CallIds:
        """Names the calls of a choice after the request, so that a resend gets the same names."""
        prefix = f"{self.call.resume_id}.{choice}"
        return lambda begun: self.model.parsing.call_id(begun, f"{prefix}.{begun.call}")


def delta(part: AnswerPart, call_id: CallIds) -> DeltaMessage:
    """Returns the delta of a part of a message."""
    match part:
        case TextPart(text):
            return DeltaMessage(content=text)
        case ReasoningPart(text):
            return DeltaMessage(reasoning_content=text)
        case ToolCallBegin(call, name) as begun:
            return DeltaMessage(tool_calls=[FunctionToolCall(
                index=call, id=call_id(begun), type="function", function=FunctionCall(name))])
        case ToolCallArguments(call, text):
            return DeltaMessage(tool_calls=[FunctionToolCall(
                index=call, function=FunctionCall(arguments=text))])
        case CustomToolCall(call, name, text) as begun:
            return DeltaMessage(tool_calls=[FunctionToolCall(
                index=call, id=call_id(begun), type="custom", custom=CustomInput(name, text))])


def legacy_delta(part: AnswerPart, call_id: CallIds) -> DeltaMessage:
    """Returns the same for a request with `functions`."""
    match part:
        case ToolCallBegin(_, name):
            return DeltaMessage(function_call=FunctionCall(name))
        case ToolCallArguments(_, text):
            return DeltaMessage(function_call=FunctionCall(arguments=text))
        case _:
            return delta(part, call_id)


def joined(deltas: Iterable[DeltaMessage]) -> AssistantMessage:
    """Returns the message that deltas come to."""
    message, content, reasoning = AssistantMessage(), "", ""
    calls: list[FunctionToolCall] = []
    begun = FunctionCall()
    for one in deltas:
        message.role = one.role or message.role
        content += one.content or ""
        reasoning += one.reasoning_content or ""
        for call in one.tool_calls or ():
            if call.id is not UNSET:
                calls.append(structs.replace(call, index=UNSET))
                begun = call.function or begun
            elif call.function is not UNSET:
                begun.arguments += call.function.arguments
        if one.function_call is not None and one.function_call.name is not UNSET:
            message.function_call = begun = one.function_call
        elif one.function_call is not None:
            begun.arguments += one.function_call.arguments
    has_calls = bool(calls) or message.function_call is not UNSET
    message.content = None if has_calls and not content else content
    message.reasoning_content, message.tool_calls = reasoning or None, calls or None
    return message
