"""The operations on a stored response: retrieve, delete, cancel, list its input; and references to
its items, which the AI SDK sends in their place.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from actorium.actors.gateway.api.files import limit_of
from actorium.actors.gateway.api.response_store import (
    OFF,
    RUNNING,
    ResponseStore,
    StoredResponse,
    context_of,
    orphaned,
)
from actorium.actors.gateway.api.responses_body import REFERENCE, InputBody, InputItem
from actorium.actors.gateway.api.sampling_fields import check_turns
from actorium.actors.gateway.api.tokens import prompt_ids
from actorium.actors.gateway.engine_call import call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.http.replies import JsonReply, encode_json

DEFAULT_LISTED, MAX_LISTED = 20, 100


async def resolved(store: ResponseStore | None, tenant: str, items: list[InputItem],
                   context: list[InputItem]) -> list[InputItem]:
    """Returns the items with those that references name in their place, as far as they are stored;
    a reference to one of the context, which is there already, is left out. Raises `HttpError` on
    too many."""
    check_turns([*context, *items], "input")
    before = {item.id for item in context}
    known: dict[str | None, InputItem] = {}
    sought: set[str] = set()
    found = []
    for item in items:
        if item.kind != REFERENCE or item.id is None:
            found.append(item)
        elif item.id not in before:
            # An item is called after its response.
            response = f"resp_{item.id.partition('_')[2].rpartition('_')[0]}"
            if store is not None and response not in sought:
                sought.add(response)
                known |= await _items_of(store, tenant, response)
            found.append(known.get(item.id, item))
    return found


async def _items_of(store: ResponseStore, tenant: str, response: str
                    ) -> dict[str | None, InputItem]:
    """Returns the items of a response's input and output by their ids; none if it is not known."""
    stored = await store.get(tenant, response)
    if stored is None:
        return {}
    items = [*msgspec.json.decode(stored.input), *msgspec.json.decode(stored.response)["output"]]
    return {item.id: item for item in msgspec.convert(items, list[InputItem])}


# --- routes ---

def _addressed(http: HttpRequest) -> tuple[ResponseStore | None, str, str]:
    """Returns (store, tenant, id)."""
    call = call_of(http)
    return call.gateway.responses, call.tenant, http.path_params["id"]


async def _stored(http: HttpRequest) -> StoredResponse:
    """Raises `HttpError` 404, also for another tenant's."""
    store, tenant, name = _addressed(http)
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
    """Handles GET `/v1/responses/{id}`."""
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise bad_field("stream", "a stored response is not streamed; ask until its status is "
                        "neither queued nor in_progress")
    return JsonReply((await _stored(http)).response)


async def delete(http: HttpRequest) -> HttpResponse:
    """Handles DELETE `/v1/responses/{id}`; ends one that is under way."""
    await _stored(http)
    store, tenant, name = _addressed(http)
    assert store is not None
    await store.delete(tenant, name)
    call_of(http).gateway.jobs.cancel(tenant, name)
    return JsonReply({"id": name, "object": "response.deleted", "deleted": True})


async def cancel(http: HttpRequest) -> HttpResponse:
    """Handles POST `/v1/responses/{id}/cancel`; one that has ended stays as it is."""
    stored = await _stored(http)
    store, tenant, name = _addressed(http)
    assert store is not None
    shown: dict[str, Any] = msgspec.json.decode(stored.response)
    if not shown["background"]:
        raise bad_field("id", "only responses with background=true can be cancelled")
    if stored.status in RUNNING:
        response = encode_json(shown | {"status": "cancelled"})
        await store.update(tenant, name, "cancelled", response)
        call_of(http).gateway.jobs.cancel(tenant, name)
        stored = await _stored(http)
    return JsonReply(stored.response)


async def input_items(http: HttpRequest) -> HttpResponse:
    """Handles GET `/v1/responses/{id}/input_items`: the request's own items, the last first."""
    items: list[dict[str, Any]] = msgspec.json.decode((await _stored(http)).input)
    query = http.query_params
    order, limit = query.get("order", "desc"), limit_of(http, DEFAULT_LISTED, MAX_LISTED)
    if order not in ("asc", "desc"):
        raise bad_field("order", "must be asc or desc")
    listed = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise bad_field("after", f"there is no item {after[:100]!r}")
        listed = listed[places[0] + 1:]
    shown = listed[:limit]
    return JsonReply({
        "object": "list", "data": shown, "has_more": len(shown) < len(listed),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None})


async def input_tokens(http: HttpRequest) -> HttpResponse:
    """Handles POST `/v1/responses/input_tokens`: counts the tokens of the body's prompt."""
    call, body = call_of(http), await bodies.read(http, InputBody)
    body.check()
    await call.chosen.model(body)
    context = await context_of(call.gateway.responses, call.tenant, body.previous_response_id)
    items = msgspec.json.decode(context, type=list[InputItem])
    body.input = await resolved(call.gateway.responses, call.tenant, body.items(), items)
    ids = await prompt_ids(call.engine.client, body.prompted(items))
    return JsonReply({"object": "response.input_tokens", "input_tokens": len(ids)})
