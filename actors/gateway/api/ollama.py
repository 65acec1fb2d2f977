"""Ollama's `/api/chat` and `/api/generate`: chats whose answers are lines of JSON."""

from __future__ import annotations

import json
from time import monotonic
from typing import Any, ClassVar

from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Request
from actorium.actors.config.reasoning_formats import NONE
from actorium.actors.gateway.answer_events import (
    TOOL_CALLS,
    AnswerEvent,
    ChoiceEvents,
    DeltaReader,
)
from actorium.actors.gateway.api.answers import ContentLogprob, chat_logprobs
from actorium.actors.gateway.api.chat_completions import CallIds, ChatTurn
from actorium.actors.gateway.api.fill_in_middle import fill_in_middle
from actorium.actors.gateway.api.ollama_body import HONOURED, OllamaChatBody, OllamaGenerateBody
from actorium.actors.gateway.api.ollama_models import rfc3339, unload
from actorium.actors.gateway.api.sampling_fields import request_for, sampling, structured_of
from actorium.actors.gateway.engine_call import EngineCall, call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.http.replies import NDJSON, EventStream, JsonReply, json_line
from actorium.actors.gateway.parsers.custom_calls import AnswerPart
from actorium.actors.gateway.parsers.parts import (
    ReasoningPart,
    ToolCallArguments,
    ToolCallBegin,
)
from actorium.actors.gateway.parsers.thoughts import Thought
from actorium.actors.gateway.served_model import ServedModel


class OllamaFunctionCall(Struct, kw_only=True):
    index: int
    name: str
    arguments: Raw
    """An object."""


class OllamaCall(Struct, kw_only=True):
    id: str
    function: OllamaFunctionCall


class OllamaMessage(Struct, kw_only=True, omit_defaults=True):
    """The new part of a message, or all of it."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaLine(Struct, kw_only=True, omit_defaults=True):
    """A line of a stream, or the whole answer: the fields of both routes. Durations are in
    nanoseconds."""

    model: str
    created_at: str
    message: OllamaMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str = ""
    done: bool
    done_reason: str = ""
    """stop | length | load | unload | abort"""
    logprobs: list[ContentLogprob] = []
    total_duration: int = 0
    load_duration: int = 0
    """Until the engine could take the request."""
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    """From there to the first token: waiting in the queue is part of it."""
    eval_count: int = 0
    eval_duration: int = 0


class AnswerText(Struct):
    """The text of an answer, or the new part of it."""

    content: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = []
    logprobs: list[ContentLogprob] = []

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)

    def add(self, more: AnswerText) -> None:
        """Appends more of the answer."""
        self.content += more.content
        self.thinking += more.thinking
        self.calls.extend(more.calls)
        self.logprobs.extend(more.logprobs)


class CallAssembler:
    """Assembles calls from their parts: clients of Ollama get them whole."""

    def __init__(self, call_id: CallIds) -> None:
        self._call_id = call_id
        self._begun: ToolCallBegin | None = None
        self._arguments: list[str] = []

    def add(self, part: AnswerPart, text: AnswerText) -> None:
        """Adds a part of the answer, and to `text` what is known now."""
        if isinstance(part, ToolCallArguments):
            self._arguments.append(part.text)
            return
        self.end(text)
        if isinstance(part, ToolCallBegin):
            self._begun = part
        elif isinstance(part, ReasoningPart):
            text.thinking += part.text
        else:
            text.content += part.text

    def end(self, text: AnswerText) -> None:
        """Adds the call that has begun, if there is one. Without whole arguments it cannot be run,
        and its arguments are text."""
        begun, self._begun = self._begun, None
        arguments, self._arguments = "".join(self._arguments), []
        if begun is None:
            return
        if arguments and not _is_object(arguments):
            text.content += arguments
            return
        function = OllamaFunctionCall(index=begun.call, name=begun.name,
                                      arguments=Raw((arguments or "{}").encode()))
        text.calls.append(OllamaCall(id=self._call_id(begun), function=function))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class OllamaTurn(ChatTurn):
    """One answer under way, of either route."""

    form = NDJSON
    last_event = b""

    def __init__(self, call: EngineCall, model: ServedModel,
                 asked: OllamaChatBody | OllamaGenerateBody) -> None:
        super().__init__(call, model, asked.as_chat())
        self._asked = asked
        self._name = asked.model or model.name
        if asked.think and model.parsing.reasoning == NONE:
            raise bad_field("think", f"{self._name!r} does not support thinking")
        self._calls = CallAssembler(self._call_id(0))
        self._ready_at = call.began
        """When the engine could take the request, CLOCK_MONOTONIC seconds."""
        self._first_at: float | None = None
        """When its first token came."""

    @classmethod
    async def handle(cls, http: HttpRequest) -> Response | EventStream:
        call, body = call_of(http), await bodies.read(http, cls.body_type)
        call.event_end = cls.form.event_end
        body.check()
        if body.is_empty and body.keep_seconds == 0:
            await unload(call, body.model or "")
            return JsonReply(OllamaLine(model=body.model or "", created_at=rfc3339(call.created),
                                           done=True, done_reason="unload"))
        turn = await cls.of_body(call, body)
        turn._ready_at = monotonic()
        if body.is_empty:
            return JsonReply(turn._line(AnswerText(), "load"))
        return await turn.respond(await turn.ready_requests())

    def engine_fields(self) -> dict[str, str]:
        images = {f"messages[{i}].content[{j}].image_url": f"messages[{i}].images[{j}]"
                  for i, turn in enumerate(self.body.messages)
                  for j, _ in enumerate(turn.content or ()) if not isinstance(turn.content, str)}
        return {"structured": "tools" if self._asked.format is None else "format", **images,
                **{theirs: f"options.{name}" for name, theirs in HONOURED.items()}}

    # --- the answer ---

    async def collect(self, requests: list[Request]) -> OllamaLine:  # type: ignore[override]
        whole, reason = AnswerText(), ""
        async with self.call.stream(*requests) as stream:
            async for delta in stream:
                self.call.admitted(stream)
                for event in self.answer.read(delta):
                    if isinstance(event, ChoiceEvents):
                        whole.add(self._text(event))
                        reason = event.finish_reason or reason
        return self._line(whole, reason)

    def encode(self, event: AnswerEvent) -> bytes:
        if not isinstance(event, ChoiceEvents):
            return b""
        text = self._text(event)
        lines = [json_line(self._line(text))] if text else []
        if event.finish_reason is not None:
            lines.append(json_line(self._line(AnswerText(), event.finish_reason)))
        return b"".join(lines)

    async def end(self) -> bytes:
        return b""

    async def error_events(self, error: HttpError) -> bytes:
        return json_line(error.ollama_body())

    def _text(self, event: ChoiceEvents) -> AnswerText:
        if self._first_at is None:
            self._first_at = monotonic()
        text = AnswerText()
        for part in event.parts:
            self._calls.add(part, text)
        if event.finish_reason is not None:
            self._calls.end(text)
        if (logprobs := chat_logprobs(event.logprobs, self._texts)) is not None:
            text.logprobs = logprobs.content
        return text

    def _line(self, text: AnswerText, reason: str = "") -> OllamaLine:
        """reason: why the answer has ended, if it has."""
        line = self._shown(text)
        if reason:
            line.done, line.done_reason = True, "stop" if reason == TOOL_CALLS else reason
            used = self.answer.usage()
            line.prompt_eval_count, line.eval_count = used.prompt_tokens, used.completion_tokens
            if not self.call.resumable:  # sent again, it would take another time
                self._add_durations(line)
        return line

    def _add_durations(self, line: OllamaLine) -> None:
        began, now = self.call.began, monotonic()
        line.total_duration = _nanoseconds(now - began)
        line.load_duration = _nanoseconds(self._ready_at - began)
        if self._first_at is not None:
            line.prompt_eval_duration = _nanoseconds(self._first_at - self._ready_at)
            line.eval_duration = _nanoseconds(now - self._first_at)

    def _shown(self, text: AnswerText) -> OllamaLine:
        message = OllamaMessage(role="assistant", content=text.content, thinking=text.thinking,
                                tool_calls=text.calls)
        return OllamaLine(model=self._name, created_at=rfc3339(self.call.created),
                          message=message, done=False, logprobs=text.logprobs)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class OllamaChatTurn(OllamaTurn):
    """One answer of `/api/chat`."""

    body_type: ClassVar[Any] = OllamaChatBody


class OllamaGenerateTurn(OllamaTurn):
    """One answer of `/api/generate`."""

    body_type: ClassVar[Any] = OllamaGenerateBody

    def __init__(self, call: EngineCall, model: ServedModel, asked: OllamaGenerateBody) -> None:
        super().__init__(call, model, asked)
        self._prompt, self._suffix = asked.prompt, asked.suffix
        without_template = not (model.templates.plain or asked.system or asked.images)
        self._is_text = asked.raw or bool(asked.suffix) or without_template
        """The prompt is no conversation."""
        if self._is_text:
            self._thought, self.answer = Thought.NONE, DeltaReader()
            self.body.skip_special_tokens = True

    async def requests(self) -> list[Request]:
        if not self._is_text:
            return await super().requests()
        body, more = self.body, dict[str, Any]()
        prompt: str | list[int] = self._prompt
        if self._suffix:
            infill = await fill_in_middle(self.engine, self.model, self._prompt, self._suffix)
            more, prompt = {"stop_token_ids": infill.stop_token_ids}, infill.ids
        params = sampling(body, body.alternatives(), structured=structured_of(body), **more)
        return [request_for(body, params, self.call.tenant, prompt=prompt)]

    def _shown(self, text: AnswerText) -> OllamaLine:
        return OllamaLine(
            model=self._name, created_at=rfc3339(self.call.created), done=False,
            logprobs=text.logprobs, response=text.content, thinking=text.thinking)
