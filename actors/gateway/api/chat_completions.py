"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any

from msgspec import UNSET

from actorium.actors.client.requests import Completion, Request, StreamDelta
from actorium.actors.gateway.api import answers
from actorium.actors.gateway.api.answers import UsageCounter
from actorium.actors.gateway.api.chat_protocol import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    CompletionUsage,
    DeltaMessage,
)
from actorium.actors.gateway.api.response_formats import format_field, structured_of
from actorium.actors.gateway.api.sampling_fields import request_for, sampling
from actorium.actors.gateway.api.tool_choice import (
    MAX_CALLS,
    CustomInput,
    FunctionCall,
    FunctionToolCall,
)
from actorium.actors.gateway.api.turn import HttpTurn
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.replies import encode_json, event
from actorium.actors.gateway.parsers.choice_parser import STOP, TOOL_CALLS, ChoiceParser
from actorium.actors.gateway.parsers.custom_calls import (
    AnswerPart,
    CustomCallReader,
    CustomToolCall,
)
from actorium.actors.gateway.parsers.parts import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)
from actorium.actors.gateway.parsers.think import opens_thought
from actorium.actors.gateway.resume.delta_streams import Deltas
from actorium.actors.gateway.served_model import ServedModel, TokenIdTexts

FUNCTION_CALL = "function_call"
CallIds = Callable[[int], str]
"""The id of a choice's call by its number."""


class ChatTurn(HttpTurn):
    """One chat completion under way."""

    body_type = ChatBody
    body: ChatBody

    def __init__(self, call: EngineCall, model: ServedModel, body: ChatBody) -> None:
        super().__init__(call, model, body)
        self._id = f"chatcmpl-{call.answer_id}"
        self._tools, self._customs = body.choice(), body.offer().customs
        self._ignored = body.offer().ignored or UNSET, body.ignored_input() or UNSET
        self._thought = model.parsing.thought(
            body.template_args(), bool(self._tools.shown),
            None if body.opens_turn else opens_thought(body.last_text()))
        self._texts = TokenIdTexts(self.engine.token_texts) if body.return_tokens_as_token_ids \
            else self.engine.token_texts
        self._delta = legacy_delta if body.legacy else delta
        self._echoed = body.echoed()
        self._prompt_ids: list[int] | None = None
        """Where the answer has them."""
        self._counts = UsageCounter()
        self._parsers: dict[int, ChoiceParser] = {}
        """Of the choices of a stream that have begun."""
        self._custom_calls: dict[int, CustomCallReader] = {}
        """The same."""

    def engine_fields(self) -> dict[str, str]:
        return {"structured": format_field(self.body,
                                           "functions" if self.body.legacy else "tools"),
                "max_tokens": self.body.limit_field}

    @property
    def tells_token_texts(self) -> bool:
        return self.body.alternatives() is not None or self.body.prompt_logprobs is not None

    async def requests(self) -> list[Request]:
        body, tenant = self.body, self.call.tenant
        structured = self.constraint(structured_of(body), body.thinking_token_budget)
        params = sampling(body, body.alternatives(), structured=structured)
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
                raise HttpError(400, "truncation_side: right is not possible with images or videos",
                                "truncation_side")
            self._prompt_ids = body.truncated(ids, self.model.max_model_len, params.max_tokens)
            return [request]
        # The very tokens that are shown are run.
        ids = body.truncated(ids, self.model.max_model_len, params.max_tokens)
        self._prompt_ids = ids if body.wants_prompt_ids else None
        return [request_for(body, params, tenant, prompt=ids)]

    def _parser(self) -> ChoiceParser:
        """For the text of one choice."""
        body, tools = self.body, self._tools
        parser = self.model.parsing.parser(tools.schemas, tools.forced, body.separate_reasoning,
                                           self._thought)
        return ChoiceParser(parser, body.include_reasoning, MAX_CALLS if body.parallel else 1,
                      self.model.thought_end)

    def _reason(self, parser: ChoiceParser, name: str | None) -> str | None:
        found = parser.reason(answers.reason(name))
        return FUNCTION_CALL if found == TOOL_CALLS and self.body.legacy else found

    # --- all at once ---

    async def collect(self, requests: list[Request]) -> ChatCompletion:
        [choices] = await self.call.complete(requests)
        parsers = [self._parser() for _ in choices]
        return ChatCompletion(
            id=self._id, created=self.call.created, model=self.model.name,
            choices=[self._choice(*one) for one in zip(choices, parsers, strict=True)],
            usage=self._with_reasoning(answers.usage(answers.last_counts(choices)), parsers),
            prompt_logprobs=answers.prompt_logprobs(choices, self.engine.token_texts),
            prompt_token_ids=self._prompt_ids,
            ignored_tools=self._ignored[0], ignored_input=self._ignored[1])

    def _with_reasoning(self, usage: CompletionUsage,
                        parsers: Iterable[ChoiceParser]) -> CompletionUsage:
        """The same, and how much of the completion is reasoning."""
        if self.model.thought_end:
            usage.completion_tokens_details["reasoning_tokens"] = sum(
                parser.reasoning_tokens for parser in parsers)
        return usage

    def _choice(self, one: Completion, parser: ChoiceParser) -> ChatChoice:
        parts = parser.read(one.text, last=True, ids=one.token_ids,
                            cut=one.finish_reason != STOP)
        made = message(CustomCallReader(self._customs).add(parts, last=True),
                       self._call_ids(one.index))
        made.role = self.body.answer_role()
        if self._echoed:
            made.content = self._echoed + (made.content or "")
        return ChatChoice(
            index=one.index, message=legacy_message(made) if self.body.legacy else made,
            logprobs=self._logprobs(one), finish_reason=self._reason(parser, one.finish_reason),
            stop_reason=one.stop_reason,
            token_ids=one.token_ids if self.body.return_token_ids else None,
            prompt_token_ids=self._prompt_ids or UNSET
            if self.body.return_prompt_token_ids else UNSET)

    def _logprobs(self, one: Completion | StreamDelta) -> ChatLogprobs | None:
        return answers.chat_logprobs(one.logprobs, self._texts)

    # --- as it comes ---

    async def begin(self, stream: Deltas) -> None:
        if self.body.continuous_usage:
            self._counts = UsageCounter(await stream.accepted())

    def on_deltas(self, deltas: list[StreamDelta]) -> bytes:
        return b"".join([one for delta in deltas for one in self._events(delta)])

    async def end(self) -> bytes:
        if not self.body.include_usage:
            return b""
        usage = self._with_reasoning(self._counts.usage(), self._parsers.values())
        return event(encode_json(self._chunk([], usage)))

    def _events(self, one: StreamDelta) -> Iterator[bytes]:
        """Of one delta of the engine."""
        parser = self._parsers.get(one.index)
        if parser is None:
            parser = self._parsers[one.index] = self._parser()
            self._custom_calls[one.index] = CustomCallReader(self._customs)
            # With calls and no text the content is null, which an empty string here would rule out.
            content = "" if self._tools.schemas is None else None
            yield self._event(ChatChunkChoice(index=one.index, delta=DeltaMessage(
                role=self.body.answer_role(), content=content)), first=len(self._parsers) == 1)
            if self._echoed:
                yield self._event(ChatChunkChoice(index=one.index,
                                                  delta=DeltaMessage(content=self._echoed)))
        self._counts.add(one)
        for choice in self._choices(one, parser):
            yield self._event(choice)

    def _choices(self, one: StreamDelta, parser: ChoiceParser) -> list[ChatChunkChoice]:
        """What a delta of the engine comes to: nothing, or an event or more."""
        last = one.finish_reason is not None
        parts = self._custom_calls[one.index].add(
            parser.read(one.text, last, one.token_ids, cut=one.finish_reason != STOP), last)
        ids = self._call_ids(one.index)
        out = [ChatChunkChoice(index=one.index, delta=self._delta(part, ids)) for part in parts]
        if one.finish_reason and self._tools.schemas is not None \
                and not (parser.tells or self._echoed):
            out.append(ChatChunkChoice(index=one.index, delta=DeltaMessage(content="")))
        counted = one.token_ids and (self.body.return_token_ids or self.body.continuous_usage)
        if not out and (one.finish_reason or one.logprobs or counted):
            out.append(ChatChunkChoice(index=one.index, delta=DeltaMessage()))
        if out:
            out[0].logprobs = self._logprobs(one)
            if self.body.return_token_ids:
                out[0].token_ids = one.token_ids
            out[-1].finish_reason = self._reason(parser, one.finish_reason)
            out[-1].stop_reason = one.stop_reason
        return out

    def _event(self, choice: ChatChunkChoice, first: bool = False) -> bytes:
        """first: of the stream, which has the prompt's tokens, and what the model was not shown."""
        usage = self._counts.usage() if self.body.continuous_usage else None
        chunk = self._chunk([choice], usage)
        if first:
            chunk.prompt_token_ids = UNSET if self._prompt_ids is None else self._prompt_ids
            chunk.ignored_tools, chunk.ignored_input = self._ignored
        return event(encode_json(chunk))

    def _call_ids(self, choice: int) -> CallIds:
        """Names the calls of a choice after the request, so that a resend gets the same names."""
        own = f"{self.call.name}.{choice}"
        return lambda call: f"call_{sha256(f'{own}.{call}'.encode()).hexdigest()[:24]}"

    def _chunk(self, choices: list[ChatChunkChoice],
               usage: CompletionUsage | None = None) -> ChatChunk:
        return ChatChunk(id=self._id, created=self.call.created, model=self.model.name,
                         choices=choices, usage=usage)


def delta(part: AnswerPart, call_id: CallIds) -> DeltaMessage:
    """The delta of a part, as a stream has it."""
    match part:
        case TextPart(text):
            return DeltaMessage(content=text)
        case ReasoningPart(text):
            return DeltaMessage(reasoning_content=text)
        case ToolCallBegin(call, name):
            return DeltaMessage(tool_calls=[FunctionToolCall(
                index=call, id=call_id(call), type="function", function=FunctionCall(name))])
        case ToolCallArguments(call, text):
            return DeltaMessage(tool_calls=[FunctionToolCall(
                index=call, function=FunctionCall(arguments=text))])
        case CustomToolCall(call, name, text):
            return DeltaMessage(tool_calls=[FunctionToolCall(
                index=call, id=call_id(call), type="custom", custom=CustomInput(name, text))])


def message(parts: Iterable[AnswerPart], call_id: CallIds = str) -> AssistantMessage:
    """A whole message."""
    content, reasoning = "", ""
    calls: list[FunctionToolCall] = []
    begun = FunctionCall()
    for part in parts:
        match part:
            case TextPart(text):
                content += text
            case ReasoningPart(text):
                reasoning += text
            case ToolCallBegin(call, name):
                begun = FunctionCall(name)
                calls.append(FunctionToolCall(id=call_id(call), type="function", function=begun))
            case ToolCallArguments(_, text):
                begun.arguments += text
            case CustomToolCall(call, name, text):
                calls.append(FunctionToolCall(id=call_id(call), type="custom",
                                              custom=CustomInput(name, text)))
    return AssistantMessage(content=content if content or not calls else None,
                   reasoning_content=reasoning or None, tool_calls=calls or None)


def legacy_delta(part: AnswerPart, call_id: CallIds) -> DeltaMessage:
    """The same for a request with `functions`."""
    match part:
        case ToolCallBegin(_, name):
            return DeltaMessage(function_call=FunctionCall(name))
        case ToolCallArguments(_, text):
            return DeltaMessage(function_call=FunctionCall(arguments=text))
        case _:
            return delta(part, call_id)


def legacy_message(whole: AssistantMessage) -> AssistantMessage:
    """The same message with its call as `function_call`."""
    calls, whole.tool_calls = whole.tool_calls, None
    if calls:
        whole.function_call = calls[0].function
    return whole
