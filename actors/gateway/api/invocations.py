"""`/invocations`, SageMaker's route to a model: one path for every kind of body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.types import Message

from actorium.actors.gateway.api.chat_completions import ChatTurn
from actorium.actors.gateway.api.completions import CompletionsTurn
from actorium.actors.gateway.api.responses import ResponsesTurn
from actorium.actors.gateway.api.sglang import GenerateTurn
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError


class InvocationBody(Struct, kw_only=True):
    """The fields that determine a body's kind."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    text: Any = None
    input_ids: Any = None
    stream: Any = None
    """Of every kind."""


ROUTES: dict[str, Callable[[HttpRequest], Awaitable[Any]]] = {
    "messages": ChatTurn.handle, "prompt": CompletionsTurn.handle,
    "input": ResponsesTurn.handle, "text": GenerateTurn.handle, "input_ids": GenerateTurn.handle}
"""The handler of a body with this field: the first one that it has."""


async def invocations(http: HttpRequest) -> Any:
    """Forwards to the route that the body belongs to."""
    body = await bodies.raw(http)
    found = bodies.decode(body, InvocationBody)
    kind = next((name for name in ROUTES if getattr(found, name) is not None), None)
    if kind is None:
        raise HttpError(400, f"body: one of {', '.join(ROUTES)} is needed")

    async def again() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return await ROUTES[kind](HttpRequest(http.scope, again))
