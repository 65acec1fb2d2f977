"""A client's connection to its engine: what to send and when, from the first call to `close`, and
across deaths of the engine.

How to wait is left to two subclasses and their signals: `BlockingSession` (client.py) polls the
sockets in the calling thread, `AsyncioSession` (async_client.py) has an event loop watch them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol

from actorium.actors.client.connection import Link
from actorium.actors.client.core import ClientCore
from actorium.actors.client.pending import DETOKENIZER, TOKENIZER
from actorium.actors.client.requests import check_timeout, encode
from actorium.actors.client.target import EngineTarget
from actorium.actors.errors import ActoriumError, EngineUnavailable
from actorium.actors.messages import Abort, Attach

LIVENESS = 0.25
"""Seconds of silence after which the engine's lock is looked at."""
REATTACH = 5.0
"""Seconds of silence after which the detokenizer is asked whether it still knows this client."""
POLL = 0.02
"""Seconds between two looks for an engine that does not run yet."""


class Signal(Protocol):
    """Wakes the tasks that wait for it."""

    def set(self) -> None: ...

    async def wait(self, until: Callable[[], bool], seconds: float = math.inf) -> None:
        """Returns once `until()`, asked whenever this was set, or after so many seconds."""


class ClientSession:
    """One client's sockets and what it waits for. Connects when it is first used, and again after
    the engine was restarted.

    When an actor of the engine dies and comes back, requests go on. When the whole engine ends,
    they fail, unless another one runs there within `resume_timeout` seconds and knows them; what is
    asked meanwhile waits for it.
    """

    cancelled: type[BaseException] | tuple[()] = ()
    """What `Signal.wait` raises where the waiting task was cancelled."""

    def __init__(self, target: EngineTarget, tenant: str = "", resume_timeout: float = 0.0) -> None:
        """Raises `InvalidRequest` on a bad tenant or timeout."""
        if resume_timeout != 0:
            check_timeout(resume_timeout, "resume_timeout")
        self.target = target
        self.core = ClientCore(os.urandom(6).hex(), tenant)
        self.link: Link | None = None
        self._resume_timeout = resume_timeout
        self._resume_until: float | None = None
        """Until when another engine is waited for; None = the last one did not end."""
        self._end: EngineUnavailable | None = None
        """Why nothing is waited for any more; None = connected, or never was."""
        self._identity = b""
        """Under which the engine that ended knew this client."""
        self.last_heard = monotonic()
        """When something last arrived or was sent."""
        self._attaching: Signal | None = None
        """Set once the detokenizer has answered, or the engine has ended."""

    # --- what a subclass provides ---

    def signal(self) -> Signal:
        """Returns a new signal."""
        raise NotImplementedError

    async def pause(self, seconds: float) -> None:
        """Sleep."""
        raise NotImplementedError

    def _on_connect(self, fds: Iterable[int]) -> None:
        """Sockets with these file descriptors were connected."""

    def _on_disconnect(self) -> None:
        """All sockets are about to be closed."""

    def _on_send(self) -> None:
        """Something was sent, or waits for another engine."""

    # --- sending ---

    async def ready(self) -> None:
        """Connect, and wait until deltas would be received. Raises `EngineUnavailable`."""
        self._notice_restart()
        while not self.core.attached:
            await self._attach()

    async def _attach(self) -> None:
        self.connect(TOKENIZER, DETOKENIZER)
        if self._attaching is None:
            self._attaching = self.signal()
            self.send(DETOKENIZER, encode(Attach(), "client"))
        mine = self._attaching
        await mine.wait(lambda: self._attaching is not mine)
        if self.link is None and not self.resuming:
            raise self._end or self.target.ended_error()

    async def call(self, front: str, question: Callable[[str], Any], timeout: float | None) -> Any:
        """The answer to the message that `question` makes of its rid. Raises what it is refused
        with, `DeadlineExceeded` or `EngineUnavailable`."""
        check_timeout(timeout)
        self._notice_restart()
        now, signal = monotonic(), self.signal()
        call = self.core.call(question, math.inf if timeout is None else now + timeout, front, now)
        call.notify = signal.set
        try:
            self.connect(front)
            self.send(front, call.frame)
            await signal.wait(lambda: call.done)
        finally:
            self.core.forget(call.rid)
        return call.result()

    def send(self, front: str, frame: bytes) -> None:
        """Sends to a front that is connected, or has it sent once another engine runs. Raises
        `EngineUnavailable`."""
        if self.link is not None:
            self.link.send(front, frame)
        elif not self.resuming:
            raise self._end or self.target.ended_error()
        self._on_send()

    def abort(self, aborts: Iterable[Abort]) -> None:
        """Sends aborts; the core sends those again that get lost."""
        if self.link is not None:
            for abort in aborts:
                self.core.aborting(abort.rid, monotonic())
                self._send_all([(TOKENIZER, encode(abort, "rid"))])

    def _send_all(self, frames: Iterable[tuple[str, bytes]]) -> None:
        """Sends what may be sent again later: not at all where the engine takes no messages."""
        for front, frame in frames:
            with suppress(EngineUnavailable):
                self.connect(front)
                self.send(front, frame)

    def connect(self, *fronts: str) -> None:
        """Connects to fronts that are not connected yet; later, while another engine is waited for.
        Raises `EngineUnavailable`."""
        if self.link is None and self.resuming and not self.target.may_run():
            return
        if self.link is None:
            self.target.check_running()
            self.target.remember()
            self.link, self._end = Link(self.target, self._identity), None
            if self._resume_until is not None:
                self._resume_until = None
                self._send_all(self.core.renewed(monotonic()))
        self._on_connect(self.link.connect(*fronts))

    def _notice_restart(self) -> None:
        """If another engine runs there now, what was sent to the last one is lost."""
        if self.link is not None and self.target.replaced():
            self._on_engine_end()

    # --- receiving ---

    def step(self, now: float, quiet: bool) -> None:
        """Receives what has arrived, sends what is due. quiet: nothing has arrived for a while, so
        check that the engine lives and still knows this client."""
        if not quiet:
            self.last_heard = now
        self._receive(now)
        self.abort(self.core.expire(now))
        if self.link is None:
            self._come_back(now)
            return
        self._send_all(self.core.resend(now))
        if not quiet:
            return
        if self.target.ended():
            self._receive(now)  # its last messages
            self._on_engine_end()
        elif (self.core.attached and self.core.waiting
              and now - self.last_heard >= REATTACH):
            self.last_heard = now
            self._send_all([(DETOKENIZER, encode(Attach(), "client"))])

    def delay(self, now: float) -> float:
        """Seconds until the next `step`, should nothing arrive."""
        if self.link is None:
            return POLL
        return min(LIVENESS, max(0.001, self.core.next_due - now))

    def _receive(self, now: float) -> None:
        link = self.link
        if link is None:
            return
        try:
            again = link.reconnected()
            if (again or self.target.refused) and self.target.ended():
                self._on_engine_end()
                return
            for front in again:
                self._send_all(self.core.reconnected(front, now))
            for message in link.receive():
                self.core.on_message(message, now)
        except ActoriumError as error:
            self.drop(EngineUnavailable(error.message))
        if self.core.attached:
            self._attached()

    def _attached(self) -> None:
        """Wakes those who wait for `ready`."""
        attaching, self._attaching = self._attaching, None
        if attaching is not None:
            attaching.set()

    # --- when the engine ends ---

    @property
    def resuming(self) -> bool:
        """The engine ended and another one is waited for."""
        return self._resume_until is not None

    def _on_engine_end(self) -> None:
        """Keeps waiting requests for the next engine, or fails them."""
        if self.link is None:
            return
        if not self._resume_timeout:
            self.drop(self.target.ended_error())
            return
        self._identity = self.link.identity
        self._resume_until = monotonic() + self._resume_timeout
        self.core.attached = False
        self._disconnect()

    def _come_back(self, now: float) -> None:
        """Connects to the next engine, if it runs; everything fails when it is late."""
        if self._resume_until is None:
            return
        if now >= self._resume_until:
            self.drop(self.target.ended_error())
        elif self.target.may_run():
            try:
                self.connect(TOKENIZER, DETOKENIZER)
            except EngineUnavailable as error:
                if self.link is not None:
                    self.drop(error)

    def drop(self, error: EngineUnavailable) -> None:
        """Disconnects; everything that waits fails with this error."""
        self._resume_until, self._end = None, error
        self.core.fail_all(error)
        self._attached()
        self._disconnect()

    def _disconnect(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            self._on_disconnect()
            link.close()
