"""The routes of one gateway process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from actorium.actors.gateway import (
    chat,
    completions,
    inference,
    invocations,
    messages,
    native,
    page,
    proxy,
    responses,
    responses_routes,
    sglang,
    tokens,
)
from actorium.actors.gateway.dashboard import Dashboard
from actorium.actors.gateway.engine import Engine
from actorium.actors.gateway.guard import Guard
from actorium.actors.gateway.openapi import OpenApi
from actorium.actors.gateway.routes import ROUTES
from actorium.actors.runtime.http.allowed_hosts import Hosts

Handler = Callable[..., Any]


def build_app(engine: Engine, hosts: Hosts | None = None) -> ASGIApp:
    """The ASGI application; hosts: the names that it goes by, None = any. A bare router: errors are
    the guard's to tell."""
    handlers = handlers_of(engine)
    return Guard(Router(redirect_slashes=False, routes=[
        Exact(path, handlers[route.name], route.methods)
        for route in ROUTES for path in route.paths]), engine, hosts)


class Exact(Route):
    """Of whole paths. Starlette's patterns end in `$`, before which a line may end: to them
    `/flush_cache%0A` is `/flush_cache`, to the guard, which looks up who may call, it is not."""

    def __init__(self, path: str, handler: Handler, methods: Sequence[str]) -> None:
        super().__init__(path, handler, methods=list(methods))
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")


def handlers_of(engine: Engine) -> dict[str, Handler]:
    """What answers, by the routes' names."""
    return {
        "page": page.load().serve,
        "docs": page.load(page.API).serve,
        "dashboard": Dashboard(engine).serve,
        "chat": chat.completions,
        "completions": completions.completions,
        "render_chat": inference.render_chat,
        "render_completion": inference.render_completion,
        "inference": inference.generate,
        "invocations": invocations.invocations,
        "responses": responses.responses,
        "input_tokens": responses_routes.input_tokens,
        "response": responses_routes.retrieve,
        "delete_response": responses_routes.delete,
        "cancel_response": responses_routes.cancel,
        "input_items": responses_routes.input_items,
        "messages": messages.messages,
        "count_tokens": messages.count_tokens,
        "models": native.models,
        "model": native.model,
        "tokenize": tokens.tokenize,
        "detokenize": tokens.detokenize,
        "generate": sglang.generate,
        "abort": sglang.abort,
        "flush_cache": native.flush_cache,
        "model_info": native.model_info,
        "server_info": native.server_info,
        "is_scaling": native.is_scaling,
        "scale": native.scale,
        "version": native.version,
        "health": native.health,
        "openapi": OpenApi().serve,
        "probe": proxy.probe,
    }
