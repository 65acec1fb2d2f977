"""Streams of deltas as routes want them: what has come together at once, several as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgspec

from actorium.actors.client.requests import StreamDelta, joined
from actorium.actors.gateway.deltas import Deltas, prompts_of

AHEAD = 256
"""Takings of deltas before somebody wants them."""


async def together(stream: Deltas) -> AsyncGenerator[list[StreamDelta], None]:
    """What there is of a stream each time somebody asks, at least one delta, those of a choice
    joined. Closing the stream is the caller's."""
    async for delta in stream:
        more = stream.more()
        yield joined([delta, *more]) if more else [delta]


class Merged(AsyncIterator[StreamDelta]):
    """The streams of several prompts as one, whose choices are numbered through: those of the
    second prompt follow those of the first. An error of one ends all. Closing it closes them."""

    def __init__(self, streams: Sequence[Deltas], choices: int) -> None:
        """choices: of each stream."""
        self._streams, self._choices = streams, choices
        self._all = _side_by_side(streams)
        self._found: list[StreamDelta] = []

    @property
    def prompt_tokens(self) -> int | None:
        """Of all prompts together; None until all are known."""
        return sum(found) if (found := self.prompts()) else None

    def prompts(self) -> tuple[int, ...]:
        """Tokens of each prompt; none until all are known."""
        found = [prompts_of(stream) for stream in self._streams]
        return tuple(one for each in found for one in each) if all(found) else ()

    async def accepted(self) -> int:
        """As `AsyncDeltaStream.accepted`, of all of them."""
        return sum(await asyncio.gather(*(stream.accepted() for stream in self._streams)))

    def more(self) -> list[StreamDelta]:
        """As `AsyncDeltaStream.more`."""
        found, self._found = self._found, []
        return found

    async def __anext__(self) -> StreamDelta:
        while not self._found:
            self._found = [self._numbered(*one) for one in await anext(self._all)]
        return self._found.pop(0)

    def _numbered(self, stream: int, delta: StreamDelta) -> StreamDelta:
        if not stream:
            return delta
        return msgspec.structs.replace(delta, index=stream * self._choices + delta.index)

    async def aclose(self) -> None:
        await self._all.aclose()
        for stream in self._streams:
            await stream.aclose()

    async def __aenter__(self) -> Merged:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


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
