"""Requests that several callers may share, and that wait for a caller who has gone.

All that came of one is kept while it is under way, so that whoever joins is told it from the start.
What is over is the engine's to remember.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from actorium.actors.client.requests import Completion, StreamDelta
from actorium.actors.errors import Aborted, ActoriumError
from actorium.actors.gateway.deltas import Deltas, Relay, Results
from actorium.actors.gateway.errors import HttpError
from actorium.actors.messages import Usage


class Joins:
    """Those of one gateway, by name."""

    def __init__(self) -> None:
        self._shared: dict[str, Shared] = {}
        self._draining = False

    def drain(self) -> None:
        """The engine stops: nobody is waited for who has gone."""
        self._draining = True
        for shared in list(self._shared.values()):
            shared.hurry()

    def join(self, name: str, rid: str, open_: Callable[[], Deltas], grace: float) -> Reader:
        """Read what goes by that name, which `open_` begins if nothing does. Raises `HttpError` 422
        if that was asked for something else."""
        shared = self._shared.get(name)
        if shared is None:
            shared = self._shared[name] = Shared(rid, open_(), 0.0 if self._draining else grace,
                                                 lambda: self._over(name, shared))
        if shared.rid != rid:
            raise HttpError(422, "Idempotency-Key: in use with another path or body",
                            "Idempotency-Key", code="idempotency_key_reused")
        return Reader(shared)

    def _over(self, name: str, shared: Shared | None) -> None:
        if self._shared.get(name) is shared:
            del self._shared[name]


class Shared:
    """One request, read by a task of its own as long as anybody wants it, and `grace` seconds."""

    def __init__(self, rid: str, source: Deltas, grace: float, over: Callable[[], None]) -> None:
        self.rid, self.source = rid, source
        self.deltas: list[StreamDelta] = []
        self.error: Exception | None = None
        self.done = False
        self._grace, self._over = grace, over
        self._readers: set[Reader] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for delta in self.source:
                self.deltas += [delta, *self.source.more()]
                self._tell()
        except Exception as error:
            self.error = error
        finally:
            await self.source.aclose()
            self.done = True
            self._over()  # who comes from now on asks the engine
            self._tell()

    def _tell(self) -> None:
        for reader in self._readers:
            reader.news.set()

    def enter(self, reader: Reader) -> None:
        """Somebody reads it."""
        self._readers.add(reader)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def hurry(self) -> None:
        """End as soon as nobody reads it."""
        self._grace = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._task.cancel()

    def leave(self, reader: Reader) -> None:
        """He does not any more; the last one's going ends it after a while."""
        self._readers.discard(reader)
        if not self._readers and not self.done and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._grace, self._task.cancel)


class Reader(Relay):
    """One of those who read a shared request, from its start."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared.source)
        self._shared, self._at = shared, 0
        self.news = asyncio.Event()
        shared.enter(self)

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
            self.news.clear()
            await self.news.wait()
        self._at += 1
        return shared.deltas[self._at - 1]

    async def aclose(self) -> None:
        self._shared.leave(self)


async def whole(streams: Sequence[Deltas]) -> Results:
    """Each stream's completions, or its error, in their order."""
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
