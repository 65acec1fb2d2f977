"""`/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from time import time
from typing import Any, Literal

import msgspec
from msgspec import Struct, to_builtins
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from actorium.actors.client.requests import Completion, Request, StreamDelta
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.engine_call import Ask
from actorium.actors.gateway.faces import answers
from actorium.actors.gateway.faces.answers import Running
from actorium.actors.gateway.faces.response_store import (
    OFF,
    RUNNING,
    Keeping,
    ResponseStore,
    Stored,
    context_of,
    fail,
    orphaned,
)
from actorium.actors.gateway.faces.responses_body import InputBody, ResponsesBody
from actorium.actors.gateway.faces.responses_body import Item as InputItem
from actorium.actors.gateway.faces.responses_output import Event, Item, Output, Status
from actorium.actors.gateway.faces.sampling_fields import request_for, sampling
from actorium.actors.gateway.faces.tokens import prompt_ids
from actorium.actors.gateway.faces.tool_choice import MAX_TOOLS
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.guard import Reply, caller, engine_of
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, http_error
from actorium.actors.gateway.http.sse import EventStream
from actorium.actors.gateway.parsers.choice_parser import Reader
from actorium.actors.gateway.resume.delta_streams import together
from actorium.actors.gateway.served_engine import Engine, Facts

_encode = msgspec.json.Encoder().encode


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(Struct, kw_only=True):
    """The whole answer, or what there is of it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, str | None] = {}
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


async def responses(http: HttpRequest) -> HttpResponse | EventStream:
    """The route."""
    engine = engine_of(http)
    body = await bodies.read(http, ResponsesBody)
    body.check()
    await engine.serves(body.model)
    who, store = caller(http), engine.responses
    engine.ask.fields = {"max_tokens": "max_output_tokens", "prompt": "input",
                         "messages": "input"}
    if body.background and store is None:
        raise HttpError(400, f"background: {OFF}", "background")
    context = await context_of(store, who.tenant, body.previous_response_id)
    if body.background:
        engine = engine.asked(Ask({}, who.tenant, http.url.path, engine.journal))
    one = Responding(engine, await engine.facts(), body, who.request_id,
                     msgspec.json.decode(context, type=list[InputItem]), who.tenant)
    if body.alternatives() is not None:
        await engine.pieces.ready()
    if store is not None and body.store:
        one.keeping = Keeping(store, who.tenant, context, body, one.name)
    if body.background:
        return Reply(await one.begin())
    if body.stream:
        return EventStream(one.events(), last=b"")
    return Reply(_encode(await one.whole()))


class Responding:
    """One request under way. Implements `responses_keeping.Work`."""

    keeping: Keeping | None = None
    """Where the response is kept."""

    def __init__(self, engine: Engine, facts: Facts, body: ResponsesBody, request_id: str,
                 context: list[InputItem], tenant: str) -> None:
        """context: the items before the request's own. Raises `HttpError` on what does not fit
        together."""
        self._engine, self._facts, self._body = engine, facts, body
        self._tools = body.choice()
        self._tenant = tenant
        self.name = name = answers.name_of(body.request_id, request_id)
        self._output = Output(name)
        self._reader = self._new_reader()
        self._number = 0
        self._request = self._asked(context)
        self.response = Response(
            id=f"resp_{name}", created_at=int(time()), background=body.background,
            previous_response_id=body.previous_response_id,
            instructions=body.instructions, max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {}, model=facts.model,
            parallel_tool_calls=body.parallel, temperature=body.temperature, top_p=body.top_p,
            reasoning={"effort": None, "summary": None} | to_builtins(body.reasoning or {}),
            text=to_builtins(body.text) if body.text is not None and body.text.format is not None
            else {"format": {"type": "text"}},
            tool_choice=body.tool_choice or "auto", tools=list(body.tools or ()),
            top_logprobs=body.top_logprobs or 0, user=body.user)

    def _new_reader(self) -> Reader:
        tools, body = self._tools, self._body
        machine = self._facts.parsing.machine(tools.schemas, tools.forced, True,
                                              body.template_args())
        return Reader(machine, True, MAX_TOOLS if body.parallel else 1)

    def _asked(self, context: list[InputItem]) -> Request:
        """What the engine is asked. Raises `HttpError`."""
        body = self._body
        structured = self._tools.structured(body.structured())
        most = body.max_output_tokens
        params = sampling(body, body.alternatives(), structured=structured,
                          max_tokens=body.max_tokens if most is None else most)
        return request_for(body, params, self._tenant, messages=list(body.turns(context)),
                           template_args=body.template_args(), tools=self._tools.shown)

    # --- all at once ---

    async def whole(self) -> Response:
        """The answer. Raises `ActoriumError`."""
        self.response.store = self.keeping is not None
        await self.run()
        await self._keep()
        return self.response

    async def run(self) -> None:
        """Until there is a response. Raises `ActoriumError`."""
        [choices] = await self._engine.complete([self._request])
        self._take(choices[0])
        self._finish(choices[0], answers.usage(answers.last_counts(choices)))

    def failed(self, error: BaseException) -> HttpError:
        """As the gateway tells it."""
        return self._engine.ask.failed(error)

    async def begin(self) -> bytes:
        """Have it go on without the caller, who is told how it begins. Raises `HttpError`."""
        assert self.keeping is not None
        self.response.status, self.response.store = "queued", True
        if not await self.keeping.put(self.response):
            raise HttpError(503, "background: the response cannot be stored", "background", SERVER)
        told, engine = _encode(self.response), self._engine
        engine.ask.answer_id = self.name
        engine.asks.add(engine.ask)
        engine.jobs.start(self._tenant, self, self.keeping,
                          lambda: engine.asks.discard(engine.ask))
        return told

    async def _keep(self) -> None:
        if self.keeping is not None:
            self.response.store = await self.keeping.put(self.response)

    def _take(self, one: Completion | StreamDelta) -> list[Event]:
        told = answers.chat_logprobs(one.logprobs, self._engine.pieces)
        pieces = self._reader.read(one.text, last=one.finish_reason is not None)
        return self._output.take(pieces, told.content if told is not None else None)

    def _finish(self, one: Completion | StreamDelta, used: answers.Usage) -> list[Event]:
        """The last item ends, and with it the response."""
        whole = one.finish_reason == "stop"
        status: Status = "completed" if whole else "incomplete"
        out = self._output.close(status)
        self._end(status, used)
        if not whole:
            aborted = one.finish_reason == "abort"
            self.response.incomplete_details = {
                "reason": "aborted" if aborted else "max_output_tokens"}
        return [*out, self._told(f"response.{status}")]

    def _end(self, status: Status, used: answers.Usage) -> None:
        self.response.status, self.response.output = status, self._output.items
        self.response.usage = ResponseUsage(
            input_tokens=used.prompt_tokens,
            input_tokens_details={"cache_write_tokens": 0} | used.prompt_tokens_details,
            output_tokens=used.completion_tokens, output_tokens_details={"reasoning_tokens": 0},
            total_tokens=used.total_tokens)

    # --- as it comes ---

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the stream. An error after the first one is an event as well."""
        self.response.store = self.keeping is not None
        async with self._engine.stream(self._request) as deltas:
            counts, begun = Running(), False
            try:
                async for several in together(deltas):
                    out = [] if begun else [self._told("response.created"),
                                            self._told("response.in_progress")]
                    begun = True
                    for one in several:
                        counts.add(one)
                        out += self._take(one)
                        if one.finish_reason is not None:
                            out += self._finish(one, counts.usage())
                    if self.response.status != "in_progress":
                        await self._keep()  # before its caller hears of the end, and asks for it
                    if out:
                        yield self._written(out)
            except ActoriumError as error:
                if not begun:
                    raise
                out = self._failed(http_error(error), counts)
                await self._keep()
                yield self._written(out)

    def _failed(self, error: HttpError, counts: Running) -> list[Event]:
        out = self._output.close("incomplete")
        self._end("failed", counts.usage())
        fail(self.response, error)
        return [*out, self._told("response.failed")]

    def _told(self, kind: str) -> Event:
        # Encoded now: the response goes on changing.
        return Event(type=kind, response=msgspec.Raw(_encode(self.response)))

    def _written(self, events: Iterable[Event]) -> bytes:
        out = []
        for one in events:
            one.sequence_number = self._number
            self._number += 1
            out.append(b"event: %b\ndata: %b\n\n" % (one.type.encode(), _encode(one)))
        return b"".join(out)


MAX_LISTED = 100


def _asked(http: HttpRequest) -> tuple[ResponseStore | None, str, str]:
    """(store, tenant, id)"""
    return engine_of(http).responses, caller(http).tenant, http.path_params["id"]


async def _stored(http: HttpRequest) -> Stored:
    """Raises `HttpError` 404, also for another tenant's."""
    store, tenant, name = _asked(http)
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
    """GET `/v1/responses/{id}`."""
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise HttpError(400, "stream: a stored response is not streamed; ask until its status is "
                        "neither queued nor in_progress", "stream")
    return Reply((await _stored(http)).response)


async def delete(http: HttpRequest) -> HttpResponse:
    """DELETE `/v1/responses/{id}`; one that is under way ends."""
    await _stored(http)
    store, tenant, name = _asked(http)
    assert store is not None
    await store.delete(tenant, name)
    engine_of(http).jobs.cancel(tenant, name)
    return Reply(_encode({"id": name, "object": "response.deleted", "deleted": True}))


async def cancel(http: HttpRequest) -> HttpResponse:
    """POST `/v1/responses/{id}/cancel`; one that has ended stays as it is."""
    stored = await _stored(http)
    store, tenant, name = _asked(http)
    assert store is not None
    told: dict[str, Any] = msgspec.json.decode(stored.response)
    if not told["background"]:
        raise HttpError(400, "id: only responses with background=true can be cancelled", "id")
    if stored.status in RUNNING:
        response = _encode(told | {"status": "cancelled"})
        await store.update(tenant, name, "cancelled", response)
        engine_of(http).jobs.cancel(tenant, name)
        stored = await _stored(http)
    return Reply(stored.response)


async def input_items(http: HttpRequest) -> HttpResponse:
    """GET `/v1/responses/{id}/input_items`: those of the request itself, the last first."""
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
    return Reply(_encode({"object": "list", "data": shown, "has_more": len(shown) < len(listed),
                          "first_id": shown[0]["id"] if shown else None,
                          "last_id": shown[-1]["id"] if shown else None}))


async def input_tokens(http: HttpRequest) -> HttpResponse:
    """POST `/v1/responses/input_tokens`: of the prompt that the body becomes."""
    engine, body = engine_of(http), await bodies.read(http, InputBody)
    body.check()
    await engine.serves(body.model)
    context = await context_of(engine.responses, caller(http).tenant, body.previous_response_id)
    items = msgspec.json.decode(context, type=list[InputItem])
    ids = await prompt_ids(engine.client, body.prompted(items))
    return Reply(_encode({"object": "response.input_tokens", "input_tokens": len(ids)}))
