"""Prompts as token ids: vLLM's `/render` routes, which make them, and `/inference/v1/generate`,
which takes what those answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from msgspec import Struct, to_builtins
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Completion, Request, StreamDelta, check_params
from actorium.actors.gateway.faces import answers
from actorium.actors.gateway.faces.answers import Running
from actorium.actors.gateway.faces.chat_completions import Chat
from actorium.actors.gateway.faces.chat_protocol import (
    ChatBody,
    ChatLogprobs,
    PromptLogprobs,
    Usage,
)
from actorium.actors.gateway.faces.completions import CompletionBody, Text
from actorium.actors.gateway.faces.sampling_fields import SamplingFields, StreamOptions, check_ids
from actorium.actors.gateway.faces.tokens import prompt_ids
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.guard import Reply, caller, engine_of
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.sse import EventStream, event
from actorium.actors.gateway.resume.delta_streams import together
from actorium.actors.gateway.served_engine import Engine
from actorium.actors.params import SamplingParams

_encode = msgspec.json.Encoder().encode


class InferenceSampling(SamplingParams, frozen=True, kw_only=True, omit_defaults=True,
                        forbid_unknown_fields=True):
    """The SDK's parameters, most of which vLLM calls the same, and those of vLLM's that make no
    difference here."""

    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: Any = None

    def params(self) -> SamplingParams:
        """The SDK's."""
        return SamplingParams(**{name: getattr(self, name)
                                 for name in SamplingParams.__struct_fields__})


class InferenceBody(Struct, kw_only=True):
    """Token ids in, token ids out."""

    token_ids: list[int]
    sampling_params: InferenceSampling
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    features: Any = None
    kv_transfer_params: Any = None

    def check(self, max_model_len: int) -> None:
        """Raise `HttpError` on what is not offered."""
        for name in ("features", "kv_transfer_params"):
            if getattr(self, name):
                raise HttpError(400, f"{name}: not supported", name)
        if self.stream_options is not None and not self.stream:
            raise HttpError(400, "stream_options: only with stream=true", "stream_options")
        if not self.token_ids:
            raise HttpError(400, "token_ids: must not be empty", "token_ids")
        check_ids(self.token_ids, max_model_len, "token_ids")


class InferenceChoice(Struct, kw_only=True):
    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int]


class InferenceAnswer(Struct, kw_only=True):
    """The whole answer, or an event of a stream."""

    request_id: str
    choices: list[InferenceChoice]
    prompt_logprobs: PromptLogprobs | None = None
    usage: Usage | None = None
    kv_transfer_params: None = None


async def render_chat(http: HttpRequest) -> Response:
    """`/v1/chat/completions/render`."""
    engine, body = engine_of(http), await bodies.read(http, ChatBody)
    await engine.serves(body.model)
    who = caller(http)
    chat = Chat(engine, await engine.facts(), body, who.request_id)
    request = await chat.request(who.tenant)
    name = f"chatcmpl-{answers.name_of(body.request_id, who.request_id)}"
    return Reply(_encode(await _rendered(engine, body, request, name)))


async def render_completion(http: HttpRequest) -> Response:
    """`/v1/completions/render`: a list, of each prompt."""
    engine, body = engine_of(http), await bodies.read(http, CompletionBody)
    body.check()
    await engine.serves(body.model)
    who = caller(http)
    text = Text(engine, await engine.facts(), body, who.request_id)
    requests = await text.requests(who.tenant)
    name = f"cmpl-{answers.name_of(body.request_id, who.request_id)}"
    return Reply(_encode([await _rendered(engine, body, request, f"{name}-{number}")
                          for number, request in enumerate(requests)]))


async def _rendered(engine: Engine, body: SamplingFields, request: Request,
                    name: str) -> dict[str, Any]:
    """What would be run, and its text. Raises `HttpError`, `ActoriumError`."""
    facts, params = await engine.facts(), check_params(request.params or SamplingParams())
    ids = body.truncated(await prompt_ids(engine.client, request), facts.max_model_len,
                         params.max_tokens)
    check_ids(ids, facts.max_model_len, "messages" if request.messages else "prompt")
    return {"request_id": name, "token_ids": ids, "features": None,
            "sampling_params": to_builtins(params, str_keys=True), "model": facts.model,
            "stream": body.stream, "stream_options": to_builtins(body.stream_options),
            "cache_salt": body.cache_salt, "priority": body.priority, "kv_transfer_params": None,
            "prompt": await engine.client.detokenize(ids)}


async def generate(http: HttpRequest) -> Response | EventStream:
    """`/inference/v1/generate`."""
    engine, body = engine_of(http), await bodies.read(http, InferenceBody)
    facts = await engine.facts()
    body.check(facts.max_model_len)
    await engine.serves(body.model)
    who, params = caller(http), body.sampling_params.params()
    name = answers.name_of(body.request_id, who.request_id)
    engine.ask.answer_id, engine.ask.fields = name, {"prompt": "token_ids"}
    if params.logprobs is not None or params.prompt_logprobs is not None:
        await engine.pieces.ready()
    request = Request(prompt=body.token_ids, params=params, tenant=who.tenant,
                      priority=body.priority, cache_salt=body.cache_salt)
    if body.stream:
        return EventStream(_events(engine, body, request, name))
    [choices] = await engine.complete([request])
    return Reply(_encode(InferenceAnswer(
        request_id=name, choices=[_choice(engine, one) for one in choices],
        prompt_logprobs=answers.prompt_logprobs(choices, engine.pieces),
        usage=answers.usage(answers.last_counts(choices)))))


def _choice(engine: Engine, one: Completion | StreamDelta) -> InferenceChoice:
    return InferenceChoice(index=one.index, token_ids=one.token_ids,
                           finish_reason=answers.reason(one.finish_reason),
                           logprobs=answers.chat_logprobs(one.logprobs, engine.pieces))


async def _events(engine: Engine, body: InferenceBody, request: Request,
                  name: str) -> AsyncGenerator[bytes, None]:
    """The events of the stream, but the last, `[DONE]`."""
    counts = Running()
    async with engine.stream(request) as deltas:
        async for several in together(deltas):
            out = []
            for delta in several:
                counts.add(delta)
                if delta.token_ids or delta.finish_reason:
                    out.append(event(_encode(InferenceAnswer(
                        request_id=name, choices=[_choice(engine, delta)]))))
            if out:
                yield b"".join(out)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield event(_encode(InferenceAnswer(request_id=name, choices=[], usage=counts.usage())))
