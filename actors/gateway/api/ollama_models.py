"""Ollama's routes about models: which are served, what they are, and which are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.config.models_settings import FOR_GOOD
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, bad_field
from actorium.actors.gateway.http.replies import NDJSON, JsonReply, json_line
from actorium.actors.gateway.parsers.thoughts import NONE
from actorium.actors.gateway.served_engine import ServedEngine
from actorium.actors.gateway.served_model import LATEST, ServedModel
from actorium.actors.model_manager.manager_messages import ServedModelInfo
from actorium.actors.models.model_facts import CheckpointFacts, model_facts
from actorium.actors.runtime.worker_info import read_info

API_VERSION = "0.13.0"
"""The version of Ollama whose API this is: clients refuse servers that are older than they need."""
NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that stays."""


class NamedModel(Struct, kw_only=True):
    """A body that names a model."""

    model: str = ""
    name: str = ""
    """Older clients' name of the same."""

    def given(self) -> str:
        """Returns the name. Raises `HttpError`."""
        if not (self.model or self.name):
            raise bad_field("model", "is required")
        return self.model or self.name


class PullBody(NamedModel, kw_only=True):
    """The body of `/api/pull`."""

    stream: bool = True


async def unload(engine: ServedEngine, name: str) -> None:
    """Unloads a model. Raises `HttpError` 501: the engine of a server with one model is that
    server."""
    raise HttpError(501, f"keep_alive: {name!r} is this server's one model, which stays loaded "
                    "until the server is stopped", "keep_alive", SERVER, "not_implemented")


async def version(http: HttpRequest) -> Response:
    """Handles `/api/version`."""
    return JsonReply({"version": API_VERSION})


async def embed(http: HttpRequest) -> Response:
    """Handles `/api/embed`. Raises `HttpError` 501."""
    raise HttpError(501, "embeddings are not supported", None, SERVER, "not_implemented")


async def delete(http: HttpRequest) -> Response:
    """Handles `/api/delete`. Raises `HttpError` 501."""
    raise HttpError(501, "models are not deleted here: they are files in the Hugging Face cache, "
                    "or where their owner has put them", None, SERVER, "not_implemented")


async def make(http: HttpRequest) -> Response:
    """Handles `/api/create`, `/api/copy` and `/api/push`. Raises `HttpError` 501."""
    raise HttpError(501, f"{http.scope['path']} is not supported: models are not made, named or "
                    "published here; flags of the server's start say how a model is served", None,
                    SERVER, "not_implemented")


class OllamaModels:
    """The routes that list the models of a server, which has one. What the files say is read at the
    first request."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._facts: CheckpointFacts | None = None

    async def served(self) -> list[ServedModelInfo]:
        """Returns the models that are served. Raises `ActoriumError`."""
        model = await self._engine.served_model()
        facts = await self._model_facts(model)
        names = list(model.names.served)
        return [ServedModelInfo(
            name=names[0], names=names, model=model.info["model_path"], state="ready",
            default=True, pinned=True, size=facts.size, modified=facts.modified,
            digest=facts.digest, architecture=model.info.get("architecture", ""),
            family=facts.family, format=facts.format, quantization=facts.quantization,
            parameters=facts.parameters, context_length=model.max_model_len,
            run_dir=str(self._engine.run_dir), keep_alive=FOR_GOOD)]

    async def _model_facts(self, model: ServedModel) -> CheckpointFacts:
        if self._facts is None:
            try:
                path = Path(model.info["model_path"])
                self._facts = await asyncio.to_thread(model_facts, path)
            except (ActoriumError, OSError):  # the engine is on another machine, say
                self._facts = CheckpointFacts()
        return self._facts

    async def tags(self, http: HttpRequest) -> Response:
        """Handles `/api/tags`: every served name is a model."""
        return JsonReply({"models": [
            {**_card(model, name), "modified_at": _time(model.modified)}
            for model in await self.served() for name in model.names]})

    async def running(self, http: HttpRequest) -> Response:
        """Handles `/api/ps`."""
        found = []
        for model in await self.served():
            if model.state == "ready":
                held = read_info(Path(model.run_dir), "worker-0")
                size = held.weights_bytes + held.kv_bytes + held.state_bytes if held else model.size
                on_gpu = held is not None and not held.device.startswith("cpu")
                found.append({**_card(model, model.name), "size": size,
                              "size_vram": size if on_gpu else 0,
                              "expires_at": NEVER if model.expires_at is None
                              else _time(model.expires_at),
                              "context_length": model.context_length})
        return JsonReply({"models": found})

    async def show(self, http: HttpRequest) -> Response:
        """Handles `/api/show`."""
        body = await bodies.read(http, NamedModel)
        model = await self._engine.check_model(body.given())
        shown = next(one for one in await self.served() if model.name in one.names)
        family = shown.family or shown.architecture
        defaults: Mapping[str, Any] = model.info.get("generation_defaults") or {}
        return JsonReply({
            "modelfile": "", "template": model.templates.plain, "license": "",
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in defaults.items()),
            "details": _details(shown), "capabilities": _capabilities(model),
            "modified_at": _time(shown.modified),
            "model_info": {
                "general.architecture": family, "general.basename": shown.name,
                "general.parameter_count": shown.parameters,
                f"{family}.context_length": shown.context_length,
                f"{family}.vocab_size": model.info.get("vocab_size", 0)}})

    async def pull(self, http: HttpRequest) -> Response:
        """Handles `/api/pull`. Of a model that is served nothing is missing. Raises `HttpError` 403
        for any other."""
        body = await bodies.read(http, PullBody)
        name = body.given()
        if not (await self._engine.served_model()).names.known(name):
            raise HttpError(403, f"model: {name[:200]!r} is not served here, and this server "
                            "fetches none: `actorium serve` starts one with it", "model",
                            code="pull_not_allowed")
        done = {"status": "success"}
        if not body.stream:
            return JsonReply(done)
        return Response(json_line({"status": "pulling manifest"}) + json_line(done),
                        media_type=NDJSON.media_type.decode())


def tagged(name: str) -> str:
    """Returns a name as Ollama shows it, with its tag."""
    return name if ":" in name else name + LATEST


def _card(model: ServedModelInfo, name: str) -> dict[str, Any]:
    return {"name": tagged(name), "model": tagged(name), "size": model.size,
            "digest": model.digest, "details": _details(model)}


def _details(model: ServedModelInfo) -> dict[str, Any]:
    return {"parent_model": "", "format": model.format, "family": model.family,
            "families": [model.family], "parameter_size": _rounded(model.parameters),
            "quantization_level": model.quantization, "context_length": model.context_length}


def _capabilities(model: ServedModel) -> list[str]:
    """Returns what its clients may ask of it, in Ollama's words."""
    able = {"completion": True, "vision": bool(model.info.get("media")),
            "tools": bool(model.templates.with_tools), "insert": model.fim is not None,
            "thinking": model.parsing.reasoning != NONE}
    return [name for name, has in able.items() if has]


def _rounded(parameters: int) -> str:
    """Returns a count as Ollama writes it: 134.52M; empty where it is not known."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.2f}".rstrip("0").rstrip(".") + letter
    return str(parameters) if parameters else ""


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
