"""Ollama's routes about models: which are served, what they are, and which are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.config.models_settings import FOR_GOOD
from actorium.actors.config.reasoning_formats import NONE, format_shown
from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.api.model_routes import find_info
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.engine_uses import EngineUses
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, bad_field
from actorium.actors.gateway.http.replies import NDJSON, EventStream, JsonReply, json_line
from actorium.actors.gateway.served_model import GENERATE, LATEST
from actorium.actors.model_manager.manager_messages import ModelList, ServedModelInfo
from actorium.actors.models import model_dir
from actorium.actors.models.gguf_folder import gguf_source
from actorium.actors.models.model_facts import CheckpointFacts, files_digest, model_facts
from actorium.actors.models.template_files import DEFAULT, template_sources
from actorium.actors.runtime.worker_info import read_info

API_VERSION = "0.13.0"
"""The version of Ollama whose API this is: clients refuse servers that are older than they need."""
COMPLETION = "completion"
"""Ollama's word for: it generates."""
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


async def unload(call: EngineCall, name: str) -> None:
    """Unloads a model as soon as nobody uses it. Raises `HttpError`: 403 for a caller who may not,
    404 if there is no such model, 501 on a server of one, whose engine is that server."""
    gateway = call.gateway
    if not call.administers:
        raise HttpError(403, "keep_alive: with 0 and nothing to answer it unloads the model, which "
                        "takes the administrator's key", "keep_alive", code="admin_required")
    if gateway.models is None:
        model = await gateway.engine.check_model(name)
        raise HttpError(501, f"keep_alive: {model.name!r} is this server's one model, which stays "
                        "loaded until the server is stopped", "keep_alive", SERVER,
                        "not_implemented")
    await gateway.models.unload(find_info(await gateway.models.models(), name).name)


async def version(http: HttpRequest) -> Response:
    """Handles `/api/version`."""
    return JsonReply({"version": API_VERSION})


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
    """The routes that list a server's models. What the files of an only one say is read once."""

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway
        self._facts: tuple[CheckpointFacts, str] | None = None
        """Of an only model, and the digest of its files."""

    async def served(self) -> ModelList:
        """Returns the models that are served. Raises `HttpError`, `ActoriumError`."""
        if self._gateway.models is not None:
            return await self._gateway.models.models()
        engine = self._gateway.engine
        model = await engine.served_model()
        facts, digest = await self._facts_of(Path(model.info["model_path"]))
        names = list(model.names.served)
        return ModelList("", [ServedModelInfo(
            name=names[0], names=names, model=model.info["model_path"], state="ready",
            default=True, pinned=True, digest=digest, run_dir=str(engine.run_dir),
            keep_alive=FOR_GOOD,
            **facts._replace(context_length=model.max_model_len,
                             tasks=tuple(model.tasks))._asdict())])

    async def _facts_of(self, folder: Path) -> tuple[CheckpointFacts, str]:
        if self._facts is None:
            try:
                self._facts = await asyncio.to_thread(_read_facts, folder)
            except (ActoriumError, OSError):  # the engine is on another machine, say
                self._facts = CheckpointFacts(), ""
        return self._facts

    async def tags(self, http: HttpRequest) -> Response:
        """Handles `/api/tags`: every served name is a model."""
        return JsonReply({"models": [
            {**_card(model, name), "modified_at": rfc3339(model.modified),
             "capabilities": _abilities(model.tasks)}
            for model in (await self.served()).models for name in model.names]})

    async def running(self, http: HttpRequest) -> Response:
        """Handles `/api/ps`."""
        return JsonReply({"models": [_loaded(model) for model in (await self.served()).models
                                     if model.state in ("ready", "sleeping")]})

    async def show(self, http: HttpRequest) -> Response:
        """Handles `/api/show`. Starts no engine: of a model that is not loaded, its files say what
        it can."""
        name = (await bodies.read(http, NamedModel)).given()
        if self._gateway.models is None:
            model = await self._gateway.engine.check_model(name)
            info = (await self.served()).models[0]
            ability = Ability(model.templates.plain, bool(model.info.get("media")),
                              model.parsing.reasoning != NONE, model.fim is not None,
                              model.info.get("generation_defaults") or {})
        else:
            info = find_info(await self.served(), name)
            ability = await asyncio.to_thread(_ability_of, info.model)
        family = info.family or info.architecture
        return JsonReply({
            "modelfile": "", "template": ability.template, "license": "",
            "parameters": "\n".join(f"{own:<30} {value}"
                                    for own, value in ability.defaults.items()),
            "details": _details(info), "capabilities": ability.words(info.tasks),
            "modified_at": rfc3339(info.modified),
            "model_info": {
                "general.architecture": family, "general.basename": info.name,
                "general.parameter_count": info.parameters,
                f"{family}.context_length": info.context_length}})

    async def pull(self, http: HttpRequest) -> Response | EventStream:
        """Handles `/api/pull`. Of a model that is served nothing is missing. Raises `HttpError` 403
        for any other on a server of one."""
        body, models = await bodies.read(http, PullBody), self._gateway.models
        name = body.given()
        if models is not None:
            lines = _pulled(models, name)
        elif (await self._gateway.engine.served_model()).names.known(name):
            lines = _nothing_to_pull()
        else:
            raise HttpError(403, f"model: {name[:200]!r} is not served here, and this server "
                            "fetches none: `actorium serve` starts one with it", "model",
                            code="pull_not_allowed")
        if body.stream:
            return EventStream(lines, b"", _error_line, form=NDJSON)
        return JsonReply([line async for line in lines][-1])


class Ability(NamedTuple):
    """What may be asked of a model."""

    template: str
    sees: bool
    thinks: bool
    fills_in: bool
    """Text in the middle."""
    defaults: Mapping[str, Any]
    """Of sampling."""

    def words(self, tasks: Sequence[str]) -> list[str]:
        """Returns it in Ollama's words. Tools are shown to any model that has a template."""
        able = {"vision": self.sees, "tools": bool(self.template), "insert": self.fills_in,
                "thinking": self.thinks}
        basic = _abilities(tasks)
        return basic + [word for word, has in able.items() if has and COMPLETION in basic]


def _abilities(tasks: Sequence[str]) -> list[str]:
    """Returns what Ollama says of a model that does these; () = not known."""
    if GENERATE in tasks or not tasks:
        return [COMPLETION]  # clients take a model that says embedding for one that cannot chat
    return ["embedding"] if "embed" in tasks else []


def _ability_of(model: str) -> Ability:
    """Returns what a model's files say, as far as they are there. model: what its engine is started
    with."""
    try:
        folder = model_dir.resolve(model)
        templates = template_sources(folder, None)
        template = templates.get(DEFAULT, "")
        return Ability(template, model_dir.takes_media(Config(model=ModelConfig(model=model))),
                       format_shown("".join(templates.values())) != NONE, False,
                       model_dir.generation_defaults(folder))
    except (ActoriumError, OSError):
        return Ability("", False, False, False, {})


def _read_facts(folder: Path) -> tuple[CheckpointFacts, str]:
    path = gguf_source(folder) or folder
    return model_facts(path), files_digest(path)


async def _nothing_to_pull() -> AsyncGenerator[bytes, None]:
    yield json_line({"status": "pulling manifest"})
    yield json_line({"status": "success"})


async def _pulled(models: EngineUses, name: str) -> AsyncGenerator[bytes, None]:
    """Yields the lines of a pull. Raises `HttpError`."""
    async for progress in models.pull(name.removesuffix(LATEST)):
        if progress.error:
            raise HttpError(400, progress.error, "model", code="pull_failed")
        sizes = {"completed": progress.completed, "total": progress.total} if progress.total else {}
        yield json_line({"status": progress.status, **sizes})


async def _error_line(error: HttpError) -> bytes:
    return json_line(error.ollama_body())


def _loaded(model: ServedModelInfo) -> dict[str, Any]:
    held = read_info(Path(model.run_dir), "worker-0") if model.run_dir else None
    size = held.weights_bytes + held.kv_bytes + held.state_bytes if held else \
        model.memory or model.size
    on_gpu = held is not None and not held.device.startswith("cpu")
    return {**_card(model, model.name), "size": size, "size_vram": size if on_gpu else 0,
            "expires_at": NEVER if model.expires_at is None else rfc3339(model.expires_at),
            "context_length": model.context_length}


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


def _rounded(parameters: int) -> str:
    """Returns a count as Ollama writes it: 134.52M; empty where it is not known."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.2f}".rstrip("0").rstrip(".") + letter
    return str(parameters) if parameters else ""


def rfc3339(seconds: float) -> str:
    """Returns a time, given in Unix seconds."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
