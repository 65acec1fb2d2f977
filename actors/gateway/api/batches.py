"""`/v1/batches`: files of requests that are answered when nothing else is to be done
(`batch/batch_worker.py`)."""

from __future__ import annotations

import os
import re
from typing import Any

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.gateway.api.files import expiry, limit_of, page_of, store_of
from actorium.actors.gateway.batch.batch_lines import SHOWN, is_endpoint
from actorium.actors.gateway.batch.file_store import (
    INPUT,
    BatchObject,
    RequestCounts,
)
from actorium.actors.gateway.engine_call import call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.http.replies import JsonReply

MAX_WINDOW = 30 * 86400
"""Seconds."""
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
DEFAULT_LISTED, MAX_LISTED = 20, 100
_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


class BatchBody(Struct, kw_only=True):
    """A batch that is to be made."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None

    def check(self) -> int:
        """Returns the seconds of the window. Raises `HttpError` naming the field."""
        if not is_endpoint(self.endpoint):
            raise bad_field("endpoint", f"{self.endpoint[:100]!r} is not one of {SHOWN}")
        pairs = self.metadata or {}
        if len(pairs) > MAX_METADATA or any(len(key) > MAX_KEY or len(value) > MAX_VALUE
                                            for key, value in pairs.items()):
            raise bad_field("metadata", f"at most {MAX_METADATA} pairs, names of {MAX_KEY} and "
                            f"values of {MAX_VALUE} characters")
        expiry(self.output_expires_after, "output_expires_after")
        match = _WINDOW.fullmatch(self.completion_window)
        seconds = int(match[1]) * _SECONDS[match[2]] if match is not None else 0
        if not 0 < seconds <= MAX_WINDOW:
            raise bad_field("completion_window", "must be a number and m, h or d, as 24h, and at "
                            "most 30d")
        return seconds


async def create(http: HttpRequest) -> Response:
    """Handles POST `/v1/batches`."""
    store, tenant = store_of(http)
    body = await bodies.read(http, BatchBody)
    seconds = body.check()
    file = await store.file(tenant, body.input_file_id)
    if file is None:
        raise HttpError(404, f"input_file_id: there is no file {body.input_file_id[:100]!r}",
                        "input_file_id", code="not_found")
    if file.purpose != INPUT:
        raise bad_field("input_file_id", f"the purpose of {file.id!r} is not {INPUT}")
    now = int(store.clock())
    batch = BatchObject(
        id=f"batch_{os.urandom(12).hex()}", endpoint=body.endpoint, input_file_id=file.id,
        completion_window=body.completion_window, created_at=now, expires_at=now + seconds,
        request_counts=RequestCounts(), metadata=body.metadata,
        output_expires_after=body.output_expires_after)
    await store.add_batch(tenant, batch)
    call_of(http).gateway.batches_changed.set()
    return JsonReply(batch)


async def retrieve(http: HttpRequest) -> Response:
    """Handles GET `/v1/batches/{id}`."""
    return JsonReply(await _named(http))


async def listed(http: HttpRequest) -> Response:
    """Handles GET `/v1/batches`: the caller's batches, the newest first."""
    store, tenant = store_of(http)
    limit = limit_of(http, DEFAULT_LISTED, MAX_LISTED)
    return page_of(await store.batches(tenant, http.query_params.get("after"), limit + 1), limit)


async def cancel(http: HttpRequest) -> Response:
    """Handles POST `/v1/batches/{id}/cancel`. What has been answered becomes the batch's output."""
    store, _ = store_of(http)
    batch = await _named(http)

    def end(batch: BatchObject) -> None:
        if batch.status in ("validating", "in_progress"):
            batch.move("cancelling", store.clock())
        elif batch.status != "cancelling":
            raise HttpError(409, f"id: the batch is {batch.status}: it cannot be cancelled", "id",
                            code="batch_ended")

    batch = await store.change_batch(batch.id, end)
    call_of(http).gateway.batches_changed.set()
    return JsonReply(batch)


async def _named(http: HttpRequest) -> BatchObject:
    """Raises `HttpError` 404, also for another tenant's batch."""
    store, tenant = store_of(http)
    name = http.path_params["id"]
    batch = await store.batch(tenant, name)
    if batch is None:
        raise HttpError(404, f"id: there is no batch {name[:100]!r}", "id", code="not_found")
    return batch
