"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from time import time
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Completion, Request, StreamDelta
from actorium.actors.gateway.faces import answers
from actorium.actors.gateway.faces.answers import Running
from actorium.actors.gateway.faces.chat_protocol import (
    ChatBody,
    ChatCompletion,
    ChatLogprobs,
    Choice,
    Chunk,
    ChunkChoice,
    Said,
    Usage,
)
from actorium.actors.gateway.faces.response_formats import format_field, structured_of
from actorium.actors.gateway.faces.sampling_fields import request_for, sampling
from actorium.actors.gateway.faces.tool_choice import MAX_TOOLS
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.guard import Reply, caller, engine_of
from actorium.actors.gateway.http.sse import EventStream, event
from actorium.actors.gateway.parsers.choice_parser import (
    FUNCTION_CALL,
    TOOL_CALLS,
    Reader,
    delta,
    legacy_delta,
    legacy_message,
    message,
)
from actorium.actors.gateway.parsers.think import opens_thought
from actorium.actors.gateway.resume.delta_streams import together
from actorium.actors.gateway.served_engine import Engine, Facts
from actorium.actors.gateway.token_texts import IdPieces

_encode = msgspec.json.Encoder().encode


async def completions(http: HttpRequest) -> Response | EventStream:
    """The route."""
    engine = engine_of(http)
    body = await bodies.read(http, ChatBody)
    engine.ask.fields = {"structured": format_field(body, "functions" if body.legacy else "tools")}
    await engine.serves(body.model)
    chat = Chat(engine, await engine.facts(), body, caller(http).request_id)
    request = await chat.request(caller(http).tenant)
    if body.alternatives() is not None or body.prompt_logprobs is not None:
        await engine.pieces.ready()
    if body.stream:
        return EventStream(chat.events(request))
    return Reply(_encode(await chat.whole(request)))


class Chat:
    """One request under way."""

    def __init__(self, engine: Engine, facts: Facts, body: ChatBody, request_id: str) -> None:
        """Raises `HttpError` on what does not fit together."""
        body.check()
        self._engine, self._facts, self._body = engine, facts, body
        self._id = f"chatcmpl-{answers.name_of(body.request_id, request_id)}"
        self._created = int(time())
        self._tools = body.choice()
        self._pieces = IdPieces(engine.pieces) if body.return_tokens_as_token_ids \
            else engine.pieces
        self._delta = legacy_delta if body.legacy else delta
        self._echoed = body.echoed()
        self._prompt_ids: list[int] | None = None
        """Where they are told."""

    async def request(self, tenant: str) -> Request:
        """What the engine is asked. Raises `HttpError`, `ActoriumError`."""
        body = self._body
        most = body.max_completion_tokens
        structured = self._tools.structured(structured_of(body))
        params = sampling(body, body.alternatives(), structured=structured,
                          max_tokens=body.limit if most is None else most)
        prompt: dict[str, Any] = {
            "messages": body.turns(), "template_args": body.template_args(),
            "tools": self._tools.shown, "chat_template": body.chat_template,
            "add_generation_prompt": body.opens_turn,
            "continue_final_message": body.continue_final_message}
        asked = request_for(body, params, tenant, **prompt)
        if not (body.wants_prompt_ids or body.cuts_right):
            return asked
        ids = await self._engine.client.tokenize_chat(**prompt)
        # The very tokens that are told are run.
        ids = body.truncated(ids, self._facts.max_model_len, params.max_tokens)
        self._prompt_ids = ids if body.wants_prompt_ids else None
        return request_for(body, params, tenant, prompt=ids)

    def reader(self) -> Reader:
        """For the text of one choice."""
        body, tools = self._body, self._tools
        machine = self._facts.parsing.machine(
            tools.schemas, tools.forced, body.separate_reasoning, body.template_args(),
            None if body.opens_turn else opens_thought(body.last_text()))
        return Reader(machine, body.include_reasoning, MAX_TOOLS if body.parallel else 1,
                      self._facts.thought_end)

    def _reason(self, reader: Reader, name: str | None) -> str | None:
        found = reader.reason(answers.reason(name))
        return FUNCTION_CALL if found == TOOL_CALLS and self._body.legacy else found

    # --- all at once ---

    async def whole(self, request: Request) -> ChatCompletion:
        """The answer. Raises `ActoriumError`."""
        [choices] = await self._engine.complete([request])
        readers = [self.reader() for _ in choices]
        return ChatCompletion(
            id=self._id, created=self._created, model=self._facts.model,
            choices=[self._choice(*one) for one in zip(choices, readers, strict=True)],
            usage=self._with_reasoning(answers.usage(answers.last_counts(choices)), readers),
            prompt_logprobs=answers.prompt_logprobs(choices, self._engine.pieces),
            prompt_token_ids=self._prompt_ids)

    def _with_reasoning(self, usage: Usage, readers: Iterable[Reader]) -> Usage:
        """The same, and how much of the completion is reasoning."""
        if self._facts.thought_end:
            usage.completion_tokens_details["reasoning_tokens"] = sum(
                reader.reasoning_tokens for reader in readers)
        return usage

    def _choice(self, one: Completion, reader: Reader) -> Choice:
        said = message(reader.read(one.text, last=True, ids=one.token_ids))
        said.role = self._body.answer_role()
        if self._echoed:
            said.content = self._echoed + (said.content or "")
        return Choice(index=one.index, message=legacy_message(said) if self._body.legacy else said,
                      logprobs=self._logprobs(one),
                      finish_reason=self._reason(reader, one.finish_reason),
                      stop_reason=one.stop_reason,
                      token_ids=one.token_ids if self._body.return_token_ids else None,
                      prompt_token_ids=self._prompt_ids or UNSET
                      if self._body.return_prompt_token_ids else UNSET)

    def _logprobs(self, one: Completion | StreamDelta) -> ChatLogprobs | None:
        return answers.chat_logprobs(one.logprobs, self._pieces)

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
            yield event(_encode(self._chunk([], self._with_reasoning(counts.usage(),
                                                                     readers.values()))))

    def _events(self, one: StreamDelta, readers: dict[int, Reader],
                counts: Running) -> Iterator[bytes]:
        """Of one delta of the engine."""
        reader = readers.get(one.index)
        if reader is None:
            reader = readers[one.index] = self.reader()
            yield self._event(ChunkChoice(index=one.index, delta=Said(
                role=self._body.answer_role(), content="")), counts, first=len(readers) == 1)
            if self._echoed:
                yield self._event(ChunkChoice(index=one.index, delta=Said(content=self._echoed)),
                                  counts)
        counts.add(one)
        for choice in self._choices(one, reader):
            yield self._event(choice, counts)

    def _choices(self, one: StreamDelta, reader: Reader) -> list[ChunkChoice]:
        """What a delta of the engine comes to: nothing, or an event or more."""
        pieces = reader.read(one.text, one.finish_reason is not None, one.token_ids)
        out = [ChunkChoice(index=one.index, delta=self._delta(piece)) for piece in pieces]
        counted = one.token_ids and (self._body.return_token_ids or self._body.continuous_usage)
        if not out and (one.finish_reason or one.logprobs or counted):
            out.append(ChunkChoice(index=one.index, delta=Said()))
        if out:
            out[0].logprobs = self._logprobs(one)
            if self._body.return_token_ids:
                out[0].token_ids = one.token_ids
            out[-1].finish_reason = self._reason(reader, one.finish_reason)
            out[-1].stop_reason = one.stop_reason
        return out

    def _event(self, choice: ChunkChoice, counts: Running, first: bool = False) -> bytes:
        """first: of the stream, which tells the prompt's tokens."""
        usage = counts.usage() if self._body.continuous_usage else None
        chunk = self._chunk([choice], usage)
        if first and self._prompt_ids is not None:
            chunk.prompt_token_ids = self._prompt_ids
        return event(_encode(chunk))

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> Chunk:
        return Chunk(id=self._id, created=self._created, model=self._facts.model, choices=choices,
                     usage=usage)
