"""What new requests pass: while the engine recovers they wait a little, and then are refused.

Nearly all recoveries take a second or two, and a request that waited is better off than one that
was refused: so it waits until the outage is `gateway.recovery_patience` seconds old, and is served
if the engine is back by then. Later ones are told 503 and when to try again, at once. What the
engine has accepted is not concerned: it goes on when the engine does.

The watchdog is asked when requests come, and seldom; while something is amiss, more often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.http.http_errors import SERVER, HttpError
from actorium.actors.health import WORKING_PHASES, not_at_work
from actorium.actors.messages import Status

FRESH = 0.25
"""Seconds for which what the watchdog has said counts."""
AGAIN = 0.1
"""Seconds between two questions while the engine is not ready."""
NEEDED = ("tokenizer", "detokenizer", "scheduler", "worker-")
"""Without any of them no token comes. Gateways are not: this one is at work."""


def obstacle(status: Status) -> str:
    """What keeps new requests from being served; empty = nothing."""
    needed = (actor for actor in status.actors if actor.role.startswith(NEEDED))
    return status.error or not_at_work(needed, WORKING_PHASES)


class RecoveryGate:
    """One for a gateway's process."""

    def __init__(self, ask: Callable[[], Awaitable[Status]], patience: float) -> None:
        """ask: the watchdog; patience: seconds."""
        self._ask, self._patience = ask, patience
        self._asked = -float("inf")
        self._known = False
        """The watchdog has been heard."""
        self._since: float | None = None
        """When the engine was first seen not to be ready."""
        self._why = ""
        self._open = asyncio.Event()
        self._open.set()
        self._looking: asyncio.Task[None] | None = None

    async def enter(self) -> None:
        """Return when a request that comes now can be expected to be served. Raises `HttpError`
        503 if that takes too long."""
        now = monotonic()
        if self._looking is None and now >= self._asked + FRESH:
            self._asked = now
            self._looking = asyncio.ensure_future(self._look())
        if not self._known and self._looking is not None:
            await asyncio.wait([self._looking], timeout=FRESH)
        if self._since is None:
            return
        try:
            async with asyncio.timeout_at(_loop_time(self._since + self._patience)):
                await self._open.wait()
        except TimeoutError:
            raise HttpError(503, f"the engine is not ready: {self._why}", None, SERVER,
                            "unavailable") from None

    async def _look(self) -> None:
        try:
            while await self._blocked():
                await asyncio.sleep(AGAIN)
        finally:
            self._looking = None

    async def _blocked(self) -> bool:
        try:
            why = obstacle(await self._ask())
        except ActoriumError:  # the watchdog may be what recovers: nothing has changed
            why = self._why
        self._asked, self._known = monotonic(), True
        if not why:
            self._since, self._why = None, ""
            self._open.set()
            return False
        if self._since is None:
            self._since = self._asked
            self._open.clear()
        self._why = why
        return True


def _loop_time(when: float) -> float:
    """A time of CLOCK_MONOTONIC as the loop's."""
    return asyncio.get_running_loop().time() + when - monotonic()
