"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from time import time

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client_requests import Completion, Request, StreamDelta
from actorium.actors.gateway import answers, bodies
from actorium.actors.gateway.answers import Running
from actorium.actors.gateway.chat_body import (
    ChatBody,
    ChatCompletion,
    ChatLogprobs,
    Choice,
    Chunk,
    ChunkChoice,
    Said,
    Usage,
)
from actorium.actors.gateway.engine import Engine, Facts
from actorium.actors.gateway.errors import HttpError
from actorium.actors.gateway.fields import sampling
from actorium.actors.gateway.formats import structured_of
from actorium.actors.gateway.guard import Reply, caller, engine_of
from actorium.actors.gateway.message import Reader, delta, message
from actorium.actors.gateway.sse import EventStream, event
from actorium.actors.gateway.streams import together
from actorium.actors.gateway.tools import MAX_TOOLS
from actorium.actors.gateway.tools import Choice as ToolChoice

_encode = msgspec.json.Encoder().encode


async def completions(http: HttpRequest) -> Response | EventStream:
    """The route."""
    engine = engine_of(http)
    body = await bodies.read(http, ChatBody)
    await engine.serves(body.model)
    chat = Chat(engine, await engine.facts(), body, caller(http).request_id)
    request = chat.request(caller(http).tenant)
    if body.logprobs or body.prompt_logprobs is not None:
        await engine.pieces.ready()
    if body.stream:
        return EventStream(chat.events(request))
    return Reply(_encode(await chat.whole(request)))


class Chat:
    """One request under way."""

    def __init__(self, engine: Engine, facts: Facts, body: ChatBody, request_id: str) -> None:
        """Raises `HttpError` on what does not fit together."""
        if body.stream and body.prompt_logprobs is not None:
            raise HttpError(400, "prompt_logprobs: not in a stream", "prompt_logprobs")
        self._engine, self._facts, self._body = engine, facts, body
        self._id = f"chatcmpl-{answers.name_of(body.request_id, request_id)}"
        self._created = int(time())
        self._parallel = body.parallel_tool_calls is not False
        self._tools = ToolChoice(body.tools, body.tool_choice, self._parallel)

    def request(self, tenant: str) -> Request:
        """What the engine is asked. Raises `HttpError`."""
        body = self._body
        most = body.max_completion_tokens
        structured = self._tools.structured(structured_of(body))
        params = sampling(body, body.alternatives(), structured=structured,
                          max_tokens=body.max_tokens if most is None else most)
        args = dict(body.chat_template_kwargs)
        if not body.add_generation_prompt:
            args["add_generation_prompt"] = False
        return Request(messages=body.turns(), params=params, timeout=body.timeout,
                       template_args=args, tools=self._tools.shown, tenant=tenant,
                       priority=body.priority)

    def reader(self) -> Reader:
        """For the text of one choice."""
        body, tools = self._body, self._tools
        machine = self._facts.parsing.machine(tools.schemas, tools.forced, body.separate_reasoning,
                                              body.chat_template_kwargs)
        return Reader(machine, body.include_reasoning, MAX_TOOLS if self._parallel else 1)

    # --- all at once ---

    async def whole(self, request: Request) -> ChatCompletion:
        """The answer. Raises `ActoriumError`."""
        [choices] = await self._engine.complete([request])
        return ChatCompletion(
            id=self._id, created=self._created, model=self._facts.model,
            choices=[self._choice(one) for one in choices],
            usage=answers.usage(answers.last_counts(choices)),
            prompt_logprobs=answers.prompt_logprobs(choices, self._engine.pieces))

    def _choice(self, one: Completion) -> Choice:
        reader = self.reader()
        said = message(reader.read(one.text, last=True))
        return Choice(index=one.index, message=said, logprobs=self._logprobs(one),
                      finish_reason=reader.reason(answers.reason(one.finish_reason)),
                      stop_reason=one.stop_reason,
                      token_ids=one.token_ids if self._body.return_token_ids else None)

    def _logprobs(self, one: Completion | StreamDelta) -> ChatLogprobs | None:
        return answers.chat_logprobs(one.logprobs, self._engine.pieces)

    # --- as it comes ---

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The events of the stream, but the last, `[DONE]`."""
        counts, readers = Running(), dict[int, Reader]()
        async with self._engine.stream(request) as deltas:
            if self._body.continuous_usage:
                counts = Running(await deltas.accepted())
            async for several in together(deltas):
                yield b"".join([one for delta in several
                                for one in self._events(delta, readers, counts)])
        if self._body.include_usage:
            yield event(_encode(self._chunk([], counts.usage())))

    def _events(self, one: StreamDelta, readers: dict[int, Reader],
                counts: Running) -> Iterator[bytes]:
        """Of one delta of the engine."""
        reader = readers.get(one.index)
        if reader is None:
            reader = readers[one.index] = self.reader()
            yield self._event(ChunkChoice(index=one.index, delta=Said(role="assistant",
                                                                      content="")), counts)
        counts.add(one)
        for choice in self._choices(one, reader):
            yield self._event(choice, counts)

    def _choices(self, one: StreamDelta, reader: Reader) -> list[ChunkChoice]:
        """What a delta of the engine comes to: nothing, or an event or more."""
        pieces = reader.read(one.text, last=one.finish_reason is not None)
        out = [ChunkChoice(index=one.index, delta=delta(piece)) for piece in pieces]
        counted = one.token_ids and (self._body.return_token_ids or self._body.continuous_usage)
        if not out and (one.finish_reason or one.logprobs or counted):
            out.append(ChunkChoice(index=one.index, delta=Said()))
        if out:
            out[0].logprobs = self._logprobs(one)
            out[0].token_ids = one.token_ids if self._body.return_token_ids else None
            out[-1].finish_reason = reader.reason(answers.reason(one.finish_reason))
            out[-1].stop_reason = one.stop_reason
        return out

    def _event(self, choice: ChunkChoice, counts: Running) -> bytes:
        usage = counts.usage() if self._body.continuous_usage else None
        return event(_encode(self._chunk([choice], usage)))

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> Chunk:
        return Chunk(id=self._id, created=self._created, model=self._facts.model, choices=choices,
                     usage=usage)
