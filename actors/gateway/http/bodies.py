"""Reads a request's JSON: bounded, typed, with errors that name the field.

Unknown fields are ignored, since routers add some (but see `Unsupported`); a wrong type is a
400; `null` for an optional field means that it is absent, since many clients write every field that
they know; `4.0` is an integer.

The values of a large body are counted before it is decoded. Decoding takes time per value, not per
byte: 4 MiB of text take 10 ms, of empty lists half a second (the garbage collector visits each of
them again and again), of numbers with long fractions more than a second; and while one body is
decoded, the process answers no other caller.
"""

from __future__ import annotations

import asyncio
import functools
import re
from codecs import BOM_UTF8
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request

from actorium.actors.gateway.engine_call import call_of
from actorium.actors.gateway.gateway_state import BodyBudget
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, bad_field

SMALL = 64 << 10
"""Bytes of a body that are not counted among those that all requests may send at once."""
PATIENCE = 16
"""Times the limit that is read of a body that is too large."""
Body = TypeVar("Body")
_NAME = re.compile(r"[\x21-\x7e]{1,128}")
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F][0-9a-fA-F])\\u[dD][c-fC-F][0-9a-fA-F]{2})")
_PLACE = re.compile(r" - at `\$\.?(?P<path>.*)`$")


async def read(request: Request, kind: type[Body]) -> Body:
    """Returns the request's body as a `kind`. Raises `HttpError` 400 or 413."""
    body, call = decode(await raw(request), kind), call_of(request)
    if getattr(body, "resumable", False):
        call.resumable, call.answer_id = True, call.resume_id
    if (name := getattr(body, "request_id", None)) is not None:
        call.answer_id = _answer_id(name)
    return body


def _answer_id(wanted: str) -> str:
    """Returns the answer's id that the request asks for. Raises `HttpError` if it is not a valid
    id."""
    if not _NAME.fullmatch(wanted):
        raise bad_field("request_id", "1 to 128 printable ASCII characters without spaces")
    return wanted


async def raw(request: Request) -> bytes:
    """Returns the bytes of the body. Raises `HttpError` 408, 415 and 503, and 413 past the limit,
    but only when the rest has been read and dropped, if that is not too much: a client that still
    sends does not read the answer."""
    call = call_of(request)
    settings = call.gateway.settings
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, f"content-encoding: {encoding[:40]!r} is not taken; send the body as "
                        "it is", "content-encoding", code="unsupported_encoding")
    try:
        async with asyncio.timeout(settings.body_timeout):
            body = await _bounded(request, call.gateway.bodies, call.gateway.body_limit)
    except ClientDisconnect:
        raise HttpError(400, "the body did not come to its end") from None
    except TimeoutError:
        raise HttpError(408, "the body did not come within "
                        f"{settings.body_timeout:g} seconds", code="timeout") from None
    call.on_body(body)
    return body


async def _bounded(request: Request, budget: BodyBudget, limit: int) -> bytes:
    parts: list[bytes] = []
    size = large = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
                if size > SMALL:
                    large += len(part)
                    budget.used += len(part)
                    if budget.used > budget.limit:
                        raise HttpError(503, "too many large bodies are being sent at once", None,
                                        SERVER, "too_many_bodies")
            elif size > PATIENCE * limit:
                break
    finally:
        budget.used -= large
    if size > limit:
        raise HttpError(413, f"body: larger than the limit of {limit} bytes",
                        code="body_too_large")
    return b"".join(parts)


def decode(body: bytes, kind: type[Body]) -> Body:
    """Decodes JSON as a `kind`. Raises `HttpError` 400 naming the field."""
    body = body.removeprefix(BOM_UTF8)  # some clients on Windows write one
    check_values(body)
    try:
        value: Body = _decode_leniently(body, kind)
        return value
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        lone = _LONE_SURROGATE.search(body)
        why = f"half of a character, {lone[1].decode()}, without its other half" \
            if lone is not None else str(error)
        raise HttpError(400, f"body: not JSON: {why}", code="invalid_json") from None
    except RecursionError:
        raise HttpError(400, "body: nested too deeply", code="invalid_json") from None


def invalid(text: str) -> HttpError:
    """Returns msgspec's text of a wrong value, with the field in front."""
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


CHEAP = 64 << 10
"""Bytes of a body that cannot cost much, whatever it is made of."""
MAX_CONTAINERS = 1 << 16
"""Objects and arrays."""
MAX_STRINGS = 1 << 17
"""Names of members included."""
MAX_FRACTIONS = 1 << 11
"""Numbers with a point or an exponent."""


def check_values(body: bytes) -> None:
    """Raises `HttpError` 400 for a body of more values than any request needs.

    For invalid JSON the counts mean nothing; decoding will report it.
    """
    if len(body) <= CHEAP:
        return
    # Never counts too many, so that it may refuse; too few where strings end with a backslash.
    _bound("strings", (body.count(b'"') - body.count(b'\\"')) // 2, MAX_STRINGS)
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts = body.split(b'"')
    _bound("strings", len(parts) // 2, MAX_STRINGS)
    rest = b"".join(parts[::2])
    _bound("objects and arrays", rest.count(b"{") + rest.count(b"["), MAX_CONTAINERS)
    words = rest.count(b"true") + rest.count(b"false")
    _bound("numbers with fractions",
           rest.count(b".") + rest.count(b"e") + rest.count(b"E") - words, MAX_FRACTIONS)


def _bound(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise HttpError(400, f"body: {count} {what} are more than the limit of {limit}",
                        code="body_too_large")


def relaxed(value: Any, kind: Any) -> Any:
    """Returns a copy of `value`, which JSON was decoded to, without the nulls of fields that have a
    default and whose type has no null, and with an integer for `4.0` where one is wanted (JSON has
    numbers alone, and some languages write all of them so). kind: the type that it is to become;
    values of type `Any` are left as they are."""
    return _typed(value, _info(kind))


@functools.cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _typed(value: Any, kind: inspect.Type) -> Any:
    if isinstance(value, dict):
        return _object(value, kind)
    if isinstance(value, float):
        whole = value.is_integer() and _member(kind, inspect.FloatType) is None \
            and _member(kind, inspect.IntType) is not None
        return int(value) if whole else value
    if isinstance(value, list):
        items = _member(kind, inspect.ListType)
        if items is None or (_plain(items.item_type) and len(value) > MAX_FRACTIONS):
            return value
        return [_typed(one, items.item_type) for one in value]
    return value


def _object(value: dict[str, Any], kind: inspect.Type) -> dict[str, Any]:
    struct = _member(kind, inspect.StructType)
    if struct is not None:
        fields = {field.encode_name: field for field in struct.fields}
        return {name: _typed(one, fields[name].type) if name in fields else one
                for name, one in value.items()
                if one is not None or name not in fields or not _absent(fields[name])}
    table = _member(kind, inspect.DictType)
    if table is not None and not _plain(table.value_type):
        return {name: _typed(one, table.value_type) for name, one in value.items()}
    return value


def _plain(kind: inspect.Type) -> bool:
    """True if nothing of this type has fields: two million numbers are not visited one by one."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return not any(isinstance(one, inspect.StructType | inspect.ListType | inspect.DictType)
                   for one in kinds)


def _absent(field: inspect.Field) -> bool:
    """True if a null means that the field is absent."""
    return not field.required and _member(field.type, inspect.NoneType) is None \
        and not isinstance(field.type, inspect.AnyType)


def _member(kind: inspect.Type, wanted: type[Any]) -> Any:
    """Returns the type itself, or the one of a union, if it is of the wanted sort."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((one for one in kinds if isinstance(one, wanted)), None)


def _decode_leniently(body: bytes, kind: Any) -> Any:
    """Decodes JSON as a `kind`, `relaxed` where it is none. Raises as `msgspec.json.decode`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if not str(error).partition(" - at ")[0].endswith(("got `null`", "got `float`")):
            raise
    # Rare: only bodies with such values pay for a second decoding.
    return msgspec.convert(relaxed(msgspec.json.decode(body), kind), kind, str_keys=True)
