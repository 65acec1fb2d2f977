"""The routes of one gateway process."""

from __future__ import annotations

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from actorium.actors.gateway import chat, completions, messages, native, page, proxy, responses
from actorium.actors.gateway.dashboard import Dashboard
from actorium.actors.gateway.engine import Engine
from actorium.actors.gateway.guard import Guard
from actorium.actors.gateway.openapi import OpenApi

POST = ["POST"]


def build_app(engine: Engine) -> ASGIApp:
    """The ASGI application. A bare router: errors are the guard's to tell."""
    return Guard(Router(redirect_slashes=False, routes=[
        Route("/", page.load().serve),
        Route("/dashboard/events", Dashboard(engine).serve),
        Route("/v1/chat/completions", chat.completions, methods=POST),
        Route("/v1/responses", responses.responses, methods=POST),
        Route("/v1/messages", messages.messages, methods=POST),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=POST),
        Route("/v1/completions", completions.completions, methods=POST),
        Route("/v1/models", native.models),
        Route("/v1/models/{name:path}", native.model),
        Route("/tokenize", native.tokenize, methods=POST),
        Route("/detokenize", native.detokenize, methods=POST),
        Route("/generate", native.generate, methods=POST),
        Route("/abort_request", native.abort, methods=POST),
        Route("/flush_cache", native.flush_cache, methods=POST),
        Route("/model_info", native.model_info),
        Route("/server_info", native.server_info),
        Route("/version", native.version),
        Route("/health", native.health),
        Route("/openapi.json", OpenApi().serve),
        *(Route(path, proxy.probe, methods=methods) for path, methods in proxy.METHODS.items()),
    ]), engine)
