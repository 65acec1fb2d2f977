"""One turn over HTTP: reads the request, calls the engine, and answers whole, as a stream, or with
an error. Each API fills in its fields, shapes and events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, Self

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Request, StreamDelta
from actorium.actors.gateway.api.answer_grammar import constraint
from actorium.actors.gateway.api.response_formats import passed_over
from actorium.actors.gateway.api.tool_choice import ToolSelection
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
from actorium.actors.gateway.parsers.choice_parser import Thought
from actorium.actors.gateway.resume.delta_streams import Deltas, with_ready
from actorium.actors.gateway.served_model import ServedModel
from actorium.actors.params import Structured

TOOLS_HEADER = "x-actorium-tools"
"""Where the chat template has no place for a request's tools: how the model learned of them."""
SCHEMA_HEADER = "x-actorium-passed-over"
"""The keywords of a lenient schema that are not enforced."""
MAX_NAMES = 32


class HttpTurn(ABC):
    """One request under way. `handle` is the route; each API overrides the rest, in the order of
    the calls."""

    body_type: ClassVar[Any]
    """Of the request: a struct with `model`, `stream` and `check()`."""
    last_event: ClassVar[bytes] = DONE
    body: Any
    _tools = ToolSelection(None, None, True)
    """Those of the request, in APIs that have them."""
    _thought = Thought.NONE
    """Whether the answer begins with one."""

    def __init__(self, call: EngineCall, model: ServedModel, body: Any) -> None:
        """Raises `HttpError` on fields that do not fit together."""
        self.call, self.engine, self.model, self.body = call, call.engine, model, body

    @classmethod
    async def read(cls, http: HttpRequest) -> Self:
        """Returns the turn for an HTTP request. Raises `HttpError`, `ActoriumError`."""
        call = call_of(http)
        body = await bodies.read(http, cls.body_type)
        body.check()
        turn = cls(call, await call.engine.check_model(body.model), body)
        call.fields = turn.engine_fields()
        return turn

    @classmethod
    async def handle(cls, http: HttpRequest) -> Response | EventStream:
        """Handles the route."""
        turn = await cls.read(http)
        requests = await turn.requests()
        if turn.tells_token_texts:
            await turn.engine.token_texts.ready()
        return await turn.respond(requests)

    def engine_fields(self) -> dict[str, str]:
        """Returns the engine's field names -> this API's, where they differ, for errors."""
        return {}

    def constraint(self, wanted: Structured | None, budget: int | None) -> Structured | None:
        """Returns the constraint on the completion. wanted: its format; budget: the most tokens of
        its thought. Raises `HttpError`, `InvalidRequest`."""
        most = min(self.body.limit or self.model.max_model_len, self.model.max_model_len)
        if budget is not None and budget >= most:
            budget = None  # steps with a grammar take longer
        return constraint(wanted, self._tools, self.model.parsing.call_form, self._thought, budget)

    @abstractmethod
    async def requests(self) -> list[Request]:
        """Returns the requests to the engine. Raises `HttpError`, `ActoriumError`."""

    @property
    def tells_token_texts(self) -> bool:
        """True if the answer shows texts of single tokens."""
        return False

    async def respond(self, requests: list[Request]) -> Response | EventStream:
        """Returns the answer, whole or as a stream."""
        headers = self.headers(requests)
        if self.body.stream:
            return EventStream(self.events(requests), self.last_event, self.refusal, headers)
        return JsonReply(encode_json(await self.collect(requests)), headers=headers)

    def headers(self, requests: list[Request]) -> dict[str, str]:
        """Returns the headers of the answer that say what it is the answer to."""
        own = getattr(self.body, "chat_template", None)
        generic = self._tools.shown and self.model.templates.generic(own)
        found = {TOOLS_HEADER: "system-message"} if generic else {}
        wanted = [one.params.structured for one in requests if one.params is not None]
        names = sorted({name for one in wanted for name in passed_over(one)})
        if names:
            found[SCHEMA_HEADER] = ", ".join(names[:MAX_NAMES])
        return found

    # --- all at once ---

    @abstractmethod
    async def collect(self, requests: list[Request]) -> Any:
        """Returns the whole answer. Raises `ActoriumError`."""

    # --- as it comes ---

    async def events(self, requests: list[Request]) -> AsyncGenerator[bytes, None]:
        """Yields the stream's events but the last."""
        async with self.call.stream(self, *requests) as stream:
            await self.begin(stream)
            async for delta in stream:
                self.call.admitted(stream)
                if events := self.on_deltas(with_ready(delta, stream)):
                    yield events
        if events := await self.end():
            yield events

    async def begin(self, stream: Deltas) -> None:  # noqa: B027
        """Called before the first delta; may wait until the request has been accepted."""

    @abstractmethod
    def on_deltas(self, deltas: list[StreamDelta]) -> bytes:
        """Returns the events of deltas that arrived together, at most one per choice."""

    async def end(self) -> bytes:
        """Returns the events after all deltas."""
        return b""

    def counts(self) -> tuple[int, ...]:
        """Returns what the next events depend on beside the answer so far: on how it was cut into
        deltas. A stream that goes on begins with the same."""
        return ()

    def restore(self, counts: tuple[int, ...]) -> None:  # noqa: B027
        """Sets what `counts` returned. Raises `HttpError` 400 where it cannot have."""

    async def refusal(self, error: HttpError) -> bytes:
        """Returns the events of an error within the stream."""
        return error_event(error)
