"""`/v1/files`: the inputs of batches, and their results."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from actorium.actors.gateway.batch.file_store import INPUT, OUTPUT, FileObject, FileStore, full
from actorium.actors.gateway.batch.form_data import FormData, boundary_of, read_form
from actorium.actors.gateway.engine_call import call_of
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, bad_field
from actorium.actors.gateway.http.replies import JsonReply

MAX_FILE = 512 << 20
"""Bytes of one upload."""
SLACK = 64 << 10
"""Bytes of a form around its file."""
PART = 1 << 20
MAX_NAME = 255
MIN_EXPIRY, MAX_EXPIRY = 3600, 30 * 86400
"""Seconds, as in OpenAI's API."""
MAX_LISTED = 10_000
OFF = "there are no files here: start the server with --files-dir DIR"


def store_of(http: HttpRequest) -> tuple[FileStore, str]:
    """Returns the store and the caller's tenant. Raises `HttpError` 501 where nothing is stored."""
    call = call_of(http)
    if call.gateway.files is None:
        raise HttpError(501, OFF, None, SERVER, "not_implemented")
    return call.gateway.files, call.tenant


async def upload(http: HttpRequest) -> Response:
    """Handles POST `/v1/files`."""
    store, tenant = store_of(http)
    boundary = boundary_of(http.headers.get("content-type", ""))
    with _temporary(store) as body, _temporary(store) as content:
        await _receive(http, store, body)
        form = await asyncio.to_thread(_extract, body, boundary, content)
        purpose = form.fields.get("purpose", "")
        if purpose != INPUT:
            raise bad_field("purpose", f"must be {INPUT}, the only one that is used here, got "
                            f"{purpose[:100]!r}")
        if form.start == form.end:
            raise bad_field("file", "is empty")
        fields = {name.removeprefix("expires_after[").removesuffix("]"): value
                  for name, value in form.fields.items() if name.startswith("expires_after[")}
        file = await store.add_file(tenant, content, form.filename[:MAX_NAME], purpose,
                                    expiry(fields or None, "expires_after"))
    return JsonReply(file)


def expiry(given: dict[str, Any] | None, field: str) -> float | None:
    """Returns after how many seconds a file expires; None = the caller does not say. Raises
    `HttpError` naming the field."""
    if given is None:
        return None
    seconds = str(given.get("seconds", ""))
    if given.get("anchor") != "created_at":
        raise bad_field(f"{field}.anchor", "must be created_at")
    if not MIN_EXPIRY <= whole_number(seconds) <= MAX_EXPIRY:
        raise bad_field(f"{field}.seconds", f"must be between {MIN_EXPIRY} and {MAX_EXPIRY}")
    return float(seconds)


@contextmanager
def _temporary(store: FileStore) -> Iterator[Path]:
    path = store.new_path()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


async def _receive(http: HttpRequest, store: FileStore, path: Path) -> None:
    """Writes the body to a file. Each MiB has `body_timeout`, and room beside all other uploads
    that come meanwhile. Raises `HttpError` 400, 408, 413."""
    limit = min(MAX_FILE, max(await store.room(), 0)) + SLACK
    declared = http.headers.get("content-length", "")
    if whole_number(declared) > limit:
        raise _too_large(limit)
    seconds = call_of(http).gateway.settings.body_timeout
    size, loop = 0, asyncio.get_running_loop()
    try:
        with path.open("xb", buffering=PART) as file:
            async with asyncio.timeout(seconds) as timeout:
                async for part in http.stream():
                    begins_mib = (size + len(part)) // PART > size // PART
                    size += len(part)
                    store.receiving += len(part)
                    if begins_mib:
                        timeout.reschedule(loop.time() + seconds)
                        if await store.room() < -SLACK:
                            raise full()
                    if size > limit:
                        raise _too_large(limit)
                    file.write(part)
    except ClientDisconnect:
        raise HttpError(400, "the body did not come to its end") from None
    except TimeoutError:
        raise HttpError(408, f"no MiB of the body came within {seconds:g} seconds",
                        code="timeout") from None
    finally:
        store.receiving -= size


def _too_large(limit: int) -> HttpError:
    if limit < MAX_FILE:
        return full()
    return HttpError(413, f"file: larger than {MAX_FILE} bytes", "file", code="file_too_large")


def _extract(body: Path, boundary: bytes, content: Path) -> FormData:
    """Writes the form's file to `content`. Raises `HttpError` 400."""
    if not body.stat().st_size:
        raise bad_field("file", "is required")
    with (body.open("rb") as file, content.open("xb") as out,
          mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data):
        form = read_form(data, boundary)
        for at in range(form.start, form.end, PART):
            out.write(data[at:min(at + PART, form.end)])
    return form


async def _named(http: HttpRequest) -> tuple[FileStore, FileObject]:
    """Raises `HttpError` 404, also for another tenant's file."""
    store, tenant = store_of(http)
    name = http.path_params["id"]
    file = await store.file(tenant, name)
    if file is None:
        raise HttpError(404, f"id: there is no file {name[:100]!r}", "id", code="not_found")
    return store, file


async def retrieve(http: HttpRequest) -> Response:
    """Handles GET `/v1/files/{id}`."""
    return JsonReply((await _named(http))[1])


async def content(http: HttpRequest) -> Response:
    """Handles GET `/v1/files/{id}/content`."""
    store, file = await _named(http)
    return FileResponse(store.path_of(file.id), media_type="application/octet-stream",
                        filename=file.filename)


async def delete(http: HttpRequest) -> Response:
    """Handles DELETE `/v1/files/{id}`."""
    store, file = await _named(http)
    await store.delete_file(store_of(http)[1], file.id)
    return JsonReply({"id": file.id, "object": "file", "deleted": True})


async def listed(http: HttpRequest) -> Response:
    """Handles GET `/v1/files`: the caller's files, the newest first."""
    store, tenant = store_of(http)
    query = http.query_params
    limit, order = limit_of(http, MAX_LISTED, MAX_LISTED), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_field("order", "must be asc or desc")
    purpose = query.get("purpose")
    if purpose not in (None, INPUT, OUTPUT):
        raise bad_field("purpose", f"must be {INPUT} or {OUTPUT}")
    return page_of(await store.files(tenant, query.get("after"), limit + 1, order == "desc",
                                     purpose), limit)


def limit_of(http: HttpRequest, default: int, most: int) -> int:
    """Returns how many the caller wants to see at once. Raises `HttpError`."""
    limit = whole_number(http.query_params.get("limit", str(default)))
    if not 1 <= limit <= most:
        raise bad_field("limit", f"must be between 1 and {most}")
    return limit


def whole_number(text: str) -> int:
    """Returns a number of at most 15 digits, -1 for any other text. (Python raises `ValueError` for
    more digits than 4,300.)"""
    return int(text) if len(text) <= 15 and text.isascii() and text.isdecimal() else -1


def page_of(items: Any, limit: int) -> Response:
    """Answers with the first `limit` items; one more says that there are more. None: there is
    nothing that the caller's `after` names."""
    if items is None:
        raise bad_field("after", "there is none of this id")
    shown = items[:limit]
    return JsonReply({
        "object": "list", "data": shown, "has_more": len(items) > limit,
        "first_id": shown[0].id if shown else None, "last_id": shown[-1].id if shown else None})
