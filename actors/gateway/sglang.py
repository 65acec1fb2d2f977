"""`/generate` as SGLang's clients ask, and `/abort_request`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from time import monotonic
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Request
from actorium.actors.gateway import answers, bodies
from actorium.actors.gateway.deltas import prompts_of
from actorium.actors.gateway.engine import Engine
from actorium.actors.gateway.errors import HttpError
from actorium.actors.gateway.guard import Reply, caller, engine_of
from actorium.actors.gateway.sglang_body import (
    DEFAULT_NEW_TOKENS,
    GenerateBody,
    NativeSampling,
    Telling,
    renamed,
)
from actorium.actors.gateway.sglang_output import Output
from actorium.actors.gateway.sse import EventStream, event
from actorium.actors.gateway.streams import together
from actorium.actors.params import SamplingParams

_encode = msgspec.json.Encoder().encode
Prompt = str | list[int]


class AbortBody(Struct, kw_only=True):
    """Which requests are to end."""

    rid: str = ""
    """As `/generate` was given it, or told it; of other routes the id of the answer. Of several
    prompts, all of them, or one by its number."""
    abort_all: bool = False
    """All of the caller's tenant; with the administrator's key, everybody's."""


async def generate(http: HttpRequest) -> Response | EventStream:
    """`/generate`."""
    started = monotonic()
    engine, body = engine_of(http), await bodies.read(http, GenerateBody)
    body.check()
    await engine.serves(body.model)
    who = caller(http)
    one = Generating(engine, body, (await engine.facts()).max_model_len, started, who.request_id)
    requests = await one.requests(who.tenant)
    engine.ask.labels = one.names
    engine.ask.fields = {"prompt": "text" if body.input_ids is None else "input_ids"}
    if body.stream:
        return EventStream(one.events(requests))
    return Reply(_encode(await one.whole(requests)))


async def abort(http: HttpRequest) -> Response:
    """`/abort_request`: of this engine's HTTP requests."""
    engine, body = engine_of(http), await bodies.read(http, AbortBody)
    if not body.rid and not body.abort_all:
        raise HttpError(400, "rid: is required, or abort_all", "rid")
    who = caller(http)
    ended = await engine.abort("" if body.abort_all else body.rid,
                               None if who.admin else who.tenant)
    return Reply(_encode({"aborted": ended}))


class Generating:
    """One request under way: a prompt or several, each with one completion or several."""

    def __init__(self, engine: Engine, body: GenerateBody, max_model_len: int, started: float,
                 request_id: str) -> None:
        """started: CLOCK_MONOTONIC seconds. Raises `HttpError` on what does not fit together."""
        self._engine, self._body = engine, body
        self._started, self._room = started, max_model_len
        self._prompts = body.prompts(max_model_len)
        count = len(self._prompts)
        self._samplings = body.samplings(count)
        self._n = self._samplings[0].n
        self._tellings = body.tellings(count, self._n)
        self._salts = body.salts(count)
        self.names = body.names(count, self._n, answers.name_of(None, request_id))
        """Of the completions, the first prompt's first."""
        self._outputs: list[Output] = []

    async def requests(self, tenant: str) -> list[Request]:
        """What the engine is asked. Raises `HttpError`, `ActoriumError`."""
        body, made = self._body, []
        if body.return_text_in_logprobs and any(one.wanted for one in self._tellings):
            await self._engine.pieces.ready()
        for i, prompt in enumerate(self._prompts):
            sampling, telling = self._samplings[i], self._tellings[i]
            ids = await self._ids(prompt) if sampling.unlimited or telling.start == 0 else None
            params = self._params(sampling, telling, ids)
            mute = params.max_tokens == 0
            if mute:
                params = msgspec.structs.replace(params, max_tokens=1, min_tokens=0)
            self._outputs += [
                Output(name, telling, self._text_of(), mute, ids[0] if ids else None)
                for name in self.names[i * self._n:(i + 1) * self._n]]
            made.append(Request(prompt=prompt if ids is None else ids, params=params,
                                timeout=body.timeout, tenant=tenant, priority=body.priority,
                                cache_salt=self._salts[i]))
        return made

    async def _ids(self, prompt: Prompt) -> list[int]:
        return await self._engine.client.tokenize(prompt) if isinstance(prompt, str) else prompt

    def _text_of(self) -> Any:
        return self._engine.pieces.text_of if self._body.return_text_in_logprobs else None

    def _params(self, sampling: NativeSampling, telling: Telling,
                ids: list[int] | None) -> SamplingParams:
        """ids: of the prompt, where there is a default to be fitted into the context."""
        params = sampling.resolved()
        if sampling.unlimited and ids is not None:
            room = max(1, self._room - len(ids))
            params = msgspec.structs.replace(params, max_tokens=min(DEFAULT_NEW_TOKENS, room))
        params = msgspec.structs.replace(params, **telling.params())
        try:
            mute = params.max_tokens == 0
            (msgspec.structs.replace(params, max_tokens=None) if mute else params).check()
        except ValueError as error:
            given = [name for name in NativeSampling.__struct_fields__
                     if getattr(sampling, name) is not msgspec.UNSET]
            raise HttpError(400, renamed(str(error), given), "sampling_params") from None
        return params

    # --- all at once ---

    async def whole(self, requests: list[Request]) -> Any:
        """The answer: an object for each completion. One that was aborted tells what there was."""
        async with self._engine.stream(*requests) as deltas:
            async for several in together(deltas):
                for delta in several:
                    self._outputs[delta.index].add(delta)
        seconds = monotonic() - self._started
        told = [output.told(seconds) for output in self._outputs]
        return told if self._body.several or self._n > 1 else told[0]

    # --- as it comes ---

    async def events(self, requests: list[Request]) -> AsyncGenerator[bytes, None]:
        """The events of the stream, but the last, `[DONE]`: each is a completion as far as it has
        come, with its number where there are several."""
        numbered = self._body.several or self._n > 1
        async with self._engine.stream(*requests) as deltas:
            await deltas.accepted()
            for i, tokens in enumerate(prompts_of(deltas)):
                for output in self._outputs[i * self._n:(i + 1) * self._n]:
                    output.prompt_tokens = tokens
            async for several in together(deltas):
                out = []
                for delta in several:
                    output = self._outputs[delta.index]
                    output.add(delta)
                    if delta.text or delta.token_ids or delta.finish_reason:
                        told = output.told(monotonic() - self._started)
                        out.append(event(_encode(told | {"index": delta.index} if numbered
                                                 else told)))
                if out:
                    yield b"".join(out)
