"""One turn over HTTP: reads the request, calls the engine, and answers whole, as a stream, or with
an error. Each API has its body, its requests to the engine, and its encoder of the answer's events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, Self

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Request
from actorium.actors.config.reasoning_formats import NONE
from actorium.actors.gateway.answer_events import (
    AnswerEvent,
    ChoiceEvents,
    ChoiceReader,
    DeltaReader,
)
from actorium.actors.gateway.api.answer_grammar import constraint
from actorium.actors.gateway.api.call_grammar import holds_demand
from actorium.actors.gateway.api.offered_tools import MAX_CALLS, ToolSelection
from actorium.actors.gateway.api.response_formats import passed_over
from actorium.actors.gateway.engine_call import EngineCall, call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.replies import (
    DONE,
    SSE,
    EventStream,
    JsonReply,
    StreamForm,
    sse_event,
)
from actorium.actors.gateway.parsers.thoughts import Thought
from actorium.actors.gateway.resume.delta_streams import prompts_of, with_ready
from actorium.actors.gateway.served_model import GENERATE, ServedModel
from actorium.actors.params import Structured

TOOLS_HEADER = "x-actorium-tools"
"""Where the chat template has no place for a request's tools: how they are shown to the model."""
SCHEMA_HEADER = "x-actorium-passed-over"
"""The keywords of a lenient schema that are not enforced."""
MAX_NAMES = 32


class HttpTurn(ABC):
    """One request under way. `handle` is the route; each API overrides the rest, in the order of
    the calls."""

    body_type: ClassVar[Any]
    """Type of the body: a struct with `model`, `stream` and `check()`."""
    form: ClassVar[StreamForm] = SSE
    last_event: ClassVar[bytes] = DONE
    body: Any
    _tools = ToolSelection(None, None, True)
    """The request's tools, in APIs that have them."""
    _thought = Thought.NONE
    """Whether the answer begins with one."""

    def __init__(self, call: EngineCall, model: ServedModel, body: Any) -> None:
        """Raises `HttpError` on fields that do not fit together."""
        self.call, self.engine, self.model, self.body = call, call.engine, model, body
        self.answer = DeltaReader()

    @classmethod
    async def read(cls, http: HttpRequest) -> Self:
        """Returns the turn for an HTTP request. Raises `HttpError`, `ActoriumError`."""
        call = call_of(http)
        call.event_end = cls.form.event_end
        body = await bodies.read(http, cls.body_type)
        body.check()
        return await cls.of_body(call, body)

    @classmethod
    async def of_body(cls, call: EngineCall, body: Any) -> Self:
        """Returns the turn for a body that has been checked. Raises as `read`."""
        turn = cls(call, await call.chosen.model(body), body)
        call.fields = turn.engine_fields()
        return turn

    @classmethod
    async def handle(cls, http: HttpRequest) -> Response | EventStream:
        """Handles the route."""
        turn, requests = await cls.begin(http)
        return await turn.respond(requests)

    @classmethod
    async def begin(cls, http: HttpRequest) -> tuple[Self, list[Request]]:
        """Returns the turn, ready to be answered, and the requests to the engine. Raises as `read`.
        """
        turn = await cls.read(http)
        return turn, await turn.ready_requests()

    async def ready_requests(self) -> list[Request]:
        """Returns the requests to the engine, with all that the answer needs at hand. Raises as
        `requests`, and where the model does not generate."""
        self.model.check_task(GENERATE)
        requests = await self.requests()
        if self.shows_token_texts:
            await self.engine.token_texts.ready()
        return requests

    async def respond(self, requests: list[Request]) -> Response | EventStream:
        """Returns the answer, whole or as a stream."""
        headers = self._headers(requests)
        if self.body.stream:
            return EventStream(self.events(requests), self.last_event, self.error_events, headers,
                               self.form)
        return JsonReply(await self.collect(requests), headers=headers)

    def _headers(self, requests: list[Request]) -> dict[str, str]:
        """Returns the headers that say how the request was understood."""
        template = getattr(self.body, "chat_template", None)
        generic = self._tools.shown and self.model.templates.generic(template)
        headers = {TOOLS_HEADER: "system-message"} if generic else {}
        formats = [one.params.structured for one in requests if one.params is not None]
        names = sorted({name for one in formats for name in passed_over(one)})
        if names:
            headers[SCHEMA_HEADER] = ", ".join(names[:MAX_NAMES])
        return headers

    async def complete(self, requests: list[Request]) -> list[ChoiceEvents]:
        """Returns the whole choices, those of several prompts numbered through. Raises
        `ActoriumError`."""
        return [event for prompt, choices in enumerate(await self.call.complete(requests))
                for one in choices
                for event in self.answer.read(one if not prompt else msgspec.structs.replace(
                    one, index=prompt * len(choices) + one.index))
                if isinstance(event, ChoiceEvents)]

    async def events(self, requests: list[Request]) -> AsyncGenerator[bytes, None]:
        """Yields the stream's events but the last: together those of deltas that came together."""
        async with self.call.stream(*requests) as stream:
            if self.counts_prompt:
                await stream.accepted()
                self.answer.prompt_tokens = prompts_of(stream)
            async for delta in stream:
                self.call.admitted(stream)
                if events := b"".join([self.encode(event) for one in with_ready(delta, stream)
                                       for event in self.answer.read(one)]):
                    yield events
        if events := await self.end():
            yield events

    # --- what the APIs with parsers share ---

    def parsed_answer(self, separates_reasoning: bool = True, keeps_reasoning: bool = True,
                      customs: frozenset[str] = frozenset(), choices: int = 1) -> DeltaReader:
        """Returns a reader of answers with reasoning and calls. separates_reasoning: False = it is
        text; keeps_reasoning: False = it is left out; customs: names of custom tools."""
        tools, model = self._tools, self.model
        own_form = holds_demand(model.parsing.tools, tools)
        if model.parsing.special_marks:
            self.body.skip_special_tokens = False

        def new_choice() -> ChoiceReader:
            parser = model.parsing.parser(tools.schemas, tools.forced, separates_reasoning,
                                          self._thought, own_form)
            return ChoiceReader(parser, keeps_reasoning, MAX_CALLS if tools.parallel else 1,
                                model.thought_end, customs)

        return DeltaReader(new_choice, choices=choices)

    def constraint(self, wanted: Structured | None) -> Structured | None:
        """Returns the constraint on the completion. wanted: its format. Raises `HttpError`,
        `InvalidRequest`."""
        parsing = self.model.parsing
        # A model whose format is not known writes calls that are demanded as plain JSON.
        form = parsing.call_form if self._tools.forced is None else parsing.tools
        return constraint(wanted, self._tools, form, self._thought, parsing.reasoning)

    def thought_limit(self, budget: int | None) -> int | None:
        """Returns the most tokens of the completion's thoughts, for the engine; None where there
        are none. budget: what the request says."""
        reasons = self.model.parsing.reasoning != NONE  # else the engine refuses it
        return None if reasons and self._thought is Thought.NONE else budget

    # --- what each API has of its own ---

    def engine_fields(self) -> dict[str, str]:
        """Returns the engine's field names -> this API's, where they differ, for errors."""
        return {}

    @abstractmethod
    async def requests(self) -> list[Request]:
        """Returns the requests to the engine. Raises `HttpError`, `ActoriumError`."""

    @property
    def shows_token_texts(self) -> bool:
        """True if the answer shows texts of single tokens."""
        return False

    @property
    def counts_prompt(self) -> bool:
        """True if a stream's first events have the prompt's tokens: it waits for their number."""
        return False

    @abstractmethod
    async def collect(self, requests: list[Request]) -> Any:
        """Returns the whole answer. Raises `ActoriumError`."""

    @abstractmethod
    def encode(self, event: AnswerEvent) -> bytes:
        """Returns the stream's events of one of the answer's."""

    async def end(self) -> bytes:
        """Returns the stream's events after those of all choices."""
        return b""

    async def error_events(self, error: HttpError) -> bytes:
        """Returns the events of an error within the stream."""
        return sse_event(error.body())
