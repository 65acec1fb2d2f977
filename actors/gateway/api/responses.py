"""POST `/v1/responses`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import Struct, to_builtins
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from actorium.actors.client.requests import Request
from actorium.actors.gateway.answer_events import (
    ABORT,
    STOP,
    TOOL_CALLS,
    AnswerEvent,
    ChoiceEvents,
)
from actorium.actors.gateway.api import answers
from actorium.actors.gateway.api.response_store import (
    OFF,
    ResponseKeeper,
    context_of,
    fail,
)
from actorium.actors.gateway.api.responses_body import (
    InputItem,
    ResponsesBody,
    ignored_input,
)
from actorium.actors.gateway.api.responses_output import (
    OutputBuilder,
    OutputItem,
    ResponseEvent,
    ResponseStatus,
)
from actorium.actors.gateway.api.sampling_fields import format_field, request_for, sampling
from actorium.actors.gateway.api.stored_responses import resolved
from actorium.actors.gateway.api.turn import HttpTurn
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, bad_field
from actorium.actors.gateway.http.replies import EventStream, JsonReply, encode_json, sse_event
from actorium.actors.gateway.served_model import ServedModel


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(Struct, kw_only=True):
    """The whole answer, or its part so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus = "in_progress"
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = {}
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[Any] = []
    ignored_tools: list[str] = []
    """Types of those that are not run here, and that the model was not shown."""
    ignored_input: list[str] = []
    """Types of the items and parts of items that the model was not shown."""
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class ResponsesTurn(HttpTurn):
    """One response under way. Implements `response_store.BackgroundWork`, and `CutCounts`."""

    body_type = ResponsesBody
    last_event = b""
    body: ResponsesBody
    _keeper: ResponseKeeper | None = None
    """Where the response is kept."""
    _requests: list[Request]

    def __init__(self, call: EngineCall, model: ServedModel, body: ResponsesBody) -> None:
        super().__init__(call, model, body)
        self._tools, offer = body.choice(), body.offer()
        self._answer_id = call.answer_id
        self._output = OutputBuilder(call.answer_id, offer.namespaces, body.summarises)
        self._thought = model.parsing.thought(body.template_args(), bool(self._tools.shown))
        self.answer = self.parsed_answer(customs=offer.customs)
        call.cut_counts = self
        self._event_count = 0
        self.response = ResponseObject(
            id=f"resp_{call.answer_id}", created_at=call.created, background=body.background,
            previous_response_id=body.previous_response_id,
            instructions=body.instructions, max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {}, model=model.name,
            parallel_tool_calls=body.parallel, temperature=body.temperature, top_p=body.top_p,
            reasoning={"effort": None, "summary": None} | to_builtins(body.reasoning or {}),
            text=to_builtins(body.text) if body.text is not None and body.text.format is not None
            else {"format": {"type": "text"}},
            tool_choice=body.tool_choice or "auto", tools=list(body.tools or ()),
            ignored_tools=offer.ignored,
            top_logprobs=body.top_logprobs or 0, user=body.user)

    def engine_fields(self) -> dict[str, str]:
        return {"max_tokens": "max_output_tokens", "prompt": "input", "messages": "input",
                "thinking_token_budget": "thinking_token_budget"
                if self.body.thinking_token_budget is not None else "reasoning.max_tokens",
                "structured": format_field(self.body, "tools" if self.body.text is None
                                           else "text.format")}

    @property
    def shows_token_texts(self) -> bool:
        return self.body.alternatives() is not None

    async def requests(self) -> list[Request]:
        body, store, tenant = self.body, self.call.gateway.responses, self.call.tenant
        if body.background and store is None:
            raise bad_field("background", OFF)
        context = await context_of(store, tenant, body.previous_response_id)
        items = msgspec.json.decode(context, type=list[InputItem])
        body.input = await resolved(store, tenant, body.items(), items)
        turns = list(body.turns(items))
        self.response.ignored_input = ignored_input([*items, *body.input])
        params = sampling(body, body.alternatives(), structured=self.constraint(body.structured()),
                          thinking_token_budget=self.thought_limit(body.thought_budget))
        if store is not None and body.store:
            self._keeper = ResponseKeeper(store, tenant, context, body, self._answer_id)
            self.response.store = True
        return [request_for(body, params, tenant, messages=turns,
                            template_args=body.template_args(), tools=self._tools.shown)]

    # --- in the background ---

    async def start_in_background(self, requests: list[Request]) -> bytes:
        """Continues without the caller, and returns the initial response. Raises `HttpError`."""
        assert self._keeper is not None
        self.response.status, self.response.store = "queued", True
        if not await self._keeper.put(self.response):
            raise HttpError(503, "background: the response cannot be stored", "background", SERVER)
        gateway, tenant = self.call.gateway, self.call.tenant
        queued = encode_json(self.response)
        self.call, self._requests = self.call.in_background(), requests
        self.call.answer_id = self._answer_id
        gateway.calls.add(self.call)
        gateway.jobs.start(tenant, self, self._keeper, self._left_background)
        return queued

    def _left_background(self) -> None:
        self.call.gateway.calls.discard(self.call)
        self.call.release()

    async def run(self) -> None:
        """Runs until there is a response. Raises `ActoriumError`."""
        [events] = await self.complete(self._requests)
        self._add(events)

    def failed(self, error: BaseException) -> HttpError:
        """Returns the error for an exception of the gateway's own."""
        return self.call.failed(error)

    # --- the answer ---

    async def collect(self, requests: list[Request]) -> ResponseObject:
        [events] = await self.complete(requests)
        self.response.created_at = self.call.created
        self._add(events)
        await self._keep()
        return self.response

    async def _keep(self) -> None:
        if self._keeper is not None:
            self.response.store = await self._keeper.put(self.response)

    def encode(self, event: AnswerEvent) -> bytes:
        if isinstance(event, ChoiceEvents):
            return self._written(self._add(event))
        self.response.created_at = self.call.created
        return self._written([self._status_event(f"response.{kind}")
                              for kind in ("created", "in_progress")])

    async def end(self) -> bytes:
        await self._keep()  # before its caller hears of the end, and asks for it
        return self._written([self._status_event(f"response.{self.response.status}")])

    async def error_events(self, error: HttpError) -> bytes:
        out = self._output.close("incomplete")
        self._end("failed")
        fail(self.response, error)
        await self._keep()
        return self._written([*out, self._status_event("response.failed")])

    def counts(self) -> tuple[int, ...]:
        """As `CutCounts`."""
        return self._event_count, *self._output.ends

    def restore(self, counts: tuple[int, ...]) -> None:
        """As `CutCounts`."""
        self._event_count = counts[0] if counts else 0
        self._output.restore(counts[1:])

    def _add(self, events: ChoiceEvents) -> list[ResponseEvent]:
        """Adds to the response, and ends it with the last ones."""
        logprobs = answers.chat_logprobs(events.logprobs, self.engine.token_texts)
        out = self._output.add(events.parts, logprobs.content if logprobs is not None else None)
        reason = events.finish_reason
        if reason is not None:
            status: ResponseStatus = "completed" if reason in (STOP, TOOL_CALLS) else "incomplete"
            out += self._output.close(status)
            self._end(status)
            if status == "incomplete":
                self.response.incomplete_details = {
                    "reason": "aborted" if reason == ABORT else "max_output_tokens"}
        return out

    def _end(self, status: ResponseStatus) -> None:
        used = answers.completion_usage(self.answer.usage())
        self.response.status, self.response.output = status, self._output.items
        self.response.usage = ResponseUsage(
            input_tokens=used.prompt_tokens,
            input_tokens_details={"cache_write_tokens": 0} | used.prompt_tokens_details,
            output_tokens=used.completion_tokens,
            output_tokens_details={"reasoning_tokens": self.answer.reasoning_tokens},
            total_tokens=used.total_tokens)

    def _status_event(self, kind: str) -> ResponseEvent:
        # Encoded now: the response goes on changing.
        return ResponseEvent(type=kind, response=msgspec.Raw(encode_json(self.response)))

    def _written(self, events: Iterable[ResponseEvent]) -> bytes:
        out = []
        for one in events:
            one.sequence_number = self._event_count
            self._event_count += 1
            out.append(sse_event(one, one.type))
        return b"".join(out)


async def create(http: HttpRequest) -> HttpResponse | EventStream:
    """Handles POST `/v1/responses`."""
    turn, requests = await ResponsesTurn.begin(http)
    if turn.body.background:
        return JsonReply(await turn.start_in_background(requests))
    return await turn.respond(requests)
