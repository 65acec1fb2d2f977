"""Streams of deltas for the routes: of one request, of several merged, or shared.

A shared stream has several readers, and waits a while for a reader that has disconnected. While it
is under way it keeps all deltas, so that a late reader gets them from the start; after its end the
engine has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from operator import attrgetter
from typing import Protocol, TypeAlias

import msgspec

from actorium.actors.client.pending import MAX_UNREAD
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

    @property
    def created(self) -> int: ...

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
        prompts: tuple[int, ...] = stream.prompts()
        return prompts
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

    @property
    def created(self) -> int:
        """As `AsyncDeltaStream.created`."""
        return self._source.created

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

    @property
    def created(self) -> int:
        """Returns the first time that is known: one call made all of them."""
        return next((stream.created for stream in self._streams if stream.created), 0)

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
            ready_now: list[tuple[int, StreamDelta]] = []
            items = [await ready.get()]
            while not ready.empty():
                items.append(ready.get_nowait())
            for number, item in items:
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    ready_now += [(number, delta) for delta in item]
            if ready_now:
                yield ready_now
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


class DeltaLog:
    """The deltas of a stream from its start. Those of a choice are merged once there are many, but
    for the places at which readers stand."""

    def __init__(self) -> None:
        self.deltas: list[StreamDelta] = []
        self._merged = 0
        """How many of them, at the front, are merged and stay as they are."""
        self._most = MAX_UNREAD
        """Deltas behind those that are not merged."""

    def add(self, deltas: Sequence[StreamDelta], places: Iterable[int] = ()) -> dict[int, int]:
        """Adds deltas. places: numbers of deltas that readers have read; returns the numbers that
        these are from now on, as far as they change."""
        self.deltas += deltas
        if len(self.deltas) - self._merged < self._most:
            return {}
        begin, new = self._merged, self.deltas[self._merged:]
        del self.deltas[begin:]
        moved, at = dict[int, int](), 0
        for place in sorted({*(place - begin for place in places if place > begin), len(new)}):
            several = merge_deltas(new[at:place])
            self.deltas += several
            moved[begin + place], at = len(self.deltas), place
        # With many choices there are as many to keep; they must stay a small part all the same.
        self._merged, self._most = len(self.deltas), max(MAX_UNREAD, 16 * len(several))
        return moved


class SharedStream:
    """One request, read by a task of its own while it has readers, and `grace` seconds longer."""

    def __init__(self, rid: str, source: Deltas, grace: float, forget: Callable[[], None]) -> None:
        self.rid, self.source = rid, source
        self.log = DeltaLog()
        self.error: Exception | None = None
        self.done = False
        self._grace, self._forget = grace, forget
        self._readers: set[SharedStreamReader] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for delta in self.source:
                moved = self.log.add([delta, *self.source.more()],
                                     [reader.at for reader in self._readers])
                for reader in self._readers if moved else ():
                    reader.at = moved.get(reader.at, reader.at)
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
        self._shared, self.at = shared, 0
        """`at`: deltas of its log that were read."""
        self.has_news = asyncio.Event()
        shared.add_reader(self)

    def more(self) -> list[StreamDelta]:
        found = self._shared.log.deltas[self.at:]
        self.at += len(found)
        return found

    async def __anext__(self) -> StreamDelta:
        shared = self._shared
        while self.at == len(shared.log.deltas):
            if shared.error is not None:
                raise shared.error
            if shared.done:
                raise StopAsyncIteration
            self.has_news.clear()
            await self.has_news.wait()
        self.at += 1
        return shared.log.deltas[self.at - 1]

    async def aclose(self) -> None:
        self._shared.remove_reader(self)


async def collected(streams: Sequence[Deltas], admitted: Callable[[Deltas], None]) -> Results:
    """Yields each stream's completions, or its error, as they end. admitted: is given each stream
    whose request the engine has."""
    try:
        for number, stream in enumerate(streams):
            try:
                found = await _completions(stream)
                admitted(stream)
                yield number, found
            except ActoriumError as error:
                yield number, error
    finally:
        for stream in streams:
            await stream.aclose()


async def _completions(stream: Deltas) -> list[Completion]:
    log = DeltaLog()
    async for delta in stream:
        log.add([delta])
    return [_completion(whole)
            for whole in sorted(merge_deltas(log.deltas), key=attrgetter("index"))]


def _completion(whole: StreamDelta) -> Completion:
    """Raises `Aborted`."""
    if whole.finish_reason in (None, "abort"):
        raise Aborted("the request was aborted")
    return Completion(
        text=whole.text, token_ids=whole.token_ids, finish_reason=whole.finish_reason or "",
        stop_reason=whole.stop_reason, logprobs=whole.logprobs,
        prompt_logprobs=whole.prompt_logprobs, usage=whole.usage or Usage(0, 0, 0),
        index=whole.index, rid=whole.rid, pooled=whole.pooled,
        routed_experts=whole.routed_experts)
