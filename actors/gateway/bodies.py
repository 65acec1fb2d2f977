"""Reading a request's JSON: bounded, typed, with errors that name the field.

Unknown fields are ignored, since routers add some (but see `unsupported`); a wrong type is a 400;
null for a field that may be absent is its absence (`nulls`).
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from actorium.actors.gateway import nulls, outline
from actorium.actors.gateway.errors import SERVER, HttpError

SMALL = 64 << 10
"""Bytes of a body that are not counted among those that all requests may send at once."""
PATIENCE = 16
"""Times the limit that is read of a body that is too large."""
Body = TypeVar("Body")
_PLACE = re.compile(r" - at `\$\.?(?P<path>.*)`$")


async def read(request: Request, kind: type[Body]) -> Body:
    """The request's body as a `kind`. Raises `HttpError` 400 or 413."""
    body = decode(await raw(request), kind)
    if getattr(body, "resumable", False):
        request.app.ask.resumable = True
    if (name := getattr(body, "request_id", None)) is not None:
        request.app.ask.answer_id = name
    return body


async def raw(request: Request) -> bytes:
    """The bytes of the body. Raises `HttpError` 408, 415 and 503, and 413 past the limit, told when
    the rest has been read and dropped, if that is not too much: who still sends does not read the
    answer."""
    limit: int = request.app.settings.max_body_bytes
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, f"content-encoding: {encoding[:40]!r} is not taken; send the body as "
                        "it is", "content-encoding", code="unsupported_encoding")
    try:
        async with asyncio.timeout(request.app.settings.body_timeout):
            body = await _bounded(request, limit)
    except ClientDisconnect:
        raise HttpError(400, "the body did not come to its end") from None
    except TimeoutError:
        raise HttpError(408, "the body did not come within "
                        f"{request.app.settings.body_timeout:g} seconds", code="timeout") from None
    request.app.ask.body(body)
    return body


async def _bounded(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = large = 0
    held = request.app.bodies
    try:
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
                if size > SMALL:
                    large += len(part)
                    held.now += len(part)
                    if held.now > held.most:
                        raise HttpError(503, "too many large bodies are being sent at once", None,
                                        SERVER, "too_many_bodies")
            elif size > PATIENCE * limit:
                break
    finally:
        held.now -= large
    if size > limit:
        raise HttpError(413, f"body: larger than the limit of {limit} bytes",
                        code="body_too_large")
    return b"".join(parts)


def decode(body: bytes, kind: type[Body]) -> Body:
    """JSON as a `kind`. Raises `HttpError` 400 naming the field."""
    outline.check(body)
    try:
        found: Body = nulls.decode(body, kind)
        return found
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, f"body: not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise HttpError(400, "body: nested too deeply", code="invalid_json") from None


def invalid(text: str) -> HttpError:
    """msgspec's text of a wrong value, told with the field in front."""
    found = _PLACE.search(text)
    where = found["path"] if found is not None else ""
    what = text[:found.start()] if found is not None else text
    missing = re.search(r"required field `([^`]*)`", what)
    if missing is not None:
        where = f"{where}.{missing[1]}".lstrip(".")
        what = "is required"
    unknown = re.search(r"contains unknown field `([^`]*)`", what)
    if unknown is not None:
        where = f"{where}.{unknown[1]}".lstrip(".")
        what = "there is no such field"
    return HttpError(400, f"{where or 'body'}: {what}", where.split("[")[0].split(".")[0] or None,
                     code="invalid_request")
