"""The routes of one gateway process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from actorium.actors.gateway.api import (
    anthropic_messages,
    engine_routes,
    inference,
    model_routes,
    ollama_models,
    responses,
    scoring,
    sglang,
    stored_responses,
    tokens,
)
from actorium.actors.gateway.api.anthropic_messages import MessagesTurn
from actorium.actors.gateway.api.chat_completions import ChatTurn
from actorium.actors.gateway.api.completions import CompletionsTurn
from actorium.actors.gateway.api.inference import InferenceTurn
from actorium.actors.gateway.api.ollama import OllamaChatTurn, OllamaGenerateTurn
from actorium.actors.gateway.api.ollama_models import OllamaModels
from actorium.actors.gateway.api.sglang import GenerateTurn
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.guard import Guard
from actorium.actors.gateway.http.routes import ROUTES
from actorium.actors.gateway.page import documents
from actorium.actors.gateway.page.dashboard import Dashboard
from actorium.actors.gateway.page.openapi import OpenApi
from actorium.actors.runtime.http.allowed_hosts import AllowedHosts

Handler = Callable[..., Any]


def build_app(gateway: GatewayState, hosts: AllowedHosts | None = None) -> ASGIApp:
    """Builds the ASGI application; hosts: the host names that it accepts, None = any. A bare
    router: the guard answers errors."""
    handlers = handlers_of(gateway)
    return Guard(Router(redirect_slashes=False, routes=[
        whole_path(Route(path, handlers[route.name], methods=list(route.methods)))
        for route in ROUTES for path in route.paths]), gateway, hosts)


def whole_path(route: Route) -> Route:
    """Lets a route match whole paths alone. Starlette's patterns end in `$`, which also matches
    before a final newline: to them `/flush_cache%0A` is `/flush_cache`, to the guard, which looks
    up who may call, it is not."""
    route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + r"\Z")
    return route


def handlers_of(gateway: GatewayState) -> dict[str, Handler]:
    """Returns the handlers by the routes' names."""
    several = gateway.models is not None
    ollama = OllamaModels(gateway)
    return {
        "page": documents.load(documents.PLAYGROUND).serve,
        "status": documents.load(documents.STATUS).serve,
        "docs": documents.load(documents.API).serve,
        "dashboard": Dashboard(gateway).serve,
        "chat": ChatTurn.handle,
        "completions": CompletionsTurn.handle,
        "render_chat": inference.render_chat,
        "render_completion": inference.render_completion,
        "inference": InferenceTurn.handle,
        "invocations": inference.invocations,
        "responses": responses.create,
        "input_tokens": stored_responses.input_tokens,
        "response": stored_responses.retrieve,
        "delete_response": stored_responses.delete,
        "cancel_response": stored_responses.cancel,
        "input_items": stored_responses.input_items,
        "messages": MessagesTurn.handle,
        "count_tokens": anthropic_messages.count_tokens,
        "models": model_routes.models if several else engine_routes.models,
        "model": model_routes.model if several else engine_routes.model,
        "load_model": model_routes.load,
        "unload_model": model_routes.unload,
        "score": scoring.score,
        "rerank": scoring.rerank,
        "tokenize": tokens.tokenize,
        "detokenize": tokens.detokenize,
        "generate": GenerateTurn.handle,
        "abort": sglang.abort,
        "flush_cache": engine_routes.flush_cache,
        "model_info": engine_routes.model_info,
        "server_info": engine_routes.server_info,
        "is_scaling": engine_routes.is_scaling,
        "scale": engine_routes.scale,
        "version": engine_routes.version,
        "ollama_chat": OllamaChatTurn.handle,
        "ollama_generate": OllamaGenerateTurn.handle,
        "ollama_tags": ollama.tags,
        "ollama_ps": ollama.running,
        "ollama_show": ollama.show,
        "ollama_version": ollama_models.version,
        "ollama_pull": ollama.pull,
        "ollama_embed": ollama_models.embed,
        "ollama_delete": ollama_models.delete,
        "ollama_make": ollama_models.make,
        "health": engine_routes.health,
        "openapi": OpenApi(gateway.settings).serve,
        "probe": engine_routes.probe,
    }
