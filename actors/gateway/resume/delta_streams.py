"""Streams of deltas for the routes: of one request, of several merged, or shared.

A shared stream has several readers, and waits a while for a reader that has disconnected. It keeps
all deltas while it is under way, so that a late reader gets them from the start; after its end the
engine remembers them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from actorium.actors.client.requests import Completion, StreamDelta, merge_deltas
from actorium.actors.errors import Aborted, ActoriumError
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.messages import Usage

Results: TypeAlias = AsyncGenerator[tuple[int, list[Completion] | ActoriumError], None]
"""(number of the request, its choices), as they end."""


class Deltas(Protocol):
    """The interface of `AsyncDeltaStream` for routes."""

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
    """Returns the tokens of each prompt of a stream; none until all are known."""
    if hasattr(stream, "prompts"):
        found: tuple[int, ...] = stream.prompts()
        return found
    known = stream.prompt_tokens
    return () if known is None else (known,)


class RelayedStream(AsyncIterator[StreamDelta]):
    """Deltas from another stream. Closing it closes that one."""

    def __init__(self, source: Deltas) -> None:
        self._source = source

    @property
    def prompt_tokens(self) -> int | None:
        """The source's count."""
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

    async def __aenter__(self) -> RelayedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


AHEAD = 256
"""The most deltas read ahead of the consumer."""


def with_ready(delta: StreamDelta, stream: Deltas) -> list[StreamDelta]:
    """Returns a stream's delta with all that are ready behind it, those of a choice joined."""
    more = stream.more()
    return merge_deltas([delta, *more]) if more else [delta]


class MergedStream(AsyncIterator[StreamDelta]):
    """Several prompts' streams as one, with choices numbered through: those of the second prompt
    follow those of the first. An error of one ends all. Closing it closes them."""

    def __init__(self, streams: Sequence[Deltas], choices: int) -> None:
        """choices: of each stream."""
        self._streams, self._choices = streams, choices
        self._all = _side_by_side(streams)
        self._found: list[StreamDelta] = []

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of all prompts together; None until all are known."""
        return sum(found) if (found := self.prompts()) else None

    def prompts(self) -> tuple[int, ...]:
        """Returns the tokens of each prompt; none until all are known."""
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

    async def __aenter__(self) -> MergedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _side_by_side(streams: Sequence[Deltas]
                        ) -> AsyncGenerator[list[tuple[int, StreamDelta]], None]:
    ready: asyncio.Queue[tuple[int, list[StreamDelta] | BaseException | None]] = \
        asyncio.Queue(AHEAD)

    async def pump(number: int, stream: Deltas) -> None:
        try:
            async for delta in stream:
                await ready.put((number, with_ready(delta, stream)))
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


class SharedStreams:
    """The shared streams of one gateway, by name."""

    def __init__(self) -> None:
        self._shared: dict[str, SharedStream] = {}
        self._draining = False

    def drain(self) -> None:
        """Stops waiting for disconnected readers: the engine stops."""
        self._draining = True
        for shared in list(self._shared.values()):
            shared.end_soon()

    def join(self, name: str, rid: str, open_: Callable[[], Deltas], grace: float
             ) -> SharedStreamReader:
        """Returns a reader of the stream of that name; `open_` begins it if there is none. Raises
        `HttpError` 422 if the name stands for another request."""
        shared = self._shared.get(name)
        if shared is None:
            shared = self._shared[name] = SharedStream(
                rid, open_(), 0.0 if self._draining else grace, lambda: self._forget(name, shared))
        if shared.rid != rid:
            raise HttpError(422, "Idempotency-Key: in use with another path or body",
                            "Idempotency-Key", code="idempotency_key_reused")
        return SharedStreamReader(shared)

    def _forget(self, name: str, shared: SharedStream | None) -> None:
        if self._shared.get(name) is shared:
            del self._shared[name]


class SharedStream:
    """One request, read by a task of its own while it has readers, and `grace` seconds longer."""

    def __init__(self, rid: str, source: Deltas, grace: float, forget: Callable[[], None]) -> None:
        self.rid, self.source = rid, source
        self.deltas: list[StreamDelta] = []
        self.error: Exception | None = None
        self.done = False
        self._grace, self._forget = grace, forget
        self._readers: set[SharedStreamReader] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for delta in self.source:
                self.deltas += [delta, *self.source.more()]
                self._wake_readers()
        except Exception as error:
            self.error = error
        finally:
            await self.source.aclose()
            self.done = True
            self._forget()  # later readers ask the engine
            self._wake_readers()

    def _wake_readers(self) -> None:
        for reader in self._readers:
            reader.has_news.set()

    def add_reader(self, reader: SharedStreamReader) -> None:
        """Adds a reader."""
        self._readers.add(reader)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end_soon(self) -> None:
        """Ends as soon as it has no reader."""
        self._grace = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._task.cancel()

    def remove_reader(self, reader: SharedStreamReader) -> None:
        """Removes a reader; without readers the stream ends after `grace` seconds."""
        self._readers.discard(reader)
        if not self._readers and not self.done and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._grace, self._task.cancel)


class SharedStreamReader(RelayedStream):
    """One reader of a shared stream, from its start."""

    def __init__(self, shared: SharedStream) -> None:
        super().__init__(shared.source)
        self._shared, self._at = shared, 0
        self.has_news = asyncio.Event()
        shared.add_reader(self)

    def more(self) -> list[StreamDelta]:
        found = self._shared.deltas[self._at:]
        self._at += len(found)
        return found

    async def __anext__(self) -> StreamDelta:
        shared = self._shared
        while self._at == len(shared.deltas):
            if shared.error is not None:
                raise shared.error
            if shared.done:
                raise StopAsyncIteration
            self.has_news.clear()
            await self.has_news.wait()
        self._at += 1
        return shared.deltas[self._at - 1]

    async def aclose(self) -> None:
        self._shared.remove_reader(self)


async def collected(streams: Sequence[Deltas]) -> Results:
    """Yields each stream's completions, or its error, as they end."""
    try:
        for number, stream in enumerate(streams):
            try:
                yield number, await _completions(stream)
            except ActoriumError as error:
                yield number, error
    finally:
        for stream in streams:
            await stream.aclose()


async def _completions(stream: Deltas) -> list[Completion]:
    choices: dict[int, list[StreamDelta]] = {}
    async for delta in stream:
        choices.setdefault(delta.index, []).append(delta)
    return [_completion(index, choices[index]) for index in sorted(choices)]


def _completion(index: int, deltas: list[StreamDelta]) -> Completion:
    """Raises `Aborted`."""
    last = deltas[-1]
    if last.finish_reason in (None, "abort"):
        raise Aborted("the request was aborted")
    logprobs = [one for delta in deltas for one in delta.logprobs or ()]
    return Completion(
        text="".join([delta.text for delta in deltas]),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        finish_reason=last.finish_reason or "", stop_reason=last.stop_reason,
        logprobs=logprobs or None,
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs), None),
        usage=last.usage or Usage(0, 0, 0), index=index, rid=last.rid)
