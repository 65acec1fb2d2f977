"""The engine's own routes: tokenizing, plain generation, what is served, and administration."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from time import time
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium import __version__
from actorium.actors.client_requests import Request
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway import bodies
from actorium.actors.gateway.engine import Engine, Facts
from actorium.actors.gateway.errors import SERVER, HttpError
from actorium.actors.gateway.fields import check_ids
from actorium.actors.gateway.guard import Reply, caller, engine_of
from actorium.actors.gateway.sse import EventStream, event
from actorium.actors.params import SamplingParams

_encode = msgspec.json.Encoder().encode
STARTED = int(time())
HEALTH_SECONDS = 2.0
"""How long `/health` waits for the watchdog."""


class TokenizeBody(Struct, kw_only=True):
    """vLLM's: a prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


class GenerateBody(Struct, kw_only=True):
    """SGLang's: text or ids, and sampling parameters by the SDK's names."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams = SamplingParams()
    stream: bool = False
    timeout: float | None = None
    priority: int = 0


class AbortBody(Struct, kw_only=True):
    rid: str


async def models(http: HttpRequest) -> Response:
    """`/v1/models`."""
    facts = await engine_of(http).facts()
    return Reply(_encode({"object": "list",
                          "data": [_card(facts, name) for name in facts.names.served]}))


async def model(http: HttpRequest) -> Response:
    """`/v1/models/{id}`."""
    name, engine = http.path_params["name"], engine_of(http)
    model = await engine.serves(name)
    facts = await engine.facts()
    return Reply(_encode(_card(facts, name if name in facts.names.served else model)))


def _card(facts: Facts, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "actorium",
            "root": facts.info["model_path"], "parent": None,
            "max_model_len": facts.max_model_len}


async def tokenize(http: HttpRequest) -> Response:
    """`/tokenize`."""
    engine, body = engine_of(http), await bodies.read(http, TokenizeBody)
    await engine.serves(body.model)
    ids = await engine.client.tokenize(body.prompt, body.add_special_tokens)
    return Reply(_encode({"tokens": ids, "count": len(ids),
                          "max_model_len": (await engine.facts()).max_model_len}))


async def detokenize(http: HttpRequest) -> Response:
    """`/detokenize`."""
    engine, body = engine_of(http), await bodies.read(http, DetokenizeBody)
    await engine.serves(body.model)
    check_ids(body.tokens, (await engine.facts()).max_model_len, "tokens", completion=0)
    text = await engine.client.detokenize(body.tokens, body.skip_special_tokens)
    return Reply(_encode({"prompt": text, "text": text}))


async def generate(http: HttpRequest) -> Response | EventStream:
    """`/generate`."""
    engine, body = engine_of(http), await bodies.read(http, GenerateBody)
    if (body.text is None) == (body.input_ids is None):
        raise HttpError(400, "text: exactly one of text and input_ids is needed", "text")
    check_ids(body.input_ids or (), (await engine.facts()).max_model_len, "input_ids")
    request = Request(prompt=body.text if body.input_ids is None else body.input_ids,
                      params=body.sampling_params, timeout=body.timeout,
                      tenant=caller(http).tenant, priority=body.priority)
    if body.stream:
        return EventStream(_deltas(engine, request))
    [choices] = await engine.complete([request])
    return Reply(_encode(choices[0] if len(choices) == 1 else choices))


async def _deltas(engine: Engine, request: Request) -> AsyncGenerator[bytes, None]:
    async with engine.stream(request) as deltas:
        async for delta in deltas:
            yield event(_encode(delta))


async def abort(http: HttpRequest) -> Response:
    """`/abort_request`: of this gateway's requests, by the rid that `/generate` tells."""
    body = await bodies.read(http, AbortBody)
    await engine_of(http).client.abort(body.rid)
    return Reply(_encode({"aborted": body.rid}))


async def flush_cache(http: HttpRequest) -> Response:
    """`/flush_cache`."""
    return Reply(_encode(await engine_of(http).client.flush_cache()))


async def model_info(http: HttpRequest) -> Response:
    """`/model_info`."""
    facts = await engine_of(http).facts()
    wanted = ("model", "model_path", "architecture", "vocab_size", "max_model_len", "dtype",
              "eos_ids", "has_tokenizer", "has_chat_template", "generation_defaults", "limits")
    told = {name: facts.info[name] for name in wanted}
    parsers = {"tool_call_parser": facts.parsing.tools, "reasoning_parser": facts.parsing.reasoning}
    return Reply(_encode(told | parsers))


async def server_info(http: HttpRequest) -> Response:
    """`/server_info`: the model, the configuration without its secrets, and the gauges of now."""
    return Reply(_encode(await engine_of(http).client.server_info(timeout=10.0)))


async def version(http: HttpRequest) -> Response:
    """`/version`."""
    return Reply(_encode({"version": __version__}))


async def health(http: HttpRequest) -> Response:
    """`/health`: whether a request that came now would be served."""
    engine = engine_of(http)
    try:
        status = await engine.client.status(HEALTH_SECONDS)
    except ActoriumError as error:
        raise HttpError(503, error.message, None, SERVER, "unavailable") from None
    if engine.draining or not status.ready:
        raise HttpError(503, status.error or "not ready", None, SERVER, "unavailable")
    return Reply(_encode({"ready": True}))
