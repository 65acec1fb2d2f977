"""Answers over HTTP, event by event."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import msgspec

from actorium.actors.errors import EngineUnavailable
from actorium.tools.bench.http_client import EventReader, Http


async def json_events(http: Http, path: str, body: dict[str, Any], headers: str,
                      reader: EventReader | None = None) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream, or an answer that is none as one. reader: is told what is read, ids
    too. Raises `EngineUnavailable`, for an error within the stream as well."""
    events = cast(AsyncGenerator[bytes, None], http.events(path, body, headers, reader))
    async with aclosing(events):
        async for data in events:
            try:
                event = msgspec.json.decode(data, type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise EngineUnavailable(f"not JSON: {error}") from None
            if "error" in event:
                raise EngineUnavailable(f"in the stream: {str(event['error'])[:200]}")
            yield event
