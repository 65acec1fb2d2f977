"""Typed errors, the same on the wire (by code) and in the SDK (by class)."""

from __future__ import annotations

SHOWN = 80
"""Maximum of characters of a value in a message."""


class ActoriumError(Exception):
    """Base of everything the SDK raises. `code` names the kind, `param` the field at fault."""

    code = "internal"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def shown(value: object) -> str:
    """A value of unknown origin for a message: printable, on one line, cut at `SHOWN`."""
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > SHOWN:
        kind = type(value).__name__
        text = repr(value[:SHOWN]) if isinstance(value, str | bytes | list | tuple) else kind
    else:
        text = _repr(value)
    text = "".join(c if c.isprintable() else "?" for c in text[:SHOWN + 1])
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _repr(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; too deep
        return type(value).__name__


class InvalidRequest(ActoriumError):
    """A field of the request is wrong; `param` names it."""

    code = "invalid_request"


class ContextOverflow(InvalidRequest):
    """Prompt (plus max_tokens) does not fit the context or the page pool."""

    code = "context_overflow"


def context_overflow(limit: int, prompt: int, completion: int, param: str) -> ContextOverflow:
    """The error for `prompt` and `completion` tokens that do not fit a context of `limit`. litellm
    and others recognise the error by these words."""
    return ContextOverflow(
        f"{param}: This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt + completion} tokens ({prompt} in the messages, {completion} in the completion).",
        param)


class QueueFull(ActoriumError):
    """Too many requests are waiting; try again later."""

    code = "queue_full"


class DeadlineExceeded(ActoriumError):
    """The deadline passed (the request's, or the call's own timeout)."""

    code = "deadline"


class Aborted(ActoriumError):
    """The request was cancelled."""

    code = "aborted"


class Quarantined(ActoriumError):
    """An actor failed on this request, or died of it; it is not tried again."""

    code = "quarantined"


class UnknownRequest(ActoriumError):
    """The engine knows no request of this id (any more)."""

    code = "unknown_request"


class UnknownAdapter(InvalidRequest):
    """There is no LoRA adapter of that name."""

    code = "unknown_adapter"


class MediaExpired(InvalidRequest):
    """An image or a video of the request is not held any more: it has to be loaded again."""

    code = "media_gone"


class EngineUnavailable(ActoriumError):
    """No engine of that name, or it is stopping, or it died."""

    code = "unavailable"


class EngineFailed(EngineUnavailable):
    """The engine could not start; the message says why."""

    code = "engine_failed"


class BadModel(ActoriumError):
    """The checkpoint cannot be served: missing, corrupt, or of an unsupported kind."""

    code = "bad_model"


class BadConfig(ActoriumError):
    """A flag, environment variable or TOML key is wrong; `param` names it."""

    code = "bad_config"


CODES: dict[str, type[ActoriumError]] = {
    cls.code: cls
    for cls in (ActoriumError, InvalidRequest, ContextOverflow, QueueFull, DeadlineExceeded,
                Aborted, Quarantined, UnknownRequest, UnknownAdapter, MediaExpired,
                EngineUnavailable, EngineFailed, BadModel, BadConfig)
}


FIELD_FIRST = ("invalid_request", "context_overflow", "unknown_adapter")
"""Codes of errors whose messages begin with a field's name."""


def from_code(code: str, message: str, param: str | None = None) -> ActoriumError:
    """The exception that a wire error stands for; an engine's refusal begins with its field."""
    field = message.partition(":")[0]
    if param is None and code in FIELD_FIRST and field.isidentifier():
        param = field
    return CODES.get(code, ActoriumError)(message, param)
