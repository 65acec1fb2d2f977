"""The thin shell around a pure core: sockets, loop, timer, signals, health, epoch, last words.

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
from actorium.actors.runtime.heartbeat import LAUNCHER, WATCHDOG, Beats
from actorium.actors.runtime.inflight_journal import InflightJournal
from actorium.actors.runtime.logs import stack_of, words_of
from actorium.actors.runtime.mailbox import CLIENT_HWM, Front, Inbox, Outbox, Overflow
from actorium.actors.runtime.process import (
    DRAIN_SIGNAL,
    EXIT_BAD_CONFIG,
    EXIT_DRAINED,
    EXIT_FAULT,
)
from actorium.actors.runtime.rundir import address
from actorium.actors.runtime.security.curve_gate import CurveGate, open_curve_gate

if TYPE_CHECKING:
    from actorium.actors.ledger.committer import LedgerCommitter

LOG = logging.getLogger("actorium.shell")
BURST = 256
"""Messages taken from one socket before the core is asked what to send."""
BEAT_GAP = 0.01
"""Seconds between two looks at a busy core's health: a new phase is told within that time."""
RETRY = 0.02
"""Seconds after which a full pipe is tried again, should its fd not have told."""


def run_actor(build: Callable[[Context], Core], ctx: Context) -> int:
    """Run one actor until it is told to stop, or fails. Returns the exit code of its process.

    0 drained; 1 a fault of the core; 2 `BadConfig` or `BadModel`. The watchdog and the launcher
    are told of a fault by `Fatal`.
    """
    return Shell(ctx).run(build)


class Shell:
    """One actor."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.loop = uvloop.new_event_loop()
        self.context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self.core: Core | None = None
        self.inbox: Inbox | None = None
        self.front: Front | None = None
        self._gate: CurveGate | None = None
        self._commits: LedgerCommitter | None = None
        self.outboxes: dict[str, Outbox] = {}
        self._hwm = ctx.config.runtime.queue_messages
        self._watched: set[str] = set()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._drain_until: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._wake_queued = False
        self._health = Health("starting", 0, ctx.config.runtime.start_timeout)
        self._beats = Beats(ctx, self.context, self._health, self._ask_loop)
        self._journal: InflightJournal | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._looked_at = -math.inf

    # --- life ---

    def run(self, build: Callable[[Context], Core]) -> int:
        try:
            self._beats.start()
            self.core = build(self.ctx)
            self._journal = self._beats.journal = self.core.journal
            gc.freeze()  # what start-up made lives to the end: not worth a collector's look
            self._start(self.core)
            self.loop.run_forever()
        except Exception as error:
            self._failure = error
        code = EXIT_DRAINED if self._failure is None else self._last_words(self._failure)
        self._close()
        return code

    def _start(self, core: Core) -> None:
        role, run_dir = self.ctx.role, self.ctx.run_dir
        self.loop.set_exception_handler(self._on_exception)
        self.loop.call_soon(self._listen_to_signals)
        self.inbox = Inbox(self.context, address(run_dir, f"{role}.inbox"), core.inbox,
                           hwm=self._hwm)
        self.loop.add_reader(self.inbox.fd, self.wake)
        if core.front is not None:
            self.front = Front(self.context, address(run_dir, f"{role}.front"), core.front,
                               hwm=min(self._hwm, CLIENT_HWM))
            self.loop.add_reader(self.front.fd, self.wake)
            self._gate = open_curve_gate(self.ctx, self.context, self.front)
            if self._gate is not None:
                self.loop.add_reader(self._gate.fd, self._gate.serve)
        if core.ledger is not None:
            from actorium.actors.ledger.committer import LedgerCommitter

            patience = self.ctx.config.recovery.ledger_patience
            self._commits = LedgerCommitter(core, core.ledger, patience)
        core.on_start(self.post)
        self.loop.call_soon(self.wake)

    def _listen_to_signals(self) -> None:
        """Within the loop: uvloop loses what arrives between this and its start. Before it, a
        signal ends the process, which has nothing to drain yet."""
        self.loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        self.loop.add_signal_handler(DRAIN_SIGNAL, self._on_drain)

    def _on_exception(self, _loop: Any, context: dict[str, Any]) -> None:
        """A callback raised: the core is in no known state, so this is the end of the actor."""
        self._failure = context.get("exception") or RuntimeError(str(context.get("message")))
        self.loop.stop()

    def _last_words(self, error: BaseException) -> int:
        bad = isinstance(error, BadConfig | BadModel)
        known = isinstance(error, ActoriumError)
        loading = self._health.phase in ("starting", "loading")
        # A worker sees numbers alone, and its errors are the device's.
        quotable = loading or self.ctx.role.startswith("worker")
        message = str(error) if known else words_of(error, quotable)
        stack = "".join(traceback.format_tb(error.__traceback__))
        LOG.error("fatal: %s", message, extra={"fields": stack_of(error)})
        code = error.code if isinstance(error, ActoriumError) else "internal"
        fatal = Fatal(self.ctx.role, os.getpid(), self.ctx.epoch, message, stack, code)
        for role in (LAUNCHER, WATCHDOG):
            if role != self.ctx.role:
                with contextlib.suppress(Overflow):
                    self._outbox(role).send(fatal)
        return EXIT_BAD_CONFIG if bad else EXIT_FAULT

    def _close(self) -> None:
        self._beats.stop()
        for socket in (self.inbox, self.front, self._gate, *self.outboxes.values()):
            if socket is not None:
                socket.close()
        if self._commits is not None:
            self._commits.close()
        self.context.term()  # waits for what is on its way, a fraction of a second at the most
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

    def wake(self) -> None:
        """Take a burst, ask the core, send. Goes on in the next turn of the loop if more waits."""
        self._wake_queued = False
        core, inbox, front = self.core, self.inbox, self.front
        assert core is not None and inbox is not None
        now = monotonic()
        for message in inbox.receive(BURST):
            core.on_message(message, now)
        more = inbox.more
        look_again = front is not None and (front.waiting or front.pending())
        if front is not None and look_again:
            self._take_clients(core, front, now)
        sends = core.on_wake(now)
        if self._commits is not None:
            sends = self._commit(self._commits, sends, now)
        for send in sends:
            self._send(send, now)
        if front is not None:
            if front.lost or front.turned:
                self._tell_of_clients(core, front, now)
            # Sending on the front may have taken the edge of what clients sent meanwhile.
            more = more or ((look_again or bool(sends)) and front.pending())
        if more:
            self.wake_soon()
        self._arm_timer(core, now)
        self._after_wake(core, now)

    def _take_clients(self, core: Core, front: Front, now: float) -> None:
        for client, message in front.receive(BURST):
            core.on_client(client, message, now)
        for client, text in front.refused:
            core.on_bad_client(client, text)
        if front.waiting:
            front.flush()

    def _tell_of_clients(self, core: Core, front: Front, now: float) -> None:
        """Who has fallen behind or caught up, and who is gone."""
        (turned, front.turned), (lost, front.lost) = (front.turned, []), (front.lost, [])
        for client, slow in turned:
            core.on_client_slow(client, slow, now)
        for client in lost:
            core.on_client_gone(client, now)
        self.wake_soon()

    def _after_wake(self, core: Core, now: float) -> None:
        if now - self._looked_at >= BEAT_GAP:
            self._look(now)
        elif self._look_timer is None:  # this wake may be the last for long
            self._look_timer = self.loop.call_later(BEAT_GAP, self._on_look_timer)
        if self._commits is not None:
            self._commits.maintain()
        if self._drain_until is not None and core.done and self._all_sent():
            self.loop.stop()

    # --- sending ---

    def _commit(self, commits: LedgerCommitter, sends: Sequence[Send], now: float
                ) -> Sequence[Send]:
        was_full = commits.full
        sends = commits.commit(sends, now)
        if commits.full and not was_full:
            self.loop.call_later(commits.pause, self._on_commit_retry, commits)
        return sends

    def _on_commit_retry(self, commits: LedgerCommitter) -> None:
        now = monotonic()
        for send in commits.retry(now):
            self._send(send, now)
        if commits.full:
            self.loop.call_later(commits.pause, self._on_commit_retry, commits)
        else:
            self.wake_soon()

    def _send(self, send: Send, now: float) -> None:
        if send.to == CLIENT:
            assert self.front is not None
            self.front.send(send.client, send.message)
            if self.front.waiting:
                self._arm_retry()
        elif send.to == self.ctx.role:
            assert self.core is not None
            self.core.on_message(send.message, now)
            self.wake_soon()
        else:
            outbox = self._outbox(send.to)
            try:
                outbox.send(send.message)
            except Overflow:
                assert self.core is not None
                if not self.core.on_missed(send.to, now):
                    raise
                outbox.give_up()
            if outbox.waiting:
                self._watch(send.to, outbox)

    def _outbox(self, role: str) -> Outbox:
        outbox = self.outboxes.get(role)
        if outbox is None:
            outbox = Outbox(self.context, address(self.ctx.run_dir, f"{role}.inbox"),
                            hwm=self._hwm)
            self.outboxes[role] = outbox
        return outbox

    def _watch(self, role: str, outbox: Outbox) -> None:
        """A pipe is full: listen to its fd until its backlog is sent."""
        if role not in self._watched:
            self._watched.add(role)
            self.loop.add_reader(outbox.fd, self._flush, role)
        self._arm_retry()

    def _flush(self, role: str) -> None:
        outbox, deaf = self.outboxes[role], self.outboxes[role].deaf
        if deaf and self._commits is not None and self._commits.holding:
            return  # what is held there is from before that which is dropped
        if outbox.flush():
            self.loop.remove_reader(outbox.fd)
            self._watched.discard(role)
            if deaf:
                assert self.core is not None
                self.core.on_hears(role, monotonic())
            self.wake_soon()

    def _arm_retry(self) -> None:
        """Try again soon: a send to one peer may swallow the edge that was meant for another."""
        if self._retry_timer is None:
            self._retry_timer = self.loop.call_later(RETRY, self._on_retry)

    def _on_retry(self) -> None:
        self._retry_timer = None
        for role in tuple(self._watched):
            self._flush(role)
        if self.front is not None and self.front.waiting:
            self.front.flush()
            self.wake_soon()
        if not self._all_sent():
            self._arm_retry()

    def _all_sent(self) -> bool:
        held = self._commits is not None and self._commits.holding
        return not held and not any(box.waiting for box in self.outboxes.values()) and not (
            self.front is not None and self.front.waiting)

    # --- timer ---

    def _arm_timer(self, core: Core, now: float) -> None:
        """Wake at `next_timer`. An earlier alarm that is no longer wanted rings for nothing."""
        due = core.next_timer()
        if due is None or due >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        # Rounded up to uvloop's milliseconds, or it would ring early and spin.
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

    def _look(self, now: float) -> None:
        """Look at the core's health, for the beats to tell."""
        assert self.core is not None
        old, health = self._health, self.core.health()
        if self._journal is not None and (gauges := self._journal.gauges()):
            health = health._replace(gauges=health.gauges | gauges)
        if told := self._strangers():
            health = health._replace(gauges=health.gauges | told)
        self._health = health
        self._looked_at = now
        if self._health.detail and self._health.detail != old.detail:
            LOG.info("%s", self._health.detail)
        self._beats.tell(self._health)

    def _strangers(self) -> dict[str, float]:
        """Frames that were no messages, and connections that were not let in."""
        bad = sum(box.bad.total for box in (self.inbox, self.front) if box is not None)
        refused = self._gate.refused if self._gate is not None else 0
        counts = {"bad_frames": float(bad), "refused_connections": float(refused)}
        return {name: count for name, count in counts.items() if count}

    def _on_look_timer(self) -> None:
        self._look_timer = None
        self._look(monotonic())

    def _ask_loop(self) -> None:
        """From the thread of the beats: does the loop turn?"""
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._beats.answer()
        now = monotonic()
        if now - self._looked_at >= BEAT_GAP:
            self._look(now)

    # --- stopping ---

    def _on_drain(self) -> None:
        """Admit nothing new from here on, and go on until SIGTERM."""
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

