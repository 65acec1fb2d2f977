"""`/openapi.json`: the routes as OpenAPI 3.1 says them, made from the bodies' own types."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium import __version__
from actorium.actors.gateway.chat_body import ChatBody, ChatCompletion
from actorium.actors.gateway.completion_body import CompletionBody, TextCompletion
from actorium.actors.gateway.guard import Reply
from actorium.actors.gateway.keys import ADMIN_PATHS, OPEN_PATHS
from actorium.actors.gateway.messages_body import CountBody, MessagesBody
from actorium.actors.gateway.native import (
    AbortBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from actorium.actors.gateway.responses_body import ResponsesBody

REF = "#/components/schemas/{name}"


class Told(Struct):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(Struct):
    """The body of every answer that is an error."""

    error: Told


class Operation(NamedTuple):
    """One route."""

    summary: str
    body: type | None = None
    answer: Any = dict[str, Any]
    streams: bool = False
    media: str = "application/json"


_PROBE = "A probe of the watchdog"
OPERATIONS: dict[str, Operation] = {
    "/v1/chat/completions": Operation("Complete a conversation", ChatBody, ChatCompletion, True),
    "/v1/completions": Operation("Complete texts", CompletionBody, TextCompletion, True),
    "/v1/responses": Operation("Make a response", ResponsesBody, streams=True),
    "/v1/messages": Operation("Complete a conversation, as Anthropic's API does", MessagesBody,
                              streams=True),
    "/v1/messages/count_tokens": Operation("Tokens of a conversation", CountBody),
    "/v1/models": Operation("The models that are served"),
    "/v1/models/{name}": Operation("One of them"),
    "/tokenize": Operation("Token ids of a text", TokenizeBody),
    "/detokenize": Operation("Text of token ids", DetokenizeBody),
    "/generate": Operation("Complete a prompt, by the SDK's names", GenerateBody,
                           streams=True),
    "/abort_request": Operation("End a request", AbortBody),
    "/flush_cache": Operation("Forget cached prefixes", Struct),
    "/model_info": Operation("What the model is"),
    "/server_info": Operation("Configuration and gauges"),
    "/version": Operation("The version"),
    "/health": Operation("Whether a request that came now would be served"),
    "/openapi.json": Operation("This"),
    **{path: Operation(_PROBE) for path in ("/livez", "/readyz", "/startupz", "/ping", "/load",
                                            "/health_generate")},
    "/metrics": Operation("Metrics as Prometheus reads them", media="text/plain"),
}
"""By path. Those with a body are asked by POST, the others by GET."""


def document() -> dict[str, Any]:
    """The whole document."""
    types = [kind for one in OPERATIONS.values() for kind in (one.body, one.answer)
             if kind not in (None, Struct)]
    schemas, components = msgspec.json.schema_components([*types, Refusal], ref_template=REF)
    found = iter(schemas[:-1])
    paths = {}
    for path, one in OPERATIONS.items():
        body = next(found) if one.body not in (None, Struct) else None
        paths[path] = {"get" if one.body is None else "post":
                       _operation(path, one, body, next(found), schemas[-1])}
    return {
        "openapi": "3.1.0",
        "info": {"title": "actorium", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"}}}}


def _operation(path: str, one: Operation, body: Any, answer: Any, refusal: Any) -> dict[str, Any]:
    content = {one.media: {"schema": answer if one.media == "application/json" else {}}}
    if one.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    made: dict[str, Any] = {
        "summary": one.summary,
        "operationId": (path.strip("/") or "page").replace("/", "_"),
        "responses": {"200": {"description": "The answer", "content": content},
                      "default": {"description": "Why there is none", "content": {
                          "application/json": {"schema": refusal}}}}}
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if path not in OPEN_PATHS:
        made["security"] = [{"key": []}] if path in ADMIN_PATHS else [{"key": []}, {}]
    if "{name}" in path:
        made["parameters"] = [{"name": "name", "in": "path", "required": True,
                               "schema": {"type": "string"}}]
    elif one.streams:
        made["parameters"] = [{"name": name, "in": "header", "required": False,
                               "schema": {"type": "string"}}
                              for name in ("Idempotency-Key", "Last-Event-ID")]
    return made


class OpenApi:
    """The route. Made when it is first asked."""

    def __init__(self) -> None:
        self._made = b""

    async def serve(self, http: HttpRequest) -> Response:
        """`/openapi.json`."""
        if not self._made:
            self._made = msgspec.json.encode(document())
        return Reply(self._made)
