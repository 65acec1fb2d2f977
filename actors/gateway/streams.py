"""Streams of deltas as routes want them: what has come together at once, several as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from actorium.actors.client_requests import StreamDelta, joined
from actorium.actors.gateway.deltas import Deltas

AHEAD = 256
"""Takings of deltas before somebody wants them."""


async def together(stream: Deltas) -> AsyncGenerator[list[StreamDelta], None]:
    """What there is of a stream each time somebody asks, at least one delta, those of a choice
    joined. Closing the stream is the caller's."""
    async for delta in stream:
        more = stream.more()
        yield joined([delta, *more]) if more else [delta]


def merged(streams: Sequence[Deltas]) -> AsyncGenerator[list[tuple[int, StreamDelta]], None]:
    """(number of the stream, delta): all that there are each time somebody asks. An error of one
    ends all. Closing the streams is the caller's."""
    return _one_by_one(streams[0]) if len(streams) == 1 else _side_by_side(streams)


async def _one_by_one(stream: Deltas) -> AsyncGenerator[list[tuple[int, StreamDelta]], None]:
    async for delta in stream:
        more = stream.more()
        yield [(0, one) for one in joined([delta, *more])] if more else [(0, delta)]


async def _side_by_side(streams: Sequence[Deltas]
                        ) -> AsyncGenerator[list[tuple[int, StreamDelta]], None]:
    ready: asyncio.Queue[tuple[int, list[StreamDelta] | BaseException | None]] = \
        asyncio.Queue(AHEAD)

    async def pump(number: int, stream: Deltas) -> None:
        try:
            async for deltas in together(stream):
                await ready.put((number, deltas))
            await ready.put((number, None))
        except Exception as error:
            await ready.put((number, error))

    tasks = [asyncio.ensure_future(pump(i, one)) for i, one in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            found: list[tuple[int, StreamDelta]] = []
            items = [await ready.get()]
            while not ready.empty():
                items.append(ready.get_nowait())
            for number, item in items:
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    found += [(number, delta) for delta in item]
            if found:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
