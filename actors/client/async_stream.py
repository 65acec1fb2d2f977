"""The stream of one request of an `AsyncClient`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from actorium.actors.client.core import TOKENIZER, Pending
from actorium.actors.client.pending import Progress
from actorium.actors.client.requests import Request, StreamDelta
from actorium.actors.messages import Abort

if TYPE_CHECKING:
    from actorium.actors.client.async_client import AsyncClient

NEWS_LATE = 1.0
"""Seconds that the tokenizer's answer may come after the first delta."""


class AsyncDeltaStream(AsyncIterator[StreamDelta]):
    """Deltas of one request, sent at the first `anext`. `rid` names it from then on."""

    def __init__(self, client: AsyncClient, request: Request) -> None:
        self._client = client
        self._request = request
        self._pending: Pending | None = None
        self._news = asyncio.Event()

    @property
    def rid(self) -> str:
        """"" until the request was sent."""
        return "" if self._pending is None else self._pending.rid

    @property
    def progress(self) -> Progress | None:
        """None until the request was sent."""
        return None if self._pending is None else self._pending.progress

    @property
    def prompt_tokens(self) -> int | None:
        """None until the request was accepted, as a rule before its first delta."""
        return None if self._pending is None else self._pending.prompt_tokens

    async def accepted(self) -> int:
        """Send the request, if it was not, and wait for `prompt_tokens`. 0 if it ends before, which
        the next `anext` tells, or if an actor died with the news."""
        pending = self._pending or await self._start()
        while pending.prompt_tokens is None and not pending.done and not pending.told:
            await self._wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWS_LATE):
                while pending.prompt_tokens is None and not pending.done:
                    self._news.clear()
                    await self._news.wait()
        return pending.prompt_tokens or 0

    def more(self) -> list[StreamDelta]:
        """Deltas that have come already, without waiting."""
        if self._pending is None:
            return []
        found = list(self._pending.deltas)
        self._pending.deltas.clear()
        return found

    async def _wait(self) -> None:
        self._news.clear()
        try:
            await self._news.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise

    async def __anext__(self) -> StreamDelta:
        pending = self._pending or await self._start()
        while not pending.deltas and not pending.done:
            await self._wait()
        if pending.deltas:
            return pending.deltas.popleft()
        if pending.error is not None:
            error, pending.error = pending.error, None
            raise error
        raise StopAsyncIteration

    async def _start(self) -> Pending:
        client = self._client
        await client._ready()
        if self._pending is not None:  # who also waits for it has sent it meanwhile
            return self._pending
        pending, frame = client._core.submit(self._request, monotonic(), streaming=True)
        pending.notify = self._news.set
        self._pending = pending
        client._send(TOKENIZER, frame)
        return pending

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        pending = self._pending
        if pending is not None and not pending.done and self._client._core.forget(pending.rid):
            pending.done = True
            self._client._abort([Abort(pending.rid)])

    async def __aenter__(self) -> AsyncDeltaStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
