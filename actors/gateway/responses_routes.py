"""What can be asked of a stored response: itself, its input, its end; and `/v1/responses`'s count
of tokens."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from actorium.actors.gateway import bodies
from actorium.actors.gateway.errors import HttpError
from actorium.actors.gateway.guard import Reply, caller, engine_of
from actorium.actors.gateway.responses_body import InputBody, Item
from actorium.actors.gateway.responses_keeping import OFF, context_of, orphaned
from actorium.actors.gateway.responses_store import RUNNING, ResponseStore, Stored
from actorium.actors.gateway.tokens import prompt_ids

MAX_LISTED = 100
_encode = msgspec.json.Encoder().encode


def _asked(http: HttpRequest) -> tuple[ResponseStore | None, str, str]:
    """(store, tenant, id)"""
    return engine_of(http).responses, caller(http).tenant, http.path_params["id"]


async def _stored(http: HttpRequest) -> Stored:
    """Raises `HttpError` 404, also for another tenant's."""
    store, tenant, name = _asked(http)
    if store is None:
        raise HttpError(404, f"id: {name[:100]!r} is not known: {OFF}", "id", code="not_found")
    found = await store.get(tenant, name)
    if found is None:
        raise HttpError(404, f"id: there is no response {name[:100]!r}", "id", code="not_found")
    ended = orphaned(found)
    if ended is not None:
        await store.update(tenant, name, "failed", ended)
        found = found._replace(status="failed", response=ended)
    return found


async def retrieve(http: HttpRequest) -> HttpResponse:
    """GET `/v1/responses/{id}`."""
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise HttpError(400, "stream: a stored response is not streamed; ask until its status is "
                        "neither queued nor in_progress", "stream")
    return Reply((await _stored(http)).response)


async def delete(http: HttpRequest) -> HttpResponse:
    """DELETE `/v1/responses/{id}`; one that is under way ends."""
    await _stored(http)
    store, tenant, name = _asked(http)
    assert store is not None
    await store.delete(tenant, name)
    engine_of(http).jobs.cancel(tenant, name)
    return Reply(_encode({"id": name, "object": "response.deleted", "deleted": True}))


async def cancel(http: HttpRequest) -> HttpResponse:
    """POST `/v1/responses/{id}/cancel`; one that has ended stays as it is."""
    stored = await _stored(http)
    store, tenant, name = _asked(http)
    assert store is not None
    told: dict[str, Any] = msgspec.json.decode(stored.response)
    if not told["background"]:
        raise HttpError(400, "id: only responses with background=true can be cancelled", "id")
    if stored.status in RUNNING:
        response = _encode(told | {"status": "cancelled"})
        await store.update(tenant, name, "cancelled", response)
        engine_of(http).jobs.cancel(tenant, name)
        stored = await _stored(http)
    return Reply(stored.response)


async def input_items(http: HttpRequest) -> HttpResponse:
    """GET `/v1/responses/{id}/input_items`: those of the request itself, the last first."""
    items: list[dict[str, Any]] = msgspec.json.decode((await _stored(http)).input)
    query = http.query_params
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise HttpError(400, "order: must be asc or desc", "order")
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
        raise HttpError(400, f"limit: must be between 1 and {MAX_LISTED}", "limit")
    listed = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise HttpError(400, f"after: there is no item {after[:100]!r}", "after")
        listed = listed[places[0] + 1:]
    shown = listed[:int(limit)]
    return Reply(_encode({"object": "list", "data": shown, "has_more": len(shown) < len(listed),
                          "first_id": shown[0]["id"] if shown else None,
                          "last_id": shown[-1]["id"] if shown else None}))


async def input_tokens(http: HttpRequest) -> HttpResponse:
    """POST `/v1/responses/input_tokens`: of the prompt that the body becomes."""
    engine, body = engine_of(http), await bodies.read(http, InputBody)
    body.check()
    await engine.serves(body.model)
    context = await context_of(engine.responses, caller(http).tenant, body.previous_response_id)
    items = msgspec.json.decode(context, type=list[Item])
    ids = await prompt_ids(engine.client, body.prompted(items))
    return Reply(_encode({"object": "response.input_tokens", "input_tokens": len(ids)}))
