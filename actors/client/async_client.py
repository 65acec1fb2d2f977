"""The asyncio client of the SDK. Any loop with `add_reader` will do (uvloop too)."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic
from types import TracebackType

from actorium.actors.client.calls import ClientCalls
from actorium.actors.client.session import ClientSession
from actorium.actors.client.target import EngineTarget, locate
from actorium.actors.errors import EngineUnavailable

__all__ = ["AsyncClient"]


class EventSignal:
    """An `asyncio.Event`, which any number of tasks may wait for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.set = self._event.set

    async def wait(self, until: Callable[[], bool], seconds: float = math.inf) -> None:
        if seconds < math.inf:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.wait(until)
            return
        while not until():
            self._event.clear()
            await self._event.wait()


class AsyncioSession(ClientSession):
    """A session whose sockets are watched by the event loop that runs when they are connected."""

    cancelled = asyncio.CancelledError

    def __init__(self, target: EngineTarget, tenant: str = "", resume_timeout: float = 0.0) -> None:
        super().__init__(target, tenant, resume_timeout)
        self._fds: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def signal(self) -> EventSignal:
        return EventSignal()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _on_connect(self, fds: Iterable[int]) -> None:
        loop = asyncio.get_running_loop()
        for fd in fds:
            loop.add_reader(fd, self._on_readable)
            self._fds.append(fd)

    def _on_disconnect(self) -> None:
        loop = asyncio.get_running_loop()
        for fd in self._fds:
            loop.remove_reader(fd)
        self._fds = []

    def _on_send(self) -> None:
        # The send may have taken the edge of something that came in: look again.
        asyncio.get_running_loop().call_soon(self._on_readable)
        self._arm()

    def _on_readable(self) -> None:
        if self.link is not None:
            self.step(monotonic(), quiet=False)

    def _arm(self) -> None:
        """While anything waits, a timer looks after deadlines and the engine's life."""
        if self._timer is None and (self.core.waiting or self._attaching is not None):
            self._timer = asyncio.get_running_loop().call_later(self.delay(monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.step(monotonic(), quiet=True)
        self._arm()

    def drop(self, error: EngineUnavailable) -> None:
        super().drop(error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class AsyncClient(ClientCalls):
    """An asyncio connection to one engine; arguments and errors as for `Client`.

    One client serves any number of tasks of one loop. Cancelling a task aborts what it waited for.
    """

    def __init__(self, target: str | os.PathLike[str] = "default", run_dir: str | None = None,
                 tenant: str = "", resume_timeout: float = 0.0,
                 key: str | os.PathLike[str] | None = None) -> None:
        super().__init__(AsyncioSession(locate(target, run_dir, key), tenant, resume_timeout))

    def give_up(self, reason: str) -> None:
        """Has everything that waits for the engine fail with `EngineUnavailable` and this reason:
        no other engine will run there. (A later call connects again.)"""
        self._session.drop(EngineUnavailable(reason))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()
