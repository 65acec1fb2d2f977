"""One turn over HTTP: read what is asked, ask the engine, answer whole or as a stream, or refuse.
What differs from API to API (fields, shapes, events) is filled in by its face.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, Self

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Request, StreamDelta
from actorium.actors.gateway.engine_call import EngineCall, call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.replies import (
    DONE,
    EventStream,
    JsonReply,
    encode_json,
    error_event,
)
from actorium.actors.gateway.resume.delta_streams import Deltas, with_ready
from actorium.actors.gateway.served_model import ServedModel


class HttpTurn(ABC):
    """One request under way. `handle` is the route; the rest is what a face says of it, in the
    order in which it is asked."""

    body_type: ClassVar[Any]
    """Of the request: a struct with `model`, `stream` and `check()`."""
    last_event: ClassVar[bytes] = DONE
    body: Any

    def __init__(self, call: EngineCall, model: ServedModel, body: Any) -> None:
        """Raises `HttpError` on what does not fit together."""
        self.call, self.engine, self.model, self.body = call, call.engine, model, body

    @classmethod
    async def read(cls, http: HttpRequest) -> Self:
        """The turn that a request asks for. Raises `HttpError`, `ActoriumError`."""
        call = call_of(http)
        body = await bodies.read(http, cls.body_type)
        body.check()
        turn = cls(call, await call.engine.check_model(body.model), body)
        call.fields = turn.engine_fields()
        return turn

    @classmethod
    async def handle(cls, http: HttpRequest) -> Response | EventStream:
        """The route."""
        turn = await cls.read(http)
        requests = await turn.requests()
        if turn.tells_token_texts:
            await turn.engine.token_texts.ready()
        return await turn.respond(requests)

    def engine_fields(self) -> dict[str, str]:
        """The engine's names of fields that have other names here, and these, for its errors."""
        return {}

    @abstractmethod
    async def requests(self) -> list[Request]:
        """What the engine is asked. Raises `HttpError`, `ActoriumError`."""

    @property
    def tells_token_texts(self) -> bool:
        """The answer shows single tokens as texts."""
        return False

    async def respond(self, requests: list[Request]) -> Response | EventStream:
        """The answer to what was asked."""
        if self.body.stream:
            return EventStream(self.events(requests), self.last_event, self.refusal)
        return JsonReply(encode_json(await self.collect(requests)))

    # --- all at once ---

    @abstractmethod
    async def collect(self, requests: list[Request]) -> Any:
        """The whole answer. Raises `ActoriumError`."""

    # --- as it comes ---

    async def events(self, requests: list[Request]) -> AsyncGenerator[bytes, None]:
        """The events of the stream, but the last."""
        async with self.call.stream(*requests) as stream:
            await self.begin(stream)
            async for delta in stream:
                if events := self.on_deltas(with_ready(delta, stream)):
                    yield events
        if events := await self.end():
            yield events

    async def begin(self, stream: Deltas) -> None:  # noqa: B027
        """Called before the first delta; may wait until the request has been accepted."""

    @abstractmethod
    def on_deltas(self, deltas: list[StreamDelta]) -> bytes:
        """The events of what has come at once, at most one delta of each choice."""

    async def end(self) -> bytes:
        """The events behind all deltas."""
        return b""

    async def refusal(self, error: HttpError) -> bytes:
        """The events of an error within the stream."""
        return error_event(error)
