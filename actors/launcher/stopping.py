"""Stopping an engine: who asks for it, the drain, and which deaths meanwhile have cost streams.

A signal, a caller, or the death of the process that the engine belongs to ask for it. A scheduler
or detokenizer that dies while the engine drains is started again, and learns from the others which
streams go on. If it is stopped before it can have learnt that, they are lost: then the engine has
not drained, and says so.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorium.actors.config.cluster_settings import ROUTER_LEDGER, clustered
from actorium.actors.config.tree import Config
from actorium.actors.launcher.children import ChildProcess, ChildProcesses
from actorium.actors.runtime.process import DRAIN_SIGNAL, EXIT_DRAINED, kill_group, send_signal
from actorium.actors.runtime.roles import (
    drains_at_once,
    ends_streams,
    finishes_work,
    refuses_work,
    stop_rank,
)

if TYPE_CHECKING:
    import zmq

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_GRACE = 3.0
"""Seconds an actor gets to exit once it has nothing left to drain."""
FAULT_GRACE = 0.5
"""The same in an engine that has failed."""
SETTLED = 2.0
"""Seconds after its start in which a successor may not know yet which streams go on."""
CLEAN_EXITS = (EXIT_DRAINED, -signal.SIGTERM, -DRAIN_SIGNAL)
"""Exits of an actor on SIGTERM; by the signals themselves, if it had only begun."""


class StopRequests:
    """Counts requests to stop, and wakes the poll that waits for them."""

    def __init__(self) -> None:
        self.count = 0
        self._poll: select.poll | zmq.Poller | None = None
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._parent_fd: int | None = None
        self.parent: int | None = None
        """The process whose end is a request."""
        self._handlers: dict[signal.Signals, Any] = {}
        """Those that were there before `catch_signals`."""

    def add(self) -> None:
        """One request more. Safe in a signal handler, and in any thread."""
        self.count += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"!")

    def catch_signals(self, reload: Callable[[], bool] | None = None) -> None:
        """Each of `SIGNALS` is a request from now on, until `close`; only in the main thread.
        reload: called at a SIGHUP, but for that of a terminal that is closed; then it is none if
        this returns True."""
        had_terminal = _has_terminal()

        def on_signal(number: int, _frame: object) -> None:
            closed = had_terminal and not _has_terminal()
            if number != signal.SIGHUP or closed or reload is None or not reload():
                self.add()

        if threading.current_thread() is not threading.main_thread():
            return
        # A signal that comes just before poll, or to another thread, does not interrupt poll; the
        # byte that C code writes to this pipe does.
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, on_signal) for number in SIGNALS}

    def tie_to(self, parent: int, pidfd: int | None = None) -> None:
        """The end of the process `parent` is a request. Unlike with the parent-death signal, it
        does not matter which of the parent's threads started us. pidfd: of a process that need not
        be our parent."""
        self._parent_fd, self.parent = os.pidfd_open(parent) if pidfd is None else pidfd, parent
        if pidfd is None and os.getppid() != parent:
            self.add()

    def register(self, poll: select.poll | zmq.Poller) -> None:
        """Has `poll` wake for requests; hand `on_readable` the descriptors that it reports."""
        self._poll = poll
        for fd in (self._wake_r, self._parent_fd):
            if fd is not None:
                poll.register(fd, select.POLLIN)

    def on_readable(self, fd: int) -> None:
        """`fd` is readable; one that is not of this object is passed over."""
        if fd == self._wake_r:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 4096)
        elif fd == self._parent_fd:
            assert self._poll is not None
            self._poll.unregister(fd)
            self.add()

    def close(self) -> None:
        """Signals are handled as before."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for fd in (self._wake_r, self._wake_w, self._parent_fd):
            if fd is not None:
                os.close(fd)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Drain:
    """An engine's orderly end, and which of its actors are still needed. Times are CLOCK_MONOTONIC
    seconds."""

    def __init__(self, stops: StopRequests, wait_until: Callable[..., bool]) -> None:
        """wait_until: as `Launcher._wait_until`."""
        self._stops, self._wait_until = stops, wait_until
        self.loss = ""
        """The death that has cost streams, in words; empty = none has."""
        self._recovering: dict[str, int] = {}
        """Role -> epoch of the actor that follows one that has ended, until it is ready."""
        self._rank = -1
        """Of the group that is being stopped; -1 = none yet."""
        self._timed_out = False
        """Actors are now killed by us."""
        self._restarting: tuple[str, str] | None = None
        """The last actor that died in the drain and is started again: role, and what to say of its
        death."""
        self._restarted_at = math.inf

    # --- the actors ---

    @property
    def recovering(self) -> list[str]:
        """The roles with requests to finish whose actor is not ready since it was started again:
        what they have to finish they do not know yet, and a signal would end them."""
        return [role for role in self._recovering if finishes_work(role)]

    def restarts(self, role: str) -> bool:
        """Whether an actor of this role that dies now is started again. While the engine drains,
        only those are that the drain still needs."""
        if self._stops.count == 1 and self._rank >= 0:
            return stop_rank(role) > self._rank and not refuses_work(role)
        return self._stops.count <= 1

    def on_restartable_death(self, role: str, epoch: int, death: str) -> None:
        """An actor has died that will be started again."""
        self._recovering[role] = epoch + 1
        if self._rank >= 0 and ends_streams(role):
            self._restarting = role, f"{death} while the engine drained"
            self._restarted_at = math.inf

    def on_final_death(self, role: str, death: str, status: int) -> None:
        """An actor has died that can have no successor."""
        lost = ends_streams(role) and status not in CLEAN_EXITS
        if lost and self._stops.count == 1 and not self._timed_out:
            self.loss = f"{death} while the engine drained"

    def on_restarted(self, role: str, epoch: int) -> None:
        """An actor follows one that has ended."""
        self._recovering[role] = epoch
        if self._restarting is not None and self._restarting[0] == role:
            self._restarted_at = time.monotonic()

    def on_recovered(self, role: str, epoch: int) -> None:
        """That actor is ready."""
        if self._recovering.get(role, 0) <= epoch:
            self._recovering.pop(role, None)

    # --- the end ---

    def run(self, actors: ChildProcesses, roles: Iterable[str], timeout: float,
            failed: Callable[[], bool]) -> None:
        """Refuse new work, then SIGTERM along the ring, each group once the one before ended; all
        that, and waiting for those that recover, takes `timeout` seconds at the most. failed:
        whether the engine has, so that there is nothing to drain."""
        until = time.monotonic() + timeout
        self._wait_until(lambda: failed() or self._stops.count > 1 or not self.recovering, timeout)
        for actor in actors.running.values():
            if not failed() and drains_at_once(actor.role):
                send_signal(actor.pid, DRAIN_SIGNAL)
        for rank in sorted({stop_rank(role) for role in roles}):
            self._rank = rank
            if not failed() and self._stops.count == 1:
                self._note_loss()
            group = [a for a in actors.running.values() if stop_rank(a.role) == rank]
            patience = max(0.0, until - time.monotonic()) + STOP_GRACE
            self._stop_group(actors, group, FAULT_GRACE if failed() else patience)

    def _note_loss(self) -> None:
        """The actors of this rank are stopped next: one that was only just started again has not
        learnt what it has to finish."""
        if self._restarting is not None:
            role, death = self._restarting
            if stop_rank(role) == self._rank and time.monotonic() - self._restarted_at < SETTLED:
                self.loss = death

    def _stop_group(self, actors: ChildProcesses, group: list[ChildProcess], patience: float
                    ) -> None:
        """Ends these, and kills what has not ended after `patience` seconds."""
        def ended() -> bool:
            return not any(map(actors.is_running, group))

        for actor in group:
            send_signal(actor.pid, signal.SIGTERM)
        self._wait_until(lambda: self._stops.count > 1 or ended(), patience)
        self._timed_out = self._timed_out or not ended()
        for actor in filter(actors.is_running, group):
            kill_group(actor.pid)
        self._wait_until(ended)


def remove_finished_ledger(config: Config) -> None:
    """Removes a ledger all of whose requests are answered. One in the run directory goes with that.
    """
    if (ledger_dir := config.recovery.ledger_dir) is not None:
        from actorium.actors.ledger.segments import remove_finished

        directory = Path(ledger_dir).expanduser()
        remove_finished(directory / ROUTER_LEDGER if clustered(config.cluster) else directory)
