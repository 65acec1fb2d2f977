"""Errors over HTTP: OpenAI's nested objects, and their status codes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from actorium.actors.errors import (
    Aborted,
    ActoriumError,
    BadConfig,
    BadModel,
    ContextOverflow,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    MediaExpired,
    Quarantined,
    QueueFull,
    UnknownAdapter,
    UnknownRequest,
)
from actorium.actors.gateway.http.routes import ErrorStyle

RETRY_AFTER = 1
"""Seconds after which a refused request is worth sending again."""
CONTEXT_LENGTH = "context_length_exceeded"
_OVERFLOW = re.compile(r"maximum context length is (\d+) tokens.* "
                       r"\((\d+) in the messages, (\d+) in the completion\)")
"""In the text of `errors.context_overflow`."""
INVALID, SERVER, LIMIT = "invalid_request_error", "server_error", "rate_limit_error"

ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: LIMIT, 503: "overloaded_error", 504: "timeout_error"}
"""Anthropic's error types by status; other faults of the request are `invalid_request_error`, of
the server `api_error`."""

_KINDS: tuple[tuple[type[ActoriumError], int, str, str], ...] = (
    (ContextOverflow, 400, INVALID, CONTEXT_LENGTH),
    (MediaExpired, 503, SERVER, "media_gone"),
    (UnknownAdapter, 404, INVALID, "model_not_found"),
    (InvalidRequest, 400, INVALID, "invalid_request"),
    (QueueFull, 429, LIMIT, "queue_full"),
    (UnknownRequest, 404, INVALID, "unknown_request"),
    (DeadlineExceeded, 504, SERVER, "deadline"),
    (Quarantined, 500, SERVER, "quarantined"),
    (Aborted, 409, INVALID, "aborted"),
    (EngineUnavailable, 503, SERVER, "unavailable"),
    (BadModel, 500, SERVER, "bad_model"),
    (BadConfig, 500, SERVER, "bad_config"),
)
"""Subclasses before their bases: (error, status, type, code)."""


class HttpError(Exception):
    """An error that this process raises by itself."""

    def __init__(self, status: int, message: str, param: str | None = None, kind: str = INVALID,
                 code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.kind, self.code = kind, code

    @property
    def retry_after(self) -> int:
        """Seconds until a retry makes sense; 0 = a retry will not help."""
        return RETRY_AFTER if self.status in (429, 503) else 0

    def body_in(self, style: ErrorStyle, request_id: str | None) -> dict[str, Any]:
        """Returns the JSON object in an API's format. request_id: as in `anthropic_body`."""
        if style is ErrorStyle.ANTHROPIC:
            return self.anthropic_body(request_id)
        return self.ollama_body() if style is ErrorStyle.OLLAMA else self.body()

    def body(self) -> dict[str, Any]:
        """Returns the JSON object in OpenAI's format."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param,
                          "code": self.code}}

    def anthropic_body(self, request_id: str | None = None) -> dict[str, Any]:
        """Returns the JSON object in Anthropic's format; in a stream there is no request_id."""
        kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else INVALID)
        message = self.message
        if self.code == CONTEXT_LENGTH:
            message = _too_long(message)
        body = {"type": "error", "error": {"type": kind, "message": message}}
        return body if request_id is None else body | {"request_id": request_id}

    def ollama_body(self) -> dict[str, Any]:
        """Returns the JSON object in Ollama's format."""
        return {"error": self.message}


def bad_field(field: str, why: str) -> HttpError:
    """Returns the 400 that names a field of the body; `tools[1].name` is a part of `tools`."""
    return HttpError(400, f"{field}: {why}", re.split(r"[.\[]", field)[0])


def _too_long(message: str) -> str:
    """Returns the words by which clients of Anthropic's API (Claude Code, litellm) recognise the
    error, and read how far to shorten the conversation or to lower max_tokens."""
    found = _OVERFLOW.search(message)
    if found is None:
        return message if message.startswith("min_tokens") else f"prompt is too long ({message})"
    limit, prompt, completion = map(int, found.groups())
    if prompt < limit:
        return (f"input length and `max_tokens` exceed context limit: {prompt} + {completion} > "
                f"{limit}, decrease input length or `max_tokens` and try again")
    # A prompt that fills the context has no room for a token.
    return f"prompt is too long: {prompt} tokens > {min(limit, prompt - 1)} maximum ({message})"


def http_error(error: ActoriumError, fields: Mapping[str, str] | None = None) -> HttpError:
    """Returns the HTTP error for an engine's error. fields: engine field -> the body's name of it,
    where they differ."""
    message, param = error.message, error.param
    theirs = (fields or {}).get(param or "")
    if theirs is not None:
        if message.startswith(f"{param}:"):
            message = theirs + message[len(param or ""):]
        param = theirs
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            return HttpError(status, message, param, name, code)
    return HttpError(500, message, param, SERVER, "internal")
