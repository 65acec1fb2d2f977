"""`/v1/responses`, and the operations on a stored response: retrieve, delete, cancel, list its
input.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import Struct, to_builtins
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from actorium.actors.client.requests import Completion, Request, StreamDelta
from actorium.actors.gateway.api import answers
from actorium.actors.gateway.api.answers import UsageCounter
from actorium.actors.gateway.api.chat_protocol import CompletionUsage
from actorium.actors.gateway.api.item_references import resolved
from actorium.actors.gateway.api.response_formats import format_field
from actorium.actors.gateway.api.response_store import (
    OFF,
    RUNNING,
    ResponseKeeper,
    ResponseStore,
    StoredResponse,
    context_of,
    fail,
    orphaned,
)
from actorium.actors.gateway.api.responses_body import (
    InputBody,
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
from actorium.actors.gateway.api.sampling_fields import request_for, sampling
from actorium.actors.gateway.api.tokens import prompt_ids
from actorium.actors.gateway.api.tool_choice import MAX_CALLS
from actorium.actors.gateway.api.turn import HttpTurn
from actorium.actors.gateway.engine_call import EngineCall, call_of, engine_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import SERVER, HttpError
from actorium.actors.gateway.http.replies import EventStream, JsonReply, encode_json
from actorium.actors.gateway.parsers.choice_parser import STOP, ChoiceParser
from actorium.actors.gateway.parsers.custom_calls import CustomCallReader
from actorium.actors.gateway.served_model import ServedModel

MAX_LISTED = 100


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
    reasoning: dict[str, str | None] = {}
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
    """One response under way. Implements `response_store.BackgroundWork`."""

    body_type = ResponsesBody
    last_event = b""
    body: ResponsesBody
    _keeper: ResponseKeeper | None = None
    """Where the response is kept."""
    _requests: list[Request]

    def __init__(self, call: EngineCall, model: ServedModel, body: ResponsesBody) -> None:
        super().__init__(call, model, body)
        self._tools, offer = body.choice(), body.offer()
        self._name = name = call.answer_id
        self._output = OutputBuilder(name, offer.namespaces, body.summarises)
        self._custom_calls = CustomCallReader(offer.customs)
        self._thought = model.parsing.thought(body.template_args(), bool(self._tools.shown))
        parser = model.parsing.parser(self._tools.schemas, self._tools.forced, True, self._thought)
        self._parser = ChoiceParser(parser, True, MAX_CALLS if body.parallel else 1,
                                    model.thought_end)
        self._counts = UsageCounter()
        self._events_told = 0
        self.response = ResponseObject(
            id=f"resp_{name}", created_at=call.created, background=body.background,
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
                "structured": format_field(self.body, "tools" if self.body.text is None
                                           else "text.format")}

    @property
    def tells_token_texts(self) -> bool:
        return self.body.alternatives() is not None

    async def requests(self) -> list[Request]:
        body, store, tenant = self.body, self.engine.responses, self.call.tenant
        if body.background and store is None:
            raise HttpError(400, f"background: {OFF}", "background")
        context = await context_of(store, tenant, body.previous_response_id)
        items = msgspec.json.decode(context, type=list[InputItem])
        body.input = await resolved(store, tenant, body.items(), items)
        turns = list(body.turns(items))
        self.response.ignored_input = ignored_input([*items, *body.input])
        structured = self.constraint(body.structured(), body.thinking_token_budget)
        params = sampling(body, body.alternatives(), structured=structured)
        if store is not None and body.store:
            self._keeper = ResponseKeeper(store, tenant, context, body, self._name)
        return [request_for(body, params, tenant, messages=turns,
                            template_args=body.template_args(), tools=self._tools.shown)]

    async def respond(self, requests: list[Request]) -> HttpResponse | EventStream:
        if self.body.background:
            return JsonReply(await self._start_in_background(requests))
        self.response.store = self._keeper is not None
        return await super().respond(requests)

    # --- all at once ---

    async def collect(self, requests: list[Request]) -> ResponseObject:
        [[one]] = await self.call.complete(requests)
        self.response.created_at = self.call.created
        self._add(one)
        self._finish(one, answers.usage([one.usage]))
        await self._keep()
        return self.response

    async def _keep(self) -> None:
        if self._keeper is not None:
            self.response.store = await self._keeper.put(self.response)

    # --- in the background ---

    async def _start_in_background(self, requests: list[Request]) -> bytes:
        """Continues without the caller, and returns the initial response. Raises `HttpError`."""
        assert self._keeper is not None
        self.response.status, self.response.store = "queued", True
        if not await self._keeper.put(self.response):
            raise HttpError(503, "background: the response cannot be stored", "background", SERVER)
        begun, calls, tenant = encode_json(self.response), self.engine.calls, self.call.tenant
        self.call, self._requests = self.call.in_background(), requests
        self.call.answer_id = self._name
        calls.add(self.call)
        self.engine.jobs.start(tenant, self, self._keeper, lambda: calls.discard(self.call))
        return begun

    async def run(self) -> None:
        """Runs until there is a response. Raises `ActoriumError`."""
        [[one]] = await self.call.complete(self._requests)
        self._add(one)
        self._finish(one, answers.usage([one.usage]))

    def failed(self, error: BaseException) -> HttpError:
        """Returns the error for an exception of the gateway's own."""
        return self.call.failed(error)

    # --- as it comes ---

    def on_deltas(self, deltas: list[StreamDelta]) -> bytes:
        out: list[ResponseEvent] = []
        if not self._events_told:
            self.response.created_at = self.call.created
            out = [self._status_event(f"response.{kind}") for kind in ("created", "in_progress")]
        for one in deltas:
            self._counts.add(one)
            out += self._add(one)
            if one.finish_reason is not None:
                out += self._finish(one, self._counts.usage())
        return self._written(out)

    def counts(self) -> tuple[int, ...]:
        return self._events_told, *self._output.ends

    def restore(self, counts: tuple[int, ...]) -> None:
        self._events_told = counts[0] if counts else 0
        self._output.restore(counts[1:])

    async def end(self) -> bytes:
        await self._keep()  # before its caller hears of the end, and asks for it
        return self._written([self._status_event(f"response.{self.response.status}")])

    async def refusal(self, error: HttpError) -> bytes:
        out = self._output.close("incomplete")
        self._end("failed", self._counts.usage())
        fail(self.response, error)
        await self._keep()
        return self._written([*out, self._status_event("response.failed")])

    def _add(self, one: Completion | StreamDelta) -> list[ResponseEvent]:
        logprobs = answers.chat_logprobs(one.logprobs, self.engine.token_texts)
        last = one.finish_reason is not None
        parts = self._custom_calls.add(
            self._parser.read(one.text, last, one.token_ids, cut=one.finish_reason != STOP), last)
        return self._output.add(parts, logprobs.content if logprobs is not None else None)

    def _finish(self, one: Completion | StreamDelta, used: CompletionUsage) -> list[ResponseEvent]:
        """Ends the last item and the response."""
        whole = one.finish_reason == "stop"
        status: ResponseStatus = "completed" if whole else "incomplete"
        out = self._output.close(status)
        self._end(status, used)
        if not whole:
            aborted = one.finish_reason == "abort"
            self.response.incomplete_details = {
                "reason": "aborted" if aborted else "max_output_tokens"}
        return out

    def _end(self, status: ResponseStatus, used: CompletionUsage) -> None:
        self.response.status, self.response.output = status, self._output.items
        self.response.usage = ResponseUsage(
            input_tokens=used.prompt_tokens,
            input_tokens_details={"cache_write_tokens": 0} | used.prompt_tokens_details,
            output_tokens=used.completion_tokens,
            output_tokens_details={"reasoning_tokens": self._parser.reasoning_tokens},
            total_tokens=used.total_tokens)

    def _status_event(self, kind: str) -> ResponseEvent:
        # Encoded now: the response goes on changing.
        return ResponseEvent(type=kind, response=msgspec.Raw(encode_json(self.response)))

    def _written(self, events: Iterable[ResponseEvent]) -> bytes:
        out = []
        for one in events:
            one.sequence_number = self._events_told
            self._events_told += 1
            out.append(b"event: %b\ndata: %b\n\n" % (one.type.encode(), encode_json(one)))
        return b"".join(out)


def _addressed(http: HttpRequest) -> tuple[ResponseStore | None, str, str]:
    """Returns (store, tenant, id)."""
    call = call_of(http)
    return call.engine.responses, call.tenant, http.path_params["id"]


async def _stored(http: HttpRequest) -> StoredResponse:
    """Raises `HttpError` 404, also for another tenant's."""
    store, tenant, name = _addressed(http)
    if store is None:
        raise HttpError(404, f"id: {name[:100]!r} is not known: {OFF}", "id", code="not_found")
    found = await store.get(tenant, name)
    if found is None:
        raise HttpError(404, f"id: there is no response {name[:100]!r}", "id", code="not_found")
    ended = orphaned(found)
    if ended is not None:
        await store.update(tenant, name, "failed", ended)
        found = found._replace(status="failed", response=ended)
    return found


async def retrieve(http: HttpRequest) -> HttpResponse:
    """Handles GET `/v1/responses/{id}`."""
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise HttpError(400, "stream: a stored response is not streamed; ask until its status is "
                        "neither queued nor in_progress", "stream")
    return JsonReply((await _stored(http)).response)


async def delete(http: HttpRequest) -> HttpResponse:
    """Handles DELETE `/v1/responses/{id}`; ends one that is under way."""
    await _stored(http)
    store, tenant, name = _addressed(http)
    assert store is not None
    await store.delete(tenant, name)
    engine_of(http).jobs.cancel(tenant, name)
    return JsonReply(encode_json({"id": name, "object": "response.deleted", "deleted": True}))


async def cancel(http: HttpRequest) -> HttpResponse:
    """Handles POST `/v1/responses/{id}/cancel`; one that has ended stays as it is."""
    stored = await _stored(http)
    store, tenant, name = _addressed(http)
    assert store is not None
    shown: dict[str, Any] = msgspec.json.decode(stored.response)
    if not shown["background"]:
        raise HttpError(400, "id: only responses with background=true can be cancelled", "id")
    if stored.status in RUNNING:
        response = encode_json(shown | {"status": "cancelled"})
        await store.update(tenant, name, "cancelled", response)
        engine_of(http).jobs.cancel(tenant, name)
        stored = await _stored(http)
    return JsonReply(stored.response)


async def input_items(http: HttpRequest) -> HttpResponse:
    """Handles GET `/v1/responses/{id}/input_items`: the request's own items, the last first."""
    items: list[dict[str, Any]] = msgspec.json.decode((await _stored(http)).input)
    query = http.query_params
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise HttpError(400, "order: must be asc or desc", "order")
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
        raise HttpError(400, f"limit: must be between 1 and {MAX_LISTED}", "limit")
    listed = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise HttpError(400, f"after: there is no item {after[:100]!r}", "after")
        listed = listed[places[0] + 1:]
    shown = listed[:int(limit)]
    return JsonReply(encode_json({
        "object": "list", "data": shown, "has_more": len(shown) < len(listed),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None}))


async def input_tokens(http: HttpRequest) -> HttpResponse:
    """Handles POST `/v1/responses/input_tokens`: counts the tokens of the body's prompt."""
    call, body = call_of(http), await bodies.read(http, InputBody)
    engine = call.engine
    body.check()
    await engine.check_model(body.model)
    context = await context_of(engine.responses, call.tenant, body.previous_response_id)
    items = msgspec.json.decode(context, type=list[InputItem])
    body.input = await resolved(engine.responses, call.tenant, body.items(), items)
    ids = await prompt_ids(engine.client, body.prompted(items))
    return JsonReply(encode_json({"object": "response.input_tokens", "input_tokens": len(ids)}))
