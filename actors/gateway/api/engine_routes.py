"""Routes of the engine itself: the models, its state, and administration."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from time import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium import __version__
from actorium.actors.errors import ActoriumError, BadModel
from actorium.actors.gateway.api.adapter_routes import adapters_of
from actorium.actors.gateway.api.model_routes import find_info
from actorium.actors.gateway.api.sglang import shown_version
from actorium.actors.gateway.api.weights_routes import last_version
from actorium.actors.gateway.engine_call import call_of, engine_of
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, bad_field
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.gateway.http.routes import Access, find
from actorium.actors.gateway.served_model import GENERATE, ServedModel
from actorium.actors.health import activity_of
from actorium.actors.models.model_dir import read_config, text_config, trained_length
from actorium.actors.models.model_facts import model_facts
from actorium.actors.watchdog.probe_server import SOCKET

STARTED = int(time())


async def models(http: HttpRequest) -> Response:
    """Handles `/v1/models`."""
    engine = engine_of(http)
    model = await engine.served_model()
    meta = await _meta(model)
    return JsonReply({"object": "list", "data": [
        *(_card(model, name, meta) for name in model.names.served),
        *(_adapter_card(model, each) for each in await adapters_of(engine))]})


async def model(http: HttpRequest) -> Response:
    """Handles `/v1/models/{id}`."""
    name, engine = http.path_params["name"], engine_of(http)
    model = await engine.served_model()
    if not model.names.known(name):
        for each in await adapters_of(engine):
            if each["name"] == name:
                return JsonReply(_adapter_card(model, each))
    model = await engine.check_model(name)
    shown = name if name in model.names.served else model.name
    return JsonReply(_card(model, shown, await _meta(model)))


async def _meta(model: ServedModel) -> dict[str, Any]:
    """Returns llama-server's facts of a model, read once from its files' headers; without those
    that they do not say."""
    if not model.meta:
        model.meta = {name: value for name, value in (
            await asyncio.to_thread(_read_meta, model)).items() if value}
    return model.meta


def _read_meta(model: ServedModel) -> dict[str, Any]:
    path = Path(model.info["model_path"])
    meta = {"n_vocab": model.info.get("vocab_size"), "n_ctx": model.max_model_len}
    with contextlib.suppress(BadModel):  # the files may have been removed since the start
        config = read_config(path)
        meta |= {"n_ctx_train": trained_length(config),
                 "n_embd": text_config(config).get("hidden_size")}
        facts = model_facts(path)
        meta |= {"n_params": facts.parameters, "size": facts.size, "ftype": facts.quantization}
    return meta


def _card(model: ServedModel, name: str, meta: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "actorium",
            "root": model.info["model_path"], "parent": None,
            "max_model_len": model.max_model_len, "tasks": model.tasks, "meta": meta}


def _adapter_card(model: ServedModel, adapter: dict[str, Any]) -> dict[str, Any]:
    return {"id": adapter["name"], "object": "model", "created": STARTED, "owned_by": "actorium",
            "root": adapter["path"], "parent": model.name, "max_model_len": model.max_model_len,
            "meta": {"rank": adapter["rank"]}}


async def flush_cache(http: HttpRequest) -> Response:
    """Handles `/flush_cache`."""
    return JsonReply(await engine_of(http).client.flush_cache())


async def model_info(http: HttpRequest) -> Response:
    """Handles `/model_info`: SGLang's facts about a model, and this engine's."""
    engine = engine_of(http)
    model, version = await engine.served_model(), await last_version(engine)
    wanted = ("model", "model_path", "architecture", "vocab_size", "max_model_len", "dtype",
              "eos_ids", "has_tokenizer", "has_chat_template", "generation_defaults", "limits")
    shown = {name: model.info[name] for name in wanted}
    parsers = {"tool_call_parser": model.parsing.tools, "reasoning_parser": model.parsing.reasoning}
    sglang = {"tokenizer_path": shown["model_path"] if shown["has_tokenizer"] else None,
              "is_generation": GENERATE in model.tasks, "preferred_sampling_params": None,
              "weight_version": None if version is None else shown_version(version),
              "has_image_understanding": bool(model.info.get("media")),
              "has_audio_understanding": False, "architectures": [shown["architecture"]]}
    return JsonReply(shown | parsers | sglang)


async def server_info(http: HttpRequest) -> Response:
    """Handles `/server_info`: the model, the configuration without its secrets, and the current
    gauges. A caller with a name in the key file does not see the other names."""
    info = await engine_of(http).client.server_info()
    call = call_of(http)
    if call.tenant and not call.admin:
        work = info["config"]["scheduler"]
        work["tenant_weights"] = {name: weight for name, weight in work["tenant_weights"].items()
                                  if name == call.tenant}
    speculation = info.get("speculation") or {}
    state = {"memory": info.get("memory"), "speculation": speculation}
    if speculation.get("num_drafts"):
        state["avg_spec_accept_length"] = speculation["acceptance_length"]
    served = {"version": __version__, "served_model_name": info["model"],
              "tokenizer_path": info["model_path"], "internal_states": [state]}
    return JsonReply(info | served)


async def version(http: HttpRequest) -> Response:
    """Handles `/version`."""
    return JsonReply({"version": __version__})


async def health(http: HttpRequest) -> Response:
    """Handles `/health`: whether a request that came now would be served, at once or, while the
    engine is paused or sleeps, later."""
    gateway = call_of(http).gateway
    try:
        status = await gateway.engine.client.status()
    except ActoriumError as error:
        raise HttpError(503, error.message, None, SERVER, "unavailable") from None
    if gateway.draining or not status.ready:
        raise HttpError(503, status.error or "not ready", None, SERVER, "unavailable")
    return JsonReply({"ready": True, "status": "ok", "state": activity_of(status.actors)})


async def is_scaling(http: HttpRequest) -> Response:
    """Handles `/is_scaling_elastic_ep`: never."""
    return JsonReply({"is_scaling_elastic_ep": False})


async def scale(http: HttpRequest) -> Response:
    """Handles `/scale_elastic_ep`. Raises `HttpError` 501."""
    raise HttpError(501, "elastic expert parallelism is not supported: an engine keeps the "
                    "devices that it was started with", None, SERVER, "not_implemented")


SECONDS = 15.0
MAX_ANSWER = 16 << 20
_HEADERS = (b"content-type", b"retry-after", b"cache-control")


async def probe(http: HttpRequest) -> Response:
    """Forwards a probe to the watchdog and returns its answer. Ignores the body of a POST."""
    accept = http.headers.get("accept", "*/*").replace("\n", " ")[:1000]
    method = "POST" if http.method == "POST" else "GET"  # the server drops the body of a HEAD
    try:
        async with asyncio.timeout(SECONDS):
            # The path that the guard has checked: the URL's depends on the Host header as well.
            path = http.scope["path"]
            return await _ask(await _probed(http, path) / SOCKET, method, path, accept)
    except (OSError, TimeoutError, ValueError) as error:
        raise HttpError(503, f"the probes do not answer: {type(error).__name__}", None, SERVER,
                        "unavailable") from None


async def _probed(http: HttpRequest, path: str) -> Path:
    """Returns the run directory of whose watchdog is asked: the server's, or that of the engine of
    the query's model, which is not started for this. Raises `HttpError`."""
    gateway, name = call_of(http).gateway, http.query_params.get("model")
    if gateway.models is None or not name or find(path).access is Access.OPEN:
        return gateway.run_dir
    info = find_info(await gateway.models.models(), name)
    if not info.run_dir:
        raise bad_field("model", f"{info.name!r} is not loaded")
    return Path(info.run_dir)


async def _ask(socket: Path, method: str, path: str, accept: str) -> Response:
    """Raises `OSError` where nothing listens, `ValueError` on an incomplete answer."""
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
