"""The engine's own routes: what is served, how it is, and administration."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import time
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium import __version__
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.faces.sglang import WEIGHT_VERSION
from actorium.actors.gateway.http.guard import Reply, caller, engine_of
from actorium.actors.gateway.http.http_errors import SERVER, HttpError
from actorium.actors.gateway.served_engine import Facts
from actorium.actors.watchdog.probe_server import SOCKET

_encode = msgspec.json.Encoder().encode
STARTED = int(time())
HEALTH_SECONDS = 2.0
"""How long `/health` waits for the watchdog."""


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


async def flush_cache(http: HttpRequest) -> Response:
    """`/flush_cache`."""
    return Reply(_encode(await engine_of(http).client.flush_cache()))


async def model_info(http: HttpRequest) -> Response:
    """`/model_info`: SGLang's facts of a model, and this engine's."""
    facts = await engine_of(http).facts()
    wanted = ("model", "model_path", "architecture", "vocab_size", "max_model_len", "dtype",
              "eos_ids", "has_tokenizer", "has_chat_template", "generation_defaults", "limits")
    told = {name: facts.info[name] for name in wanted}
    parsers = {"tool_call_parser": facts.parsing.tools, "reasoning_parser": facts.parsing.reasoning}
    sglang = {"tokenizer_path": told["model_path"] if told["has_tokenizer"] else None,
              "is_generation": True, "preferred_sampling_params": None,
              "weight_version": WEIGHT_VERSION, "has_image_understanding": False,
              "has_audio_understanding": False, "architectures": [told["architecture"]]}
    return Reply(_encode(told | parsers | sglang))


async def server_info(http: HttpRequest) -> Response:
    """`/server_info`: the model, the configuration without its secrets, and the gauges of now.
    Who has a name in the file of keys is not told the others."""
    info = await engine_of(http).client.server_info(timeout=10.0)
    who = caller(http)
    if who.tenant and not who.admin:
        work = info["config"]["scheduler"]
        work["tenant_weights"] = {name: weight for name, weight in work["tenant_weights"].items()
                                  if name == who.tenant}
    speculation = info.get("speculation") or {}
    state = {"memory": info.get("memory"), "speculation": speculation}
    if speculation.get("num_drafts"):
        state["avg_spec_accept_length"] = speculation["acceptance_length"]
    served = {"version": __version__, "served_model_name": info["model"],
              "tokenizer_path": info["model_path"], "internal_states": [state]}
    return Reply(_encode(info | served))


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


async def is_scaling(http: HttpRequest) -> Response:
    """`/is_scaling_elastic_ep`: never."""
    return Reply(_encode({"is_scaling_elastic_ep": False}))


async def scale(http: HttpRequest) -> Response:
    """`/scale_elastic_ep`. Raises `HttpError` 501."""
    raise HttpError(501, "elastic expert parallelism is not supported: an engine keeps the "
                    "devices that it was started with", None, SERVER, "not_implemented")


SECONDS = 15.0
MAX_ANSWER = 16 << 20
_HEADERS = (b"content-type", b"retry-after", b"cache-control")


async def probe(http: HttpRequest) -> Response:
    """A probe, as the watchdog answers it. The body of a POST is ignored."""
    accept = http.headers.get("accept", "*/*").replace("\n", " ")[:1000]
    method = "POST" if http.method == "POST" else "GET"  # of a HEAD the server drops the body
    try:
        async with asyncio.timeout(SECONDS):
            # The path that the guard has judged: the URL's is made of the Host header as well.
            path = http.scope["path"]
            return await _ask(engine_of(http).run_dir / SOCKET, method, path, accept)
    except (OSError, TimeoutError, ValueError) as error:
        raise HttpError(503, f"the probes do not answer: {type(error).__name__}", None, SERVER,
                        "unavailable") from None


async def _ask(socket: Path, method: str, path: str, accept: str) -> Response:
    """Raises `OSError` where nobody listens, `ValueError` on half an answer."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: probes\r\naccept: {accept}\r\n"
                     "content-length: 0\r\nconnection: close\r\n\r\n".encode("latin-1", "replace"))
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in
                   (line.partition(b":") for line in lines if line)}
        size = min(int(headers.get(b"content-length", b"0")), MAX_ANSWER)
        body = await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise ValueError("cut short") from error
    finally:
        writer.close()
    kept = {name.decode(): value.decode("latin-1") for name, value in headers.items()
            if name in _HEADERS}
    return Response(body, int(first.split()[1]), kept)
