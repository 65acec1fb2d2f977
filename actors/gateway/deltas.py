"""What routes read: the deltas of one request, whoever hands them on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol, TypeAlias

from actorium.actors.client_requests import Completion, StreamDelta
from actorium.actors.errors import ActoriumError

Results: TypeAlias = AsyncGenerator[tuple[int, list[Completion] | ActoriumError], None]
"""(number of the request, its choices), as they end."""


class Deltas(Protocol):
    """What `AsyncDeltaStream` is to the routes."""

    @property
    def prompt_tokens(self) -> int | None: ...

    async def accepted(self) -> int: ...

    def more(self) -> list[StreamDelta]: ...

    def __aiter__(self) -> AsyncIterator[StreamDelta]: ...

    async def __anext__(self) -> StreamDelta: ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Deltas: ...

    async def __aexit__(self, *_: object) -> None: ...


class Relay(AsyncIterator[StreamDelta]):
    """Deltas that come from another stream. Closing it closes that one."""

    def __init__(self, source: Deltas) -> None:
        self._source = source

    @property
    def prompt_tokens(self) -> int | None:
        """As the source knows."""
        return self._source.prompt_tokens

    async def accepted(self) -> int:
        """As `AsyncDeltaStream.accepted`."""
        return await self._source.accepted()

    def more(self) -> list[StreamDelta]:
        """As `AsyncDeltaStream.more`."""
        return self._source.more()

    async def __anext__(self) -> StreamDelta:
        return await self._source.__anext__()

    async def aclose(self) -> None:
        """As `AsyncDeltaStream.aclose`."""
        await self._source.aclose()

    async def __aenter__(self) -> Relay:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
