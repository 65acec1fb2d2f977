"""The models of a server of several: listed, loaded and unloaded, as llama-server's router does."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.gateway.engine_call import call_of
from actorium.actors.gateway.engine_uses import EngineUses, checked_keep_alive
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.model_manager.manager_messages import ModelList, ModelState, ServedModelInfo

STATUS: dict[ModelState, str] = {"waiting": "loading", "ready": "loaded", "stopping": "unloaded"}
"""llama-server's word for a model's state, where it is another one."""
RUNNING = ("waiting", "loading", "ready", "sleeping")
SHOWN_NAMES = 20
"""Of the models, in an error."""


class ModelBody(Struct, kw_only=True):
    """Names a model."""

    model: str
    keep_alive: str | float | None = None
    """How long its engine stays when it is loaded and nobody uses it."""


class ModelStatus(Struct, kw_only=True, omit_defaults=True):
    """The state of a model's engine."""

    value: str
    """unloaded, loading, loaded, sleeping or failed."""
    failed: bool = False
    """Its last start has failed; the next request tries again."""
    message: str = ""
    """Of one that failed why; of one that loads or waits, how far it is."""
    in_use: int = 0
    """Requests that it serves."""
    expires_at: float | None = None
    """When its engine ends unless it is used, Unix seconds."""
    memory: int = 0
    """Bytes that its engine is planned to take; 0 = not known yet."""


class ModelCard(Struct, kw_only=True):
    """A model, as `/v1/models` lists it."""

    id: str
    object: str = "model"
    created: int
    """When its files were changed last, Unix seconds."""
    owned_by: str = "actorium"
    root: str
    """What its engine is started with."""
    parent: None = None
    max_model_len: int | None
    tasks: tuple[str, ...]
    """What it does: generate, embed, ...; none = not known yet."""
    aliases: list[str]
    """Further names."""
    default: bool
    """It serves requests that name no model."""
    status: ModelStatus


def card(info: ServedModelInfo) -> ModelCard:
    """Returns what is shown of a model."""
    status = ModelStatus(
        value=STATUS.get(info.state, info.state), failed=info.state == "failed",
        message=info.reason, in_use=info.in_use, expires_at=info.expires_at, memory=info.memory)
    return ModelCard(id=info.name, created=int(info.modified), root=info.model,
                     max_model_len=info.context_length or None, tasks=info.tasks,
                     aliases=[name for name in info.names if name != info.name],
                     default=info.default, status=status)


def find_info(models: ModelList, name: str) -> ServedModelInfo:
    """Returns the model of a name. Raises `HttpError` 404, with names that there are."""
    wanted = name.removesuffix(":latest")
    for info in models.models:
        if name in info.names or wanted in info.names:
            return info
    names = ", ".join(repr(info.name[:100]) for info in models.models[:SHOWN_NAMES])
    more = len(models.models) - SHOWN_NAMES
    raise HttpError(404, f"model: {name[:200]!r} is not served here; "
                    + (f"{names}{f' and {more} more' if more > 0 else ''} are" if names else
                       "no model is"), "model", code="model_not_found")


def uses_of(http: HttpRequest) -> EngineUses:
    """Returns the gateway's uses of models. Raises `HttpError` 400 on a server of one model."""
    uses = call_of(http).gateway.models
    if uses is None:
        raise HttpError(400, "this server has one model, which is always loaded; --models-dir and "
                        "--models serve several", code="one_model")
    return uses


async def models(http: HttpRequest) -> Response:
    """Handles `/v1/models`."""
    listed = await uses_of(http).models()
    return JsonReply({"object": "list", "data": [card(info) for info in listed.models]})


async def model(http: HttpRequest) -> Response:
    """Handles `/v1/models/{name}`."""
    listed = await uses_of(http).models()
    return JsonReply(card(find_info(listed, http.path_params["name"])))


async def load(http: HttpRequest) -> Response:
    """Handles `/models/load`: begins to load a model."""
    uses, body = uses_of(http), await bodies.read(http, ModelBody)
    keep_alive = None if body.keep_alive is None else checked_keep_alive(body.keep_alive)
    info = find_info(await uses.models(), body.model)
    if info.state in RUNNING:
        raise bad_field("model", f"{info.name!r} is already running")
    uses.load(info.name, keep_alive)
    return JsonReply({"success": True})


async def unload(http: HttpRequest) -> Response:
    """Handles `/models/unload`: ends a model's engine as soon as nobody uses it."""
    uses, body = uses_of(http), await bodies.read(http, ModelBody)
    info = find_info(await uses.models(), body.model)
    if info.state not in RUNNING:
        raise bad_field("model", f"{info.name!r} is not running")
    await uses.unload(info.name)
    return JsonReply({"success": True})
