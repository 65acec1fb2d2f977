"""The thin shell around a pure core: sockets, event loop, timer, signals, health, fatal errors.

One wake takes a bounded burst from inbox and front, hands it to the core, asks the core once what
to send, and sends it. Between wakes the process sleeps in epoll; nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import uvloop
import zmq

from actorium.actors.core import CLIENT, Context, Core, Health, Send
from actorium.actors.errors import ActoriumError, BadConfig, BadModel
from actorium.actors.messages import Fatal
from actorium.actors.runtime.client_endpoint import CLIENT_HWM, ClientEndpoint
from actorium.actors.runtime.heartbeat import Heartbeats
from actorium.actors.runtime.logs import error_fields, error_text
from actorium.actors.runtime.mailbox import LINGER_MS, Inbox, Outbox, Overflow, encode
from actorium.actors.runtime.process import (
    DRAIN_SIGNAL,
    EXIT_BAD_CONFIG,
    EXIT_DRAINED,
    EXIT_FAULT,
)
from actorium.actors.runtime.roles import LAUNCHER, WATCHDOG, WORKER, worker_roles
from actorium.actors.runtime.rundir import address

if TYPE_CHECKING:
    from actorium.actors.ledger.committer import LedgerCommitter
    from actorium.actors.runtime.security.curve_gate import CurveGate

LOG = logging.getLogger("actorium.shell")
BURST = 256
"""Messages taken from one socket before the core is asked what to send."""
HEALTH_GAP = 0.01
"""Seconds between two looks at a busy core's health: a new phase is reported within that time."""
FATAL_LINGER_MS = 3000
"""How long a dying actor's last word waits for a launcher that is kept from reading."""
RETRY = 0.02
"""Seconds after which a full pipe is tried again, in case its fd did not become readable."""


class Shell:
    """One actor."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.loop = uvloop.new_event_loop()
        self.context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self.core: Core | None = None
        self.inbox: Inbox | None = None
        self.front: ClientEndpoint | None = None
        self._gate: CurveGate | None = None
        self._commit_log: LedgerCommitter | None = None
        self.outboxes: dict[str, Outbox] = {}
        self._hwm = ctx.config.runtime.queue_messages
        self._ranks = worker_roles(ctx.config)
        self._full_pipes: set[str] = set()
        """Roles whose outbox has a backlog."""
        self._retry_timer: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._drain_until: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._wake_queued = False
        self._front_due = False
        """The front's fd was readable, or was used, which may have swallowed its edge."""
        self._health = Health("starting", 0, ctx.config.runtime.start_timeout)
        self._heartbeats = Heartbeats(ctx, self.context, self._health, self._ask_loop)
        self._health_timer: asyncio.TimerHandle | None = None
        self._health_at = -math.inf
        """When the core's health was read last."""

    # --- life ---

    def run(self, build: Callable[[Context], Core]) -> int:
        """Runs the actor until it is stopped or fails. Returns the exit code of its process: 0
        drained; 1 a fault of the core; 2 `BadConfig` or `BadModel`. A fault is reported to the
        watchdog and the launcher by `Fatal`."""
        try:
            self._heartbeats.start()
            self.core = build(self.ctx)
            self._heartbeats.journal = self.core.journal
            gc.freeze()  # objects made at start-up live to the end: the collector may skip them
            self._start(self.core)
            self.loop.run_forever()
        except Exception as error:
            self._failure = error
        code = EXIT_DRAINED if self._failure is None else self._report_fatal(self._failure)
        self._close()
        return code

    def _start(self, core: Core) -> None:
        role, run_dir = self.ctx.role, self.ctx.run_dir
        self.loop.set_exception_handler(self._on_exception)
        self.loop.call_soon(self._listen_to_signals)
        self.inbox = Inbox(self.context, address(run_dir, f"{role}.inbox"), core.inbox,
                           hwm=self._hwm)
        self.loop.add_reader(self.inbox.fd, self.wake)
        if core.client_inbox is not None:
            self.front = ClientEndpoint(self.context, address(run_dir, f"{role}.front"),
                                        core.client_inbox, hwm=min(self._hwm, CLIENT_HWM),
                                        limit=core.client_inbox_bytes)
            self.loop.add_reader(self.front.fd, self.wake, True)
            self._open_gate(self.front)
        if core.ledger is not None:
            from actorium.actors.ledger.committer import LedgerCommitter

            self._commit_log = LedgerCommitter(core, core.ledger,
                                               self.ctx.config.recovery.ledger_patience)
        core.on_start(self.post)
        self.loop.call_soon(self.wake)

    def _open_gate(self, front: ClientEndpoint) -> None:
        """Lets clients of other machines in, where the configuration says so."""
        config = self.ctx.config
        if config.runtime.listen is None and config.cluster.cluster_listen is None:
            return
        from actorium.actors.runtime.security.curve_gate import open_curve_gate

        self._gate = open_curve_gate(self.ctx, self.context, front)
        if self._gate is not None:
            self.loop.add_reader(self._gate.fd, self._gate.serve)

    def _listen_to_signals(self) -> None:
        """Called within the loop: uvloop loses signals that arrive between this and its start.
        Before it, a signal ends the process, which has nothing to drain yet."""
        self.loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        self.loop.add_signal_handler(DRAIN_SIGNAL, self._on_drain)

    def _on_exception(self, _loop: Any, context: dict[str, Any]) -> None:
        """A callback raised: the core's state is unknown, so the actor ends."""
        self._failure = context.get("exception") or RuntimeError(str(context.get("message")))
        self.loop.stop()

    def _report_fatal(self, error: BaseException) -> int:
        """Log the error and send `Fatal`; returns the exit code."""
        loading = self._health.phase in ("starting", "loading")
        # A worker sees only numbers, and its errors are the device's.
        quotable = loading or self.ctx.role.startswith("worker")
        message, code = ((str(error), error.code) if isinstance(error, ActoriumError) else
                         (error_text(error, quotable), "internal"))
        stack = "".join(traceback.format_tb(error.__traceback__))
        LOG.error("fatal: %s", message, extra={"fields": error_fields(error)})
        fatal = Fatal(self.ctx.role, os.getpid(), self.ctx.epoch, message, stack, code)
        for role, linger in ((LAUNCHER, FATAL_LINGER_MS), (WATCHDOG, LINGER_MS)):
            if role != self.ctx.role:
                outbox = self._outbox(role)
                outbox.socket.setsockopt(zmq.LINGER, linger)
                with contextlib.suppress(Overflow):
                    outbox.send(fatal)
        return EXIT_BAD_CONFIG if isinstance(error, BadConfig | BadModel) else EXIT_FAULT

    def _close(self) -> None:
        self._heartbeats.stop()
        for socket in (self.inbox, self.front, self._gate, *self.outboxes.values()):
            if socket is not None:
                socket.close()
        if self._commit_log is not None:
            self._commit_log.close()
        self.context.term()  # waits a fraction of a second for messages on their way
        self.loop.close()

    # --- the wake ---

    def post(self, call: Callable[[], None] | None = None) -> None:
        """From any thread: run `call` on the loop's thread (or nothing), then wake the core."""
        self.loop.call_soon_threadsafe(self._posted, call)

    def _posted(self, call: Callable[[], None] | None) -> None:
        if call is not None:
            call()
        self.wake_soon()

    def wake_soon(self) -> None:
        """Wake the core in this turn of the loop, once however often it is asked for."""
        if not self._wake_queued:
            self._wake_queued = True
            self.loop.call_soon(self.wake)

    def wake(self, front_due: bool = False) -> None:
        """Take a burst, ask the core, send; in the next turn of the loop again if more waits."""
        self._wake_queued = False
        core, inbox, front = self.core, self.inbox, self.front
        assert core is not None and inbox is not None
        now = monotonic()
        for message in inbox.receive(BURST):
            core.on_message(message, now)
        more = inbox.more
        if front is not None and (front_due or self._front_due or front.waiting):
            self._front_due = True
            self._receive_clients(core, front, now)
        sends = core.on_wake(now)
        if self._commit_log is not None:
            sends = self._commit(self._commit_log, sends, now)
        for send in sends:
            self._send(send, now)
        if front is not None:
            if front.lost or front.pace_changes:
                self._report_clients(core, front, now)
            self._front_due = self._front_due and front.pending()
            more = more or self._front_due
        if more:
            self.wake_soon()
        self._arm_timer(core, now)
        self._after_wake(core)

    def _receive_clients(self, core: Core, front: ClientEndpoint, now: float) -> None:
        for client, message in front.receive(BURST):
            core.on_client(client, message, now)
        for client, text in front.refused:
            core.on_bad_client(client, text)
        if front.waiting:
            front.flush()

    def _report_clients(self, core: Core, front: ClientEndpoint, now: float) -> None:
        """Reports to the core which clients fell behind or caught up, and which disconnected."""
        changes, lost = front.pace_changes, front.lost
        front.pace_changes, front.lost = [], []
        for client, slow in changes:
            core.on_client_slow(client, slow, now)
        for client in lost:
            core.on_client_lost(client, now)
        self.wake_soon()

    def _after_wake(self, core: Core) -> None:
        if self._health_timer is None:  # not now: the next actor wants the processor
            self._health_timer = self.loop.call_later(HEALTH_GAP, self._on_health_timer)
        if self._commit_log is not None:
            self._commit_log.maintain()
        self._stop_if_done(core)

    def _stop_if_done(self, core: Core) -> None:
        if self._drain_until is not None and core.done and self._all_sent():
            self.loop.stop()

    # --- sending ---

    def _commit(self, log: LedgerCommitter, sends: Sequence[Send], now: float) -> Sequence[Send]:
        was_full = log.full
        sends = log.commit(sends, now)
        if log.full and not was_full:
            self.loop.call_later(log.pause, self._on_commit_retry, log)
        return sends

    def _on_commit_retry(self, log: LedgerCommitter) -> None:
        now = monotonic()
        for send in log.retry(now):
            self._send(send, now)
        if log.full:
            self.loop.call_later(log.pause, self._on_commit_retry, log)
        if not log.holding:
            self.wake_soon()  # what the core held back may go on, with the ledger or without

    def _send(self, send: Send, now: float) -> None:
        if send.to == CLIENT:
            assert self.front is not None
            self._front_due = True
            self.front.send(send.client, send.message)
            if self.front.waiting:
                self._arm_retry()
        elif send.to == self.ctx.role:
            assert self.core is not None
            self.core.on_message(send.message, now)
            self.wake_soon()
        else:
            frame = encode(send.message)
            for role in self._ranks if send.to == WORKER else (send.to,):
                self._send_frame(role, frame, now)

    def _send_frame(self, role: str, frame: bytes, now: float) -> None:
        outbox = self._outbox(role)
        try:
            outbox.send_frame(frame)
        except Overflow:
            assert self.core is not None
            if not self.core.on_peer_stuck(role, now):
                raise
            outbox.drop_backlog()
        if outbox.waiting:
            self._flush_when_writable(role, outbox)

    def _outbox(self, role: str) -> Outbox:
        outbox = self.outboxes.get(role)
        if outbox is None:
            outbox = Outbox(self.context, address(self.ctx.run_dir, f"{role}.inbox"), hwm=self._hwm)
            self.outboxes[role] = outbox
        return outbox

    def _flush_when_writable(self, role: str, outbox: Outbox) -> None:
        """A pipe is full: watch its fd until the backlog is sent."""
        if role not in self._full_pipes:
            self._full_pipes.add(role)
            self.loop.add_reader(outbox.fd, self._flush, role)
        self._arm_retry()

    def _flush(self, role: str) -> None:
        outbox, dropping = self.outboxes[role], self.outboxes[role].dropping
        if dropping and self._commit_log is not None and self._commit_log.holding:
            return  # the messages held there are older than those that are dropped
        if outbox.flush():
            self.loop.remove_reader(outbox.fd)
            self._full_pipes.discard(role)
            if dropping:
                assert self.core is not None
                self.core.on_peer_back(role, monotonic())
            self.wake_soon()

    def _arm_retry(self) -> None:
        """Try again soon: a send to one peer may swallow the edge of another peer's fd."""
        if self._retry_timer is None:
            self._retry_timer = self.loop.call_later(RETRY, self._on_retry)

    def _on_retry(self) -> None:
        self._retry_timer = None
        for role in tuple(self._full_pipes):
            self._flush(role)
        if self.front is not None and self.front.waiting:
            self.front.flush()
            self._front_due = True
            self.wake_soon()
        if not self._all_sent():
            self._arm_retry()

    def _all_sent(self) -> bool:
        held = self._commit_log is not None and self._commit_log.holding
        return not held and not any(box.waiting for box in self.outboxes.values()) and not (
            self.front is not None and self.front.waiting)

    # --- timer ---

    def _arm_timer(self, core: Core, now: float) -> None:
        """Wake at `next_timer`. An earlier timer that is no longer wanted fires without effect."""
        due = core.next_timer()
        if due is None or due >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        # Rounded up to uvloop's milliseconds, or it would fire early and spin.
        self._timer = self.loop.call_later(max(0, math.ceil((due - now) * 1e3)) / 1e3,
                                           self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        assert self.core is not None
        now = monotonic()
        due = self.core.next_timer()
        if due is not None and due <= now:
            self.wake()
        else:
            self._arm_timer(self.core, now)

    # --- heartbeats ---

    def _read_health(self, now: float) -> None:
        """Read the core's health, for the heartbeats to report."""
        assert self.core is not None
        old, health, journal = self._health, self.core.health(), self.core.journal
        if gauges := (journal.gauges() if journal is not None else {}) | self._rejections():
            health = health._replace(gauges=health.gauges | gauges)
        self._health = health
        self._health_at = now
        if self._health.detail and self._health.detail != old.detail:
            LOG.info("%s", self._health.detail)
        self._heartbeats.update(self._health)

    def _rejections(self) -> dict[str, float]:
        """Counts of bad frames and of refused connections, where there were any."""
        bad = sum(box.bad.total for box in (self.inbox, self.front) if box is not None)
        refused = self._gate.refused if self._gate is not None else 0
        counts = {"bad_frames": float(bad), "refused_connections": float(refused)}
        return {name: count for name, count in counts.items() if count}

    def _on_health_timer(self) -> None:
        self._health_timer = None
        self._read_health(monotonic())

    def _ask_loop(self) -> None:
        """Called by the heartbeats' thread: does the loop turn?"""
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self._on_asked)

    def _on_asked(self) -> None:
        self._heartbeats.loop_turned()
        now = monotonic()
        if now - self._health_at >= HEALTH_GAP:
            self._read_health(now)
        if self._commit_log is not None:
            self._commit_log.maintain()  # an idle actor's files may go as well
        if self.core is not None:
            self._stop_if_done(self.core)  # it may have come to its end without a wake

    # --- stopping ---

    def _on_drain(self) -> None:
        """Admit nothing new from here on, and keep running until SIGTERM."""
        assert self.core is not None
        self.core.drain(monotonic())
        self.wake_soon()

    def _on_sigterm(self) -> None:
        """Drain; a second signal, or the drain timeout, stops at once."""
        assert self.core is not None
        if self._drain_until is not None:
            self.loop.stop()
            return
        timeout = self.ctx.config.runtime.drain_timeout
        self._drain_until = monotonic() + timeout
        self.loop.call_later(timeout, self.loop.stop)
        self._on_drain()

