"""References to items of earlier responses, which the AI SDK sends in their place."""

from __future__ import annotations

import msgspec

from actorium.actors.gateway.api.response_store import ResponseStore
from actorium.actors.gateway.api.responses_body import REFERENCE, InputItem
from actorium.actors.gateway.api.sampling_fields import check_turns


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
