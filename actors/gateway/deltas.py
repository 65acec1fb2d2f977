"""What routes read: the deltas of one request, whoever hands them on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol, TypeAlias

from actorium.actors.client.requests import Completion, StreamDelta
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


def prompts_of(stream: Deltas) -> tuple[int, ...]:
    """Tokens of each prompt of a stream; none until all are known."""
    if hasattr(stream, "prompts"):
        found: tuple[int, ...] = stream.prompts()
        return found
    known = stream.prompt_tokens
    return () if known is None else (known,)


class Relay(AsyncIterator[StreamDelta]):
    """Deltas that come from another stream. Closing it closes that one."""

    def __init__(self, source: Deltas) -> None:
        self._source = source

    @property
    def prompt_tokens(self) -> int | None:
        """As the source knows."""
        return self._source.prompt_tokens

    def prompts(self) -> tuple[int, ...]:
        """As `prompts_of` the source."""
        return prompts_of(self._source)

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
