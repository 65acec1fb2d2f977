"""`/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from time import time
from typing import Any, Literal

import msgspec
from msgspec import Struct, to_builtins
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from actorium.actors.client_requests import Completion, Request, StreamDelta
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway import answers, bodies
from actorium.actors.gateway.answers import Running
from actorium.actors.gateway.engine import Engine, Facts
from actorium.actors.gateway.errors import HttpError, http_error
from actorium.actors.gateway.fields import request_for, sampling
from actorium.actors.gateway.guard import Reply, caller, engine_of
from actorium.actors.gateway.message import Reader
from actorium.actors.gateway.responses_body import ResponsesBody
from actorium.actors.gateway.responses_output import Event, Item, Output, Status
from actorium.actors.gateway.sse import EventStream
from actorium.actors.gateway.streams import together
from actorium.actors.gateway.tools import MAX_TOOLS

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
    previous_response_id: None = None
    reasoning: dict[str, str | None] = {}
    store: Literal[False] = False
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
    one = Responding(engine, await engine.facts(), body, caller(http).request_id)
    request = one.request(caller(http).tenant)
    if body.alternatives() is not None:
        await engine.pieces.ready()
    if body.stream:
        return EventStream(one.events(request), last=b"")
    return Reply(_encode(await one.whole(request)))


class Responding:
    """One request under way."""

    def __init__(self, engine: Engine, facts: Facts, body: ResponsesBody, request_id: str) -> None:
        """Raises `HttpError` on tools that do not fit together."""
        self._engine, self._facts, self._body = engine, facts, body
        self._tools = body.choice()
        name = answers.name_of(body.request_id, request_id)
        self._output = Output(name)
        self._reader = self._new_reader()
        self._number = 0
        self._response = Response(
            id=f"resp_{name}", created_at=int(time()),
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

    def request(self, tenant: str) -> Request:
        """What the engine is asked. Raises `HttpError`."""
        body = self._body
        structured = self._tools.structured(body.structured())
        most = body.max_output_tokens
        params = sampling(body, body.alternatives(), structured=structured,
                          max_tokens=body.max_tokens if most is None else most)
        return request_for(body, params, tenant, messages=body.turns(),
                           template_args=body.template_args(), tools=self._tools.shown)

    # --- all at once ---

    async def whole(self, request: Request) -> Response:
        """The answer. Raises `ActoriumError`."""
        [choices] = await self._engine.complete([request])
        self._take(choices[0])
        self._finish(choices[0], answers.usage(answers.last_counts(choices)))
        return self._response

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
            self._response.incomplete_details = {"reason": "max_output_tokens"}
        return [*out, self._told(f"response.{status}")]

    def _end(self, status: Status, used: answers.Usage) -> None:
        self._response.status, self._response.output = status, self._output.items
        self._response.usage = ResponseUsage(
            input_tokens=used.prompt_tokens,
            input_tokens_details={"cache_write_tokens": 0} | used.prompt_tokens_details,
            output_tokens=used.completion_tokens, output_tokens_details={"reasoning_tokens": 0},
            total_tokens=used.total_tokens)

    # --- as it comes ---

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The events of the stream. An error after the first one is an event as well."""
        async with self._engine.stream(request) as deltas:
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
                    if out:
                        yield self._written(out)
            except ActoriumError as error:
                if not begun:
                    raise
                yield self._written(self._failed(http_error(error), counts))

    def _failed(self, error: HttpError, counts: Running) -> list[Event]:
        out = self._output.close("incomplete")
        self._end("failed", counts.usage())
        self._response.error = {"code": "server_error", "message": error.message}
        return [*out, self._told("response.failed")]

    def _told(self, kind: str) -> Event:
        # Encoded now: the response goes on changing.
        return Event(type=kind, response=msgspec.Raw(_encode(self._response)))

    def _written(self, events: Iterable[Event]) -> bytes:
        out = []
        for one in events:
            one.sequence_number = self._number
            self._number += 1
            out.append(b"event: %b\ndata: %b\n\n" % (one.type.encode(), _encode(one)))
        return b"".join(out)
